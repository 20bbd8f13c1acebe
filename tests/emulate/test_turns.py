"""Turns: the arithmetic over times that are known beforehand, the order, and a real lane."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ktc.emulate import EmulatedLane
from ktc.emulate.turns import Turns, contestants, order, take_turns
from tests.emulate.conftest import LAYERS, TOP_K


@dataclass
class KnownReplay:
    experts: np.ndarray


class Known:
    """A lane whose experts take 130 us a layer at K = 0, 100 us on a pool that never runs out of jobs, and `job` more
    as two jobs; the last layer has one job. Every seventh step is interrupted."""

    def __init__(self, job: float, max_deferred: int = 3) -> None:
        self.costs: Any = SimpleNamespace(max_deferred=max_deferred)
        self.job = job
        self.calls: list[tuple[str, int, int]] = []

    def _times(self, times: np.ndarray) -> np.ndarray:
        return times + 1e-3 * (len(self.calls) % 7 == 0)

    def replay(self, number: int) -> KnownReplay:
        self.calls.append(("replay", number, 0))
        return KnownReplay(self._times(np.full(4, 130e-6)))

    def time_jobs(self, number: int, deferred: int) -> np.ndarray:
        self.calls.append(("jobs", number, deferred))
        times = np.full(4, 100e-6)
        times[:-1] += self.job * bool(deferred)
        return self._times(times)


def turns(lane: Known, records: dict[int, list[int]], repeats: int = 9) -> Turns:
    return take_turns(lane, records, repeats)  # type: ignore[arg-type]


def test_what_jobs_cost_is_worked_out_by_medians() -> None:
    lane = Known(35e-6)
    found = turns(lane, {0: [0, 1, 2], 2: [3, 4, 5]})
    assert found.middle(0, lambda r: r.experts) == pytest.approx(130e-6)
    assert found.second_job == pytest.approx(35e-6) and found.start == pytest.approx(30e-6)
    splits = Counter(deferred for what, _, deferred in lane.calls if what == "jobs")
    assert splits == {0: 27, 1: 9, 2: 9, 3: 9}  # every split as often as every other
    replayed = Counter(number for what, number, _ in lane.calls if what == "replay")
    assert set(replayed.values()) == {9} and len(replayed) == 6
    assert {number for what, number, _ in lane.calls if what == "jobs"} == {0, 1, 2}  # those of K = 0


def test_no_job_costs_less_than_nothing_and_none_is_timed_where_nothing_can_be_deferred() -> None:
    assert turns(Known(-35e-6), {0: [0]}).second_job == 0
    nobody = Known(35e-6, max_deferred=0)
    found = turns(nobody, {0: [0, 1]})
    assert found.second_job == found.start == 0 and all(what == "replay" for what, _, _ in nobody.calls)


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (3, 1), (4, 6), (7, 2), (9, 6)])
def test_a_turn_has_every_pair_once_and_the_steps_in_order(count: int, steps: int) -> None:
    for turn in range(2):
        pairs = list(order(count, steps, turn))
        assert sorted(pairs) == [(c, s) for c in range(count) for s in range(steps)]
        assert all(b == (a + 1) % steps for (_, a), (_, b) in pairwise(pairs))
        if count > 1 and steps > 1:
            assert all(a != b for (a, _), (b, s) in pairwise(pairs) if s)
    assert [next(order(count, steps, turn)) for turn in range(2)] == [(0, 0), (count - 1, 0)]


def test_of_a_real_lane(lane: EmulatedLane) -> None:
    lane.graph.step(np.array([5, 9], np.int64), 0)
    records = {k: [lane.record(11, 2, k)[0]] for k in (0, 2)}
    called: list[int] = []
    found = take_turns(lane, records, 2, lambda: called.append(1))
    assert len(called) == 2 * contestants(lane, records) == 8
    assert found.medians(2, lambda r: r.experts).shape == (1, LAYERS) and np.array(found.two).shape == (2, 1, LAYERS)
    assert lane.costs.max_deferred == TOP_K - 2 and 0 <= found.second_job < 1.0 and 0 <= found.start < 1.0
