"""What the second job of a deferring layer costs: the same experts as one job and as two, with no device beside them.

Deferral makes two jobs of a layer's experts. What that takes is measured apart from the timeline of any K, so that a
simulation which is given it still predicts how experts and device overlap.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ktc.emulate.lane import EmulatedLane

_SECONDS, _MOST_ROUNDS = 2.0, 20


def second_job_seconds(lane: EmulatedLane, records: Sequence[int]) -> float:
    """Median over layers, steps and splits of (two jobs back to back - one job), not below 0.

    Every split that leaves two immediate experts has its turn, steps and layers follow each other as in a replay (so
    weights are as cold), and one job and two take turns, whoever is first.

    Args:
        records: steps recorded without deferral. Where no expert may be deferred there is no second job: 0.
    """
    splits = range(1, lane.costs.max_deferred + 1)
    found: list[NDArray[np.float64]] = []
    began = time.monotonic()
    for round_ in range(_MOST_ROUNDS if splits else 0):
        if round_ and time.monotonic() - began > _SECONDS:
            break
        for turn, deferred in enumerate(splits):
            order = (0, deferred) if (round_ + turn) % 2 == 0 else (deferred, 0)
            times = {k: np.array([lane.time_jobs(number, k) for number in records]) for k in order}
            found.append((times[deferred] - times[0])[:, :-1])  # the last layer defers none
    differences = np.concatenate([d.ravel() for d in found]) if found else np.zeros(0)
    return max(0.0, float(statistics.median(differences))) if differences.size else 0.0
