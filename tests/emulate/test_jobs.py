"""What a second job costs: the arithmetic over job times that are known beforehand, and a real lane."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ktc.emulate import EmulatedLane
from ktc.emulate.jobs import second_job_seconds
from tests.emulate.conftest import TOP_K


class Known:
    """A lane whose jobs take known times: 100 us of experts, `job` more where there are two; the last layer has one."""

    def __init__(self, job: float, max_deferred: int = 3) -> None:
        self.costs: Any = SimpleNamespace(max_deferred=max_deferred)
        self.job = job
        self.calls: list[tuple[int, int]] = []

    def time_jobs(self, number: int, deferred: int) -> np.ndarray:
        self.calls.append((number, deferred))
        times = np.full(4, 100e-6)
        times[:-1] += self.job * bool(deferred)
        if len(self.calls) % 7 == 0:
            times += 1e-3  # an interruption
        return times


def test_the_median_of_two_jobs_less_one() -> None:
    lane = Known(35e-6)
    assert second_job_seconds(lane, [0, 1]) == pytest.approx(35e-6)  # type: ignore[arg-type]
    per_split = {k: sum(1 for _, d in lane.calls if d == k) for k in range(4)}
    assert per_split[1] == per_split[2] == per_split[3] and per_split[0] == 3 * per_split[1]
    assert lane.calls[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]  # all steps, then all of them as two jobs
    assert lane.calls[4:8] == [(0, 2), (1, 2), (0, 0), (1, 0)]  # the other way round


def test_no_second_job_costs_less_than_nothing() -> None:
    assert second_job_seconds(Known(-35e-6), [0]) == 0  # type: ignore[arg-type]
    nobody = Known(35e-6, max_deferred=0)
    assert second_job_seconds(nobody, [0]) == 0 and nobody.calls == []  # type: ignore[arg-type]


def test_of_a_real_lane(lane: EmulatedLane) -> None:
    lane.graph.step(np.array([5, 9], np.int64), 0)
    number, _ = lane.record(11, 2, 0)
    assert lane.costs.max_deferred == TOP_K - 2
    assert 0 <= second_job_seconds(lane, [number]) < 1.0
