"""What an expert job takes by itself, whatever it reads: one-token calls with 1, 2, ... experts, and their line.

The line's intercept is the job's own time (hand-over to the workers, barriers between its phases, tasks that are too
small), its slope is what one expert more takes. Who writes them into a hardware profile is machine_profile.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ktc.perf.experts import KtcExperts
from ktc.perf.interleave import Turn, take_turns
from ktc.perf.limits import Sampler
from ktc.perf.routing import Dealer, draw

_CALLS = 32


@dataclass(frozen=True)
class JobLine:
    """Seconds of a one-token call with k experts: job + k * expert."""

    job: float
    expert: float

    def seconds(self, experts: int) -> float:
        return self.job + experts * self.expert


def fit(seconds: Sequence[float], least: float = 0.0, job: float | None = None) -> JobLine:
    """The least-squares line whose intercept is not negative and whose slope is at least `least`.

    Args:
        seconds: of calls with 1, 2, ... experts. With one figure only there is no telling them apart: job is 0.
        least: seconds that no expert can be read in less than.
        job: known from elsewhere: only the slope is fitted.
    """
    times = np.asarray(seconds, np.float64)
    k = np.arange(1, len(times) + 1)

    def slope_above(intercept: float) -> float:
        return max(least, float((k * (times - intercept)).sum() / (k * k).sum()))

    if job is not None:
        return JobLine(job, slope_above(job))
    if len(times) == 1:
        return JobLine(0.0, slope_above(0.0))
    slope, intercept = (float(v) for v in np.polyfit(k, times, 1))
    if slope < least:
        slope, intercept = least, float((times - least * k).mean())
    return JobLine(intercept, slope) if intercept > 0 else JobLine(0.0, slope_above(0.0))


def time_by_experts(
    contestants: Sequence[KtcExperts], most: int, seconds: float, sampler: Sampler | None = None, seed: int = 0
) -> list[tuple[float, ...]]:
    """For each contestant the median seconds of a one-token call with 1 to `most` experts, all in turns, weights cold.

    Args:
        seconds: roughly how long each of the figures is timed.
        sampler: takes one sample of the limits per round.
    """
    turns = []
    for contestant in contestants:
        rng = np.random.default_rng(seed)
        shape = contestant.weights.shape
        dealer = Dealer(rng, contestant.layers, contestant.experts)
        x = rng.standard_normal((1, shape.hidden), dtype=np.float32)
        for k in range(1, most + 1):
            calls = [draw(rng, replace(shape, top_k=k), 1) for _ in range(_CALLS)]
            turns.append(Turn(contestant.with_top_k(k), [x], calls, dealer))
    medians = [timing.median for timing in take_turns(turns, seconds, sampler)]
    return [tuple(medians[i : i + most]) for i in range(0, len(medians), most)]
