"""A graph executor with an emulated device: record real decode steps, replay them on the clock.

The pool must have been made with `caller_works=False`: the thread that replays stands for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.emulate.script import Script, block_nodes, build_script
from ktc.emulate.timeline import CPU, build_slices
from ktc.graph.build import GraphExecutor
from ktc.plan.ir import Plan
from ktc.simulate.costs import Costs, decode_costs
from ktc.simulate.events import Slice
from ktc.simulate.hardware import Hardware
from ktc.simulate.metrics import steady_window, total, use
from ktc.simulate.sweep import Row


@dataclass(frozen=True)
class Replay:
    """One replayed step.

    Attributes:
        row: the figures that `ktc simulate` has for a step, measured.
        cores: share of the threads' time in mid-model that they were inside tasks of the experts. (The row's CPU share
            counts the pool as busy from a job's first task to its end.)
        blocks: seconds of each MoE block, from its begin to the next one's (the last: to the step's end).
        experts: seconds that the pool spent on the experts of each block, immediate and deferred.
        submit: seconds from each due submit callback until a worker began on that block.
        sync: seconds from the last awaited expert (or the due moment) until the device went on, for each block.
        late: seconds by which each submit callback began after it was due.
        lane: seconds of CPU time that the lane's own thread took for the step; the workers do without them.
        realtime: the lane had real-time priority.
    """

    row: Row
    cores: float
    blocks: NDArray[np.float64]
    experts: NDArray[np.float64]
    submit: NDArray[np.float64]
    sync: NDArray[np.float64]
    late: NDArray[np.float64]
    lane: float
    realtime: bool

    @property
    def slices(self) -> tuple[Slice, ...]:
        return self.row.slices


class EmulatedLane:
    """One per executor.

    Attributes:
        hardware: whose device is emulated; `costs` and `script` follow from it.
        context: tokens in the cache that the device's attention is timed for, whatever the real cache holds.
    """

    def __init__(self, graph: GraphExecutor, plan: Plan, hardware: Hardware, context: int = 1024) -> None:
        """
        Raises:
            ProfileError: the profile has no device. KtcError: the program has no packed experts.
            ValueError: callers of the graph's pool work.
        """
        from ktc import _runtime

        self.graph, self.plan, self.context = graph, plan, context
        self._native: Any = None
        blocks = block_nodes(graph.program)
        submits = [n for n in graph.program.nodes if n.op == "moe_submit"]
        self._planned = max(int(n.params.get("n_deferred", 0)) for n in submits)
        self.retime(hardware)  # complains about the profile first
        self._native = _runtime.EmulatedLane(graph.native, graph.pool, blocks)
        self._deferred: list[int | None] = []  # of each record
        self._set_times()

    def retime(self, hardware: Hardware, context: int | None = None) -> None:
        """Emulate another device, or the same one with a longer cache."""
        self.hardware = hardware
        self.context = self.context if context is None else context
        self.costs: Costs = decode_costs(self.plan, hardware, context=self.context, numa="single")
        self.script: Script = build_script(self.graph.program, self.costs)
        if self._native is not None:
            self._set_times()

    def _set_times(self) -> None:
        self._native.set_times([block.times() for block in self.script.blocks], self.script.tail_ns())

    def record(self, token: int, position: int, deferred: int | None) -> tuple[int, NDArray[np.float32]]:
        """A real decode step. Returns the number of its record and its logits, f32 [vocab].

        Args:
            deferred: experts deferred per MoE layer; None = what the program says.

        Raises:
            KtcError: fewer than two experts would stay immediate. IndexError: the context is full.
        """
        self.graph.set_deferral(deferred)
        logits = np.empty((1, self.graph.program.vocab), np.float32)
        number: int = self._native.record(token, position, logits)
        self._deferred.append(deferred)
        row: NDArray[np.float32] = logits[0]
        return number, row

    def forget(self) -> None:
        """Drop the records."""
        self._native.forget()
        self._deferred.clear()

    def replay(self, number: int) -> Replay:
        """A recorded step on the clock, deferring as many experts as when it was recorded.

        Raises:
            RuntimeError: the experts came to other results than in the recorded step, bit for bit: a bug.
        """
        self.graph.set_deferral(self._deferred[number])
        raw = self._native.replay(number)
        if raw["differing"]:
            layers = [self.script.blocks[b].layer for b in raw["differing"]]
            raise RuntimeError(f"replayed experts of layers {layers} differ from the recorded step")
        slices = build_slices(self.script, raw)
        end = (raw["end"] - int(raw["blocks"][0][0])) * 1e-9
        window, layers_spanned = steady_window(slices)
        row = Row(
            deferred=self._planned if (asked := self._deferred[number]) is None else asked,
            layer_seconds=(window[1] - window[0]) / layers_spanned,
            token_seconds=end,
            layer=use(slices, window),
            token=use(slices, (0.0, end)),
            slices=slices,
        )
        cores = self._cores(slices, raw["jobs"], window)
        return Replay(
            row=row, cores=cores, lane=raw["lane_cpu"] * 1e-9, realtime=raw["realtime"], **self._per_block(slices, raw)
        )

    def time_jobs(self, number: int, deferred: int) -> NDArray[np.float64]:
        """Seconds of the experts of each MoE block of a recorded step on a pool that never runs out of jobs, with no
        device beside them: as one job, or as two, of which the second has the `deferred` lowest-weighted ones (the last
        block: none). A block is timed from the end of the one before, the first from its first task.

        Raises:
            KtcError: fewer than two experts would stay immediate.
        """
        self.graph.set_deferral(deferred)
        times: NDArray[np.int64] = self._native.time_jobs(number)
        return times.astype(np.float64) * 1e-9

    def _per_block(self, slices: tuple[Slice, ...], raw: dict[str, Any]) -> dict[str, Any]:
        """The arrays of a `Replay`, by name."""
        moments = raw["blocks"]
        begins = np.append(moments[:, 0], raw["end"])
        place = {block.layer: i for i, block in enumerate(self.script.blocks)}
        experts, submit, sync = (np.zeros(len(place)) for _ in range(3))
        due = {s.task.layer: s.start for s in slices if s.task.kind == "submit"}
        for s in slices:
            layer = s.task.layer
            if s.task.lane == CPU:
                experts[place[layer]] += s.end - s.start
            if s.task.kind == "immediate":
                submit[place[layer]] = s.start - due[layer]
            if s.task.kind == "sync":
                sync[place[layer]] = s.task.seconds
        late = (moments[:, 2] - moments[:, 1]) * 1e-9
        return {"blocks": np.diff(begins) * 1e-9, "experts": experts, "submit": submit, "sync": sync, "late": late}

    def _cores(self, slices: tuple[Slice, ...], jobs: NDArray[np.int64], window: tuple[float, float]) -> float:
        """A job that lies half in the window counts half."""
        pool = [s for s in slices if s.task.lane == CPU]
        busy = 0.0
        for s, own in zip(pool, jobs[:, 3] * 1e-9, strict=True):
            inside = total([(max(s.start, window[0]), min(s.end, window[1]))]) if s.end > window[0] else 0.0
            busy += own * max(0.0, inside) / max(s.end - s.start, 1e-12)
        return float(busy / ((window[1] - window[0]) * self.graph.pool.threads))
