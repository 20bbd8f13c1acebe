"""One CUDA device's share of the lane: its streams, and the staging buffers of the MoE layers that are on it.

All layers of a device share the staging, because a stream does one thing at a time and the native submit takes what it
needs before it returns. On a torch device of type cpu (tests, with a stand-in for libcudart) there is one stream, the
stand-in's own, and nothing is pinned.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ktc.errors import KtcError


class Staging:
    """Send and receive buffers for up to `rows` rows, and the native calls over them."""

    def __init__(self, hidden: int, top_k: int, rows: int, device: Any) -> None:
        from ktc import _runtime

        self.hidden, self.top_k, self.rows = hidden, top_k, rows
        self._layout = _runtime.cuda_send_layout
        nbytes = self._layout(hidden, top_k, rows)[2]
        pinned = device.type == "cuda"
        self.device_send = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.host_send = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.host_receive = torch.zeros(rows * hidden, dtype=torch.float32, pin_memory=pinned)
        self.calls: dict[tuple[int, int, bool], int] = {}
        self._views: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def views(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the device buffer: x f32 [rows, hidden], weights f32 [rows, top_k], ids i64 [rows, top_k]."""
        found = self._views.get(rows)
        if found is None:
            with torch.inference_mode(False):  # as in DeviceSide.make_staging
                found = self._views[rows] = self._cut(rows)
        return found

    def _cut(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids, end = self._layout(self.hidden, self.top_k, rows)
        slots = rows * self.top_k
        return (
            self.device_send[: rows * self.hidden * 4].view(torch.float32).view(rows, self.hidden),
            self.device_send[weights : weights + slots * 4].view(torch.float32).view(rows, self.top_k),
            self.device_send[ids:end].view(torch.int64).view(rows, self.top_k),
        )


class DeviceSide:
    """One device.

    Args:
        native: the `_runtime.CudaLane` of the model.
        rows: most rows of a step that fit without growing the staging; 0 = no MoE layer is here.

    Attributes:
        kept: i64 [] on the device, experts of a token that are not skipped.
    """

    def __init__(self, native: Any, device: torch.device, hidden: int, top_k: int, rows: int) -> None:
        self.native, self.device, self.hidden, self.top_k = native, device, hidden, top_k
        with torch.inference_mode(False):
            self.kept = torch.full((), top_k, dtype=torch.int64, device=device)
        if rows:
            self.single = self.make_staging(1)  # its own, so that a captured graph never loses its buffers
            self.many = self.make_staging(max(2, rows))

    def make_staging(self, rows: int) -> Staging:
        # Ordinary tensors even inside inference mode: whoever runs the model next may not be in it.
        with self.current(), torch.inference_mode(False):
            return Staging(self.hidden, self.top_k, rows, self.device)

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device the current one: a stream's handle 0 means whatever device that is."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def stream(self) -> int:
        """Handle of the device's current stream; use it inside `current`."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def synchronize(self) -> None:
        """Wait for the device's stream."""
        with self.current():
            self.native.synchronize(self.stream())

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy of all bytes between the device and pinned memory; on a torch device of type cpu, done."""
        with self.current():
            self.native.copy(self.stream(), target.data_ptr(), source.data_ptr(), target.nbytes)
            if self.device.type == "cpu":
                self.native.synchronize(self.stream())

    def staging(self, rows: int) -> Staging:
        if rows == 1:
            return self.single
        if rows > self.many.rows:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise KtcError(f"a captured step of {rows} rows needs staging of that size first")
            self.synchronize()  # nobody may still copy from the old one
            self.many = self.make_staging(rows)
        return self.many
