"""Slices -> busy, overlapping and idle time. Pure arithmetic over intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ktc.simulate.events import Slice
from ktc.simulate.schedule import DEVICE

Interval = tuple[float, float]


@dataclass(frozen=True)
class Use:
    """Shares of a window of time, 0 to 1; sockets are averaged. cpu + device - both + idle = 1.

    Attributes:
        both: expert pool and device work at once (the overlap).
        idle: neither does: copies, callbacks, waiting.
    """

    cpu: float
    device: float
    both: float
    idle: float


def busy(slices: Iterable[Slice], lane: str) -> list[Interval]:
    """The times at which `lane` works, sorted and disjoint; time spent awaiting others is not work."""
    intervals = sorted((s.end - s.task.seconds, s.end) for s in slices if s.task.lane == lane and s.task.seconds > 0)
    merged: list[Interval] = []
    for begin, end in intervals:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    low, high = window
    return [(max(b, low), min(e, high)) for b, e in intervals if e > low and b < high]


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Time in both of two sorted, disjoint lists."""
    i = j = 0
    found = 0.0
    while i < len(left) and j < len(right):
        found += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def use(slices: Sequence[Slice], window: Interval) -> Use:
    """How the window was used. The window must not be empty."""
    span = window[1] - window[0]
    device = clip(busy(slices, DEVICE), window)
    lanes = sorted({s.task.lane for s in slices if s.task.lane.startswith("cpu")})
    pools = [clip(busy(slices, lane), window) for lane in lanes]
    cpu_share = sum(map(total, pools)) / (len(pools) * span)
    both = sum(intersection(pool, device) for pool in pools) / (len(pools) * span)
    device_share = total(device) / span
    return Use(cpu_share, device_share, both, max(0.0, 1.0 - cpu_share - device_share + both))


def steady_window(slices: Sequence[Slice]) -> tuple[Interval, int]:
    """The part of a step where MoE layer follows MoE layer, and how many layers it spans.

    From the start of the second MoE layer to the start of the last, so that neither the first, which
    finds no deferred experts, nor the last, which defers none, is in it. With fewer than three MoE
    layers it is the whole step.
    """
    moe = sorted({s.task.layer for s in slices if s.task.kind == "immediate"})
    starts: dict[int, float] = {}
    for s in slices:
        if s.task.kind == "attention":
            starts[s.task.layer] = min(s.start, starts.get(s.task.layer, s.start))
    if len(moe) < 3 or not all(layer in starts for layer in moe):
        return (0.0, max(s.end for s in slices)), len(starts) or 1
    return (starts[moe[1]], starts[moe[-1]]), moe[-1] - moe[1]
