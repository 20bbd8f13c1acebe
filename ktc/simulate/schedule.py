"""Costs and a number of deferred experts -> tasks and what they wait for: the decode graph as the engine runs it.

With I_l the input of layer l's MoE block, S its shared experts, R^imm and R^def its routed experts split by
router weight: O_l = I_l + S(I_l) + R^imm_l(I_l) + R^def_{l-1}(I_{l-1}); the last MoE layer defers none.
The device works in program order, as one CUDA stream does: attention, norms and router; the copy out; the
submit callback, which queues the layer's immediate experts and then its deferred ones; the shared experts;
the sync callback, which waits for the immediate experts of this layer and the deferred ones of the layer
before; the copy back; the additions. The pool takes what was queued in order. Immediate and deferred experts of a
layer are a job each, and a job costs something by itself: a layer that defers pays that twice. A job that finds the
pool idle takes a little more than one that was queued behind another.
"""

from __future__ import annotations

from ktc.simulate.costs import Costs, LayerCost
from ktc.simulate.events import Task

DEVICE, LINK, HOST = "device", "link", "host"


def cpu_lane(socket: int) -> str:
    return f"cpu{socket}"


def build(costs: Costs, deferred: int = 0) -> list[Task]:
    """Tasks of one forward pass.

    Args:
        deferred: experts deferred per MoE layer; a layer keeps at least two immediate ones.
    Raises:
        ValueError: `deferred` is negative or leaves fewer than two immediate experts.
    """
    if deferred and not 0 <= deferred <= costs.max_deferred:
        raise ValueError(f"{deferred} deferred experts: 0 to {costs.max_deferred} work")
    return _Builder(costs, deferred).build()


class _Builder:
    """`stream` is the last task of the device's program order; `pending` the deferred work not yet added."""

    def __init__(self, costs: Costs, deferred: int) -> None:
        self.costs, self.deferred = costs, deferred
        self.tasks: list[Task] = []
        self.stream: tuple[int, ...] = ()
        self.pending: tuple[int, ...] = ()
        moe = [c.index for c in costs.layers if c.top_k]
        self.last_moe = moe[-1] if moe else -1

    def build(self) -> list[Task]:
        for layer in self.costs.layers:
            self._device("attention", layer.index, layer.attention)
            if layer.top_k:
                self._moe(layer)
        self._device("head", len(self.costs.layers), self.costs.head)
        return self.tasks

    def _moe(self, layer: LayerCost) -> None:
        index = layer.index
        if not self.costs.shared_lane:
            self._then("copy out", index, LINK, self.costs.copy)
            self._then("submit", index, HOST, self.costs.submit)
        later = 0 if index == self.last_moe else self.deferred
        submitted = self.stream
        immediate = self._experts("immediate", layer, layer.top_k - later, submitted)
        deferred = self._experts("deferred", layer, later, submitted)
        if layer.shared:
            self._device("shared", index, layer.shared)
        awaited = (*immediate, *self.pending)
        if self.costs.shared_lane:
            self.stream = (*self.stream, *awaited)
        else:
            self._then("sync", index, HOST, self.costs.sync, awaited)
            self._then("copy back", index, LINK, self.costs.copy)
        self._device("merge", index, layer.merge)
        self.pending = deferred

    def _experts(self, kind: str, layer: LayerCost, count: int, after: tuple[int, ...]) -> tuple[int, ...]:
        if count == 0:
            return ()
        return tuple(
            self._add(
                kind,
                layer.index,
                cpu_lane(socket),
                seconds * count / layer.top_k + self.costs.job,
                after,
                start=self.costs.start,
            )
            for socket, seconds in enumerate(layer.routed)
        )

    def _device(self, kind: str, layer: int, seconds: float) -> None:
        if not self.costs.shared_lane:
            self._then(kind, layer, DEVICE, seconds)
        elif seconds:  # the pool is the device: every socket does its part
            lanes = range(self.costs.sockets)
            self.stream = tuple(self._add(kind, layer, cpu_lane(s), seconds, self.stream) for s in lanes)

    def _then(self, kind: str, layer: int, lane: str, seconds: float, awaits: tuple[int, ...] = ()) -> None:
        self.stream = (self._add(kind, layer, lane, seconds, self.stream, awaits),)

    def _add(
        self,
        kind: str,
        layer: int,
        lane: str,
        seconds: float,
        after: tuple[int, ...],
        awaits: tuple[int, ...] = (),
        start: float = 0.0,
    ) -> int:
        self.tasks.append(Task(f"L{layer} {kind}", kind, layer, lane, seconds, after, awaits, start))
        return len(self.tasks) - 1
