"""Replays and expert jobs in turns, so that what the rest of the machine does meanwhile falls on all of them alike.

Contestants are replays for every K, and the experts by themselves, as one job and as two. A turn has each contestant
once with every recorded step; steps follow each other in the order of decoding, whoever's turn it is, so that a step's
weights are as cold for all; and the contestant changes with every step, so that all of them are spread over the
whole turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ktc.emulate.lane import EmulatedLane, Replay

Values = NDArray[np.float64]


@dataclass
class Turns:
    """What was measured, turn by turn.

    Attributes:
        replays: of each K, [turn][step].
        one, two: seconds of the experts of every block on a pool that never runs out of jobs and with no device beside
            them, one [step, block] a turn: as one job, and as two with some split. Without deferral there are none.
    """

    replays: dict[int, list[list[Replay]]]
    one: list[Values] = field(default_factory=list)
    two: list[Values] = field(default_factory=list)

    def medians(self, k: int, of: Callable[[Replay], Values]) -> Values:
        """[step, block]: the median over the turns of a K."""
        return _medians([np.array([of(r) for r in turn]) for turn in self.replays[k]])

    def middle(self, k: int, of: Callable[[Replay], Values]) -> float:
        """Mean over steps and over the blocks of a step's middle, which `steady_window` spans too."""
        return _middle([np.array([of(r) for r in turn]) for turn in self.replays[k]])

    def all(self) -> list[Replay]:
        return [r for turns in self.replays.values() for turn in turns for r in turn]

    @property
    def second_job(self) -> float:
        """What the second job of a deferring layer costs, seconds, not below 0: two jobs less one.

        Each split that leaves two immediate experts has its turns. No timeline of K > 0 goes into this, so a
        simulation that is given it still predicts how experts and device overlap.
        """
        return max(0.0, _middle(self.two) - _middle(self.one)) if self.one else 0.0

    @property
    def start(self) -> float:
        """How much longer the experts of K = 0 take, which always find the pool idle, than on a pool that never runs
        out of jobs; seconds, not below 0."""
        return max(0.0, self.middle(0, lambda r: r.experts) - _middle(self.one)) if self.one else 0.0


def _medians(turns: Sequence[Values]) -> Values:
    found: Values = np.median(turns, axis=0)
    return found


def _middle(turns: Sequence[Values]) -> float:
    values = _medians(turns)
    return float((values[:, 1:-1] if values.shape[1] > 2 else values).mean())


def contestants(lane: EmulatedLane, records: Mapping[int, Sequence[int]]) -> int:
    """Replays of every K; and, where experts can be deferred, jobs one by one and in pairs."""
    return len(records) + (2 if lane.costs.max_deferred else 0)


def order(count: int, steps: int, turn: int) -> Iterator[tuple[int, int]]:
    """(contestant, step) of one turn: every pair once. Every other turn goes through the contestants backwards."""
    for round_ in range(count):
        for step in range(steps):
            place = (round_ + step) % count
            yield (place if turn % 2 == 0 else count - 1 - place), step


def replay_steps(lane: EmulatedLane, records: Sequence[int], turns: int) -> Turns:
    """Some turns of a single K."""
    return Turns({0: [[lane.replay(number) for number in records] for _ in range(turns)]})


def take_turns(
    lane: EmulatedLane, records: Mapping[int, Sequence[int]], repeats: int, update: Callable[[], None] = lambda: None
) -> Turns:
    """
    Args:
        records: K -> numbers of its recorded steps, as many for each; K = 0 is among them.
        update: called after every replay and every step of jobs.
    """
    ks, steps = list(records), len(records[0])
    splits = list(range(1, lane.costs.max_deferred + 1))
    found = Turns({k: [] for k in ks})
    for turn in range(repeats):
        replays: dict[int, dict[int, Replay]] = {k: {} for k in ks}
        jobs: tuple[dict[int, Values], dict[int, Values]] = ({}, {})
        for contestant, step in order(contestants(lane, records), steps, turn):
            if contestant < len(ks):
                k = ks[contestant]
                replays[k][step] = lane.replay(records[k][step])
            else:
                two = contestant - len(ks)
                split = splits[(turn + step) % len(splits)] if two else 0
                jobs[two][step] = lane.time_jobs(records[0][step], split)
            update()
        for k in ks:
            found.replays[k].append([replays[k][step] for step in range(steps)])
        if splits:
            for values, into in zip(jobs, (found.one, found.two), strict=True):
                into.append(np.array([values[step] for step in range(steps)]))
    return found
