"""A stand-in for CUDA graphs on torch's CPU device: operations are kept with their tensors, and replayed into them.

What a graph's replay means for memory is kept: every operation reads and writes the same addresses each time, nothing
of the model's Python runs in between, and a change that no operation reads again is not seen. It says nothing of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ktc.engine import ops

OURS = {"moe_submit": ops._moe_submit, "moe_collect": ops._moe_collect}


class RecordedGraph(TorchDispatchMode):
    """What is computed while it is the mode, and what is asked of a `RecordedLane` then."""

    open: RecordedGraph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], Any]] = []
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ktc":  # what it enqueues is captured, it is not called again
            with self:
                return OURS[func.overloadpacket.__name__](*args, **kwargs)
        out = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]

        def again() -> None:
            new = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            for old, fresh in zip(outputs, new, strict=True):
                if old.data_ptr() != fresh.data_ptr():
                    old.copy_(fresh)

        self.work.append(again)
        return out

    def replay(self) -> None:
        self.launches += 1
        for work in self.work:
            work()


class RecordedLane:
    """A `_runtime.CudaLane` whose calls on a stream are captured too, with the addresses that they were given."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.native, name)
        graph = RecordedGraph.open
        if name not in ("submit", "collect", "copy", "synchronize") or graph is None:
            return method

        def call(*args: Any) -> None:
            method(*args)
            graph.work.append(lambda: method(*args))

        return call


@contextmanager
def _capture(graph: RecordedGraph) -> Iterator[None]:
    assert RecordedGraph.open is None, "two captures at once"
    RecordedGraph.open = graph
    try:
        with graph:
            yield
    finally:
        RecordedGraph.open = None


def use_recorded_graphs(monkeypatch: Any) -> list[RecordedGraph]:
    """Sessions capture on the CPU from now on; the graphs, as they are made."""
    from ktc.cuda import graphs, session

    made: list[RecordedGraph] = []

    def new_graph(device: torch.device) -> tuple[RecordedGraph, Any]:
        made.append(RecordedGraph())
        return made[-1], _capture(made[-1])

    def warm_up(self: Any) -> None:
        lane = self.lane
        lane.native = RecordedLane(lane.native)
        for side in lane.sides.values():
            side.native = lane.native
        self._step()
        lane.synchronize()

    monkeypatch.setattr(graphs, "new_graph", new_graph)
    monkeypatch.setattr(session, "can_capture", lambda device: True)
    monkeypatch.setattr(session.CudaSession, "_warm_up", warm_up)
    return made
