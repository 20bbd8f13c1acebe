"""A decode step as CUDA graphs: one per stage of the model, launched in order, with copies between the stages.

On one device that is one graph, and a token is one launch. A capture belongs to one device (torch's memory pools and
streams do), so at every crossing to another device the graph ends and the next one begins there; in between, what
crosses is copied into buffers that never move. torch orders such a copy after the first device's stream and before the
second's with events, and nothing waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ktc.cuda.pipeline import Pipeline


class StepGraphs:
    """The graphs of one step."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._graphs: list[Any] = []
        self._copies: list[list[tuple[Tensor, Tensor]]] = []  # before each graph: (target, source)
        self._capturing = ExitStack()
        self._kept: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def record(self, step: Callable[[], Any]) -> None:
        """Capture what `step` enqueues; it has run before, so that everything that is allocated lazily exists. What
        it returns lives as long as the graphs.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        self.pipeline.cross = self._cross
        try:
            with self._capturing:
                self._begin(0, [])
                self._kept = step()
        finally:
            self.pipeline.cross = self.pipeline.copy

    @torch.inference_mode()
    def replay(self) -> None:
        """Enqueue the step on the devices' current streams."""
        for graph, copies in zip(self._graphs, self._copies, strict=True):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            graph.replay()

    def _cross(self, stage: int, sources: list[Tensor]) -> list[Tensor]:
        self._capturing.close()  # the graph of the stage before
        targets = [torch.zeros_like(source, device=self.pipeline.devices[stage]) for source in sources]
        self._begin(stage, list(zip(targets, sources, strict=True)))
        return targets

    def _begin(self, stage: int, copies: list[tuple[Tensor, Tensor]]) -> None:
        graph, context = new_graph(self.pipeline.devices[stage])
        self._capturing.enter_context(context)
        self._graphs.append(graph)
        self._copies.append(copies)


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def new_graph(device: torch.device) -> tuple[Any, AbstractContextManager[Any]]:
    """A graph, and the context that captures into it what is enqueued on the device inside."""
    with torch.cuda.device(device):
        graph: Any = torch.cuda.CUDAGraph()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return graph, _capture(graph, stream, device)


@contextmanager
def _capture(graph: Any, stream: Any, device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield
