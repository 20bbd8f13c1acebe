"""The moments of a replayed step -> slices, the simulator's own form of a timeline. Nothing is measured here.

So shares, windows and traces are computed by `ktc.simulate` for measured and for simulated steps alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.emulate.script import Script
from ktc.simulate.events import Slice, Task
from ktc.simulate.schedule import DEVICE, HOST, LINK, cpu_lane

CPU = cpu_lane(0)
"""One lane for the whole pool: its jobs run one after another, each on all nodes."""


class _Builder:
    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.slices: list[Slice] = []
        self.ends: dict[str, float] = {}

    def seconds(self, moment: float) -> float:
        return (moment - self.origin) * 1e-9

    def add(self, kind: str, layer: int, lane: str, start: float, end: float, own: float | None = None) -> float:
        """From `start` to `end` (s); `own` of it is the task's, the rest waiting. Returns `end`.

        Times of operators are not whole nanoseconds, moments are: what rounding makes overlap is cut.
        """
        start = max(start, self.ends.get(lane, start))
        self.ends[lane] = end = max(start, end)
        task = Task(f"L{layer} {kind}", kind, layer, lane, end - start if own is None else own)
        self.slices.append(Slice(task, start, end))
        return end


def build_slices(script: Script, replay: dict[str, Any]) -> tuple[Slice, ...]:
    """
    Args:
        replay: what `_runtime.EmulatedLane.replay` returns.
    Returns:
        slices in seconds from the step's begin; a submit or sync slice holds the time that it blocks the device's
        stream, and its task's own seconds the part that is not waiting for experts.
    """
    moments: NDArray[np.int64] = replay["blocks"]
    jobs = _jobs(replay["jobs"])
    out = _Builder(int(moments[0][0]))
    pending: float | None = None  # end of the deferred job that the next sync adds
    taken = 0
    for block, row in zip(script.blocks, moments, strict=True):
        begin, submit_due, _, submit_end, collect_due, _, collect_end = (out.seconds(float(m)) for m in row[:7])
        layer, now = block.layer, begin
        for work in block.before:
            now = out.add(work.kind, work.layer, DEVICE, now, now + work.seconds)
        out.add("copy out", layer, LINK, now, submit_due)
        out.add("submit", layer, HOST, submit_due, submit_end)
        mine = jobs[taken : taken + int(row[7])]
        taken += int(row[7])
        for kind, (start, end) in zip(("immediate", "deferred"), mine, strict=False):
            out.add(kind, layer, CPU, out.seconds(start), out.seconds(end))
        if block.shared:
            out.add("shared", layer, DEVICE, submit_end, collect_due)
        awaited = [collect_due, out.seconds(mine[0][1])] + ([pending] if pending is not None else [])
        own = max(0.0, collect_end - max(awaited))
        out.add("sync", layer, HOST, collect_due, collect_end, own)
        now = out.add("copy back", layer, LINK, collect_end, collect_end + block.copy)
        now = out.add("merge", layer, DEVICE, now, now + block.merge)
        pending = out.seconds(mine[1][1]) if len(mine) > 1 else None
    for work in script.tail:
        now = out.add(work.kind, work.layer, DEVICE, now, now + work.seconds)
    return tuple(out.slices)


def _jobs(times: NDArray[np.int64]) -> list[tuple[float, float]]:
    """(begin, end) of every job. Idle workers begin a job while the one before it runs its last tasks; here it counts
    from that one's end, so that they follow each other as they were submitted."""
    out: list[tuple[float, float]] = []
    for _, begun, done, _ in times:
        start = max(float(begun), out[-1][1]) if out else float(begun)
        out.append((start, max(start, float(done))))
    return out
