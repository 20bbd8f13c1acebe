"""Time contestants against each other in one run: A B C A B C ..., medians, limits sampled in between.

A machine's speed drifts by tens of percent; figures are comparable only if they were taken in turns, and a call is
compared with the limits of its own round: what memory delivers may change by half from one minute to the next. A turn
is a burst of consecutive calls, as consecutive layers are in a model, each timed by itself; the call before it is not
timed, so that sleeping threads are awake. Weights are cold in every call (routing.Deck, experts.layers_for).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ktc.perf.experts import Contestant
from ktc.perf.limits import Limits, Sampler
from ktc.perf.routing import Dealer, Routing
from ktc.perf.shapes import Floor

_BURST_SECONDS = 0.03
_MAX_BURST = 24
_MOMENT_SECONDS = 0.1
"""Rounds of so long in all share samples of the limits, which take about as long."""


@dataclass
class Timing:
    """Of one contestant's timed calls: seconds, experts touched, and the higher limits of before and after."""

    seconds: list[float] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def mean_active(self) -> float:
        return statistics.fmean(self.active)

    def quantile(self, q: float) -> float:
        return float(np.quantile(self.seconds, q))

    def times(self, roofline: Callable[[Limits], Floor]) -> float:
        """How many times its floor a call took under the limits of its round: the median over calls.

        Raises:
            ValueError: limits were not sampled.
        """
        return statistics.median(
            s / roofline(limits).seconds for s, limits in zip(self.seconds, self.limits, strict=True)
        )


def interleave(
    contestants: Sequence[Contestant],
    inputs: Sequence[NDArray[np.float32]],
    routings: Sequence[Routing],
    seconds: float,
    sampler: Sampler | None = None,
    min_rounds: int = 3,
    tick: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> list[Timing]:
    """Measure all contestants on the same calls.

    Args:
        inputs, routings: calls to go through in turn, f32 [T, H] each; a contestant renames experts by its own decks.
        seconds: roughly how long each contestant is timed; at least `min_rounds` rounds.
        sampler: takes one sample of the limits before and after every round, or several short ones.
        tick: called after every turn.
    Returns:
        one Timing per contestant, in order.
    """
    dealers = [Dealer(np.random.default_rng(seed + i), c.layers, c.experts) for i, c in enumerate(contestants)]
    turns = [Turn(c, inputs, routings, dealer) for c, dealer in zip(contestants, dealers, strict=True)]
    return take_turns(turns, seconds, sampler, min_rounds, tick)


def take_turns(
    turns: Sequence[Turn],
    seconds: float,
    sampler: Sampler | None = None,
    min_rounds: int = 3,
    tick: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """`interleave` for contestants that have calls of their own."""
    timings = [Timing() for _ in turns]
    for turn in turns:
        turn.burst = min(_MAX_BURST, max(1, round(_BURST_SECONDS / max(turn.time_one(), 1e-6))))
    spent = [0.0] * len(turns)
    moment_of: list[list[int]] = [[] for _ in turns]
    moments: list[Limits] = []
    sampled, rounds = 0.0, 0
    while rounds < min_rounds or min(spent) < seconds:
        if sampler is not None and (not moments or time.perf_counter() - sampled >= _MOMENT_SECONDS):
            moments.append(sampler.sample())
            sampled = time.perf_counter()
        for i, turn in enumerate(turns):
            if rounds >= min_rounds and spent[i] >= seconds:
                continue
            spent[i] += turn.run(timings[i])
            moment_of[i] += [len(moments) - 1] * turn.burst
            tick()
        rounds += 1
    if sampler is not None:
        moments.append(sampler.sample())
        for timing, calls in zip(timings, moment_of, strict=True):
            timing.limits = [moments[m].or_higher(moments[m + 1]) for m in calls]
    return timings


class Turn:
    """One contestant's place in the sequence of calls; contestants over the same weights share their `dealer`."""

    def __init__(
        self,
        contestant: Contestant,
        inputs: Sequence[NDArray[np.float32]],
        routings: Sequence[Routing],
        dealer: Dealer,
    ) -> None:
        self.contestant, self.inputs, self.routings = contestant, inputs, routings
        self._dealer = dealer
        self._count = 0
        self.burst = 1

    def _next(self) -> tuple[Callable[[], None], int]:
        i = self._count
        self._count += 1
        layer, routing = self._dealer.deal(self.routings[i % len(self.routings)])
        return self.contestant.prepare(layer, self.inputs[i % len(self.inputs)], routing), routing.active

    def time_one(self) -> float:
        """The better of two calls: the first may allocate scratch."""
        times = []
        for _ in range(2):
            call, _ = self._next()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    def run(self, timing: Timing) -> float:
        calls = [self._next() for _ in range(self.burst + 1)]
        calls[0][0]()
        total = 0.0
        for call, active in calls[1:]:
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            total += elapsed
            timing.seconds.append(elapsed)
            timing.active.append(active)
        time.sleep(self.contestant.settle)  # its threads must not run into the next contestant's turn
        return total
