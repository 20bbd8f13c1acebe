"""Routed experts as a stream sees them: staging buffers, and the `submit` and `collect` of each MoE layer.

A submit writes hidden states, weights and ids into one device buffer, copies it into pinned memory and enqueues a
callback that hands it to the pool; a collect enqueues a callback that waits, then the copy back. Both may be captured
into a CUDA graph. All layers share the staging, because a stream does one thing at a time and the native
submit takes what it needs before it returns. What this file is not: the callbacks (runtime/src/cuda/exchange.h).

On a torch device of type cpu (tests, with a stand-in for libcudart) torch does not know the stream, so each collect
is followed by a synchronisation; everything else is the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ktc.cuda.hot import ELSEWHERE, HotExperts
from ktc.errors import KtcError, UsageError

CUDART = ""
"""Path of libcudart; "" = the one that torch has loaded."""
MIN_IMMEDIATE_EXPERTS = 2


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
            with torch.inference_mode(False):  # as in ExpertLane._stage
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


class ExpertLane:
    """The routed experts of one model beside one CUDA device.

    Args:
        moes: the `_runtime.Moe` of each MoE layer, in the model's order; all of one shape.
        rows: most rows of a step that fit without growing the staging.
        hot: per layer the experts that the device computes in decode steps of one row, or None.
        help: the callback that waits works too, instead of leaving its core idle for a quicker answer.

    Attributes:
        decode: whether steps enqueued from now on are decode steps (deferral and skipping apply).
    """

    def __init__(
        self,
        moes: Sequence[Any],
        hidden: int,
        top_k: int,
        device: Any,
        rows: int,
        hot: Sequence[HotExperts | None] = (),
        help: bool = False,
    ) -> None:
        from ktc import _runtime

        try:
            self.native = _runtime.CudaLane(list(moes), CUDART, help)
        except RuntimeError as error:
            raise KtcError(f"cannot reach the CUDA runtime: {error}", "install torch with CUDA") from error
        self.moes, self.device, self.hidden, self.top_k = list(moes), device, hidden, top_k
        self.hot = list(hot) or [None] * len(self.moes)
        self.decode = False
        with torch.inference_mode(False):
            self.kept = torch.full((), top_k, dtype=torch.int64, device=device)  # experts of a token not skipped
        self._single = self._stage(1)  # its own, so that a captured graph never loses its buffers
        self._many = self._stage(max(2, rows))

    def operators(self) -> list[LayerExperts]:
        """What each MoE module is given."""
        return [LayerExperts(self, layer, moe) for layer, moe in enumerate(self.moes)]

    def _stage(self, rows: int) -> Staging:
        # Ordinary tensors even inside inference mode: whoever runs the model next may not be in it.
        with self.on_device(), torch.inference_mode(False):
            return Staging(self.hidden, self.top_k, rows, self.device)

    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the lane's device the current one: a stream's handle 0 means whatever device that is."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def stream(self) -> int:
        """Handle of the device's current stream; use it inside `on_device`."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def synchronize(self) -> None:
        """Wait for the stream; raise what a worker raised since the last time.

        Raises:
            RuntimeError: naming the MoE layer; the step's results are void, the next step starts clean.
        """
        with self.on_device():
            self.native.synchronize(self.stream())
        self.native.check()

    def staging(self, rows: int) -> Staging:
        if rows == 1:
            return self._single
        if rows > self._many.rows:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise KtcError(f"a captured step of {rows} rows needs staging of that size first")
            self.native.synchronize(self.stream())  # nobody may still copy from the old one
            self._many = self._stage(rows)
        return self._many

    def call(self, staging: Staging, layer: int, rows: int) -> int:
        """The native handle for a visit of `layer` with so many rows."""
        key = (layer, rows, self.decode)
        handle = staging.calls.get(key)
        if handle is None:
            partial = self.hot_of(layer, rows) is not None
            handle = staging.calls[key] = self.native.bind(
                layer, rows, self.decode, staging.host_send.data_ptr(), staging.host_receive.data_ptr(), partial
            )
        return handle

    def hot_of(self, layer: int, rows: int) -> HotExperts | None:
        """What the device computes itself in a step of so many rows: the CPU is sent the rest."""
        return self.hot[layer] if self.decode and rows == 1 else None

    def split(self, deferred: Sequence[int], skipped: int = 0) -> None:
        """How decode steps divide a token's experts; a captured graph need not be captured again.

        Args:
            deferred: per MoE layer; the last layer's number is not used (it defers none).
            skipped: of every layer, the lowest are dropped.
        Raises:
            KtcError: fewer than two would stay immediate, or deferring and skipping at once.
        """
        for wanted in deferred[:-1]:
            check_split(self.top_k, wanted, skipped)
        check_split(self.top_k, 0, skipped)
        with self.on_device():
            self.native.synchronize(self.stream())
        self.native.split([*deferred[:-1], 0], [skipped] * len(self.moes))
        self.kept.fill_(self.top_k - skipped)


def check_split(top_k: int, deferred: int, skipped: int) -> None:
    """
    Raises:
        UsageError: not a way to divide `top_k` experts of a token.
    """
    if deferred < 0 or skipped < 0:
        raise UsageError("the numbers of deferred and skipped experts cannot be negative")
    if deferred and top_k - deferred < MIN_IMMEDIATE_EXPERTS:
        raise UsageError(
            f"deferring {deferred} of {top_k} experts leaves fewer than {MIN_IMMEDIATE_EXPERTS} immediate",
            f"use --deferred {max(0, top_k - MIN_IMMEDIATE_EXPERTS)} or less",
        )
    if deferred and skipped:
        raise UsageError("experts are deferred or skipped, not both", "leave out --deferred or --skip")
    if skipped >= top_k:
        raise UsageError(f"skipping {skipped} of {top_k} experts leaves none")


class LayerExperts:
    """One MoE layer's side of the lane; `ktc::moe_submit` and `ktc::moe_collect` find it by its handle."""

    def __init__(self, lane: ExpertLane, layer: int, moe: Any) -> None:
        self.lane, self.layer, self.moe = lane, layer, moe
        self._on_device: Tensor | None = None  # f32 [1, H] of the hot experts, between submit and collect

    def report(self) -> dict[str, Any]:
        """Kernels used so far, as `_runtime.Moe.report`."""
        found: dict[str, Any] = self.moe.report()
        return found

    def submit_rows(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids and weights [T, top_k] of any type -> a token that `collect_rows` needs not look at."""
        lane, rows = self.lane, x.shape[0]
        self._on_device = None
        if rows:
            with lane.on_device():
                staging = lane.staging(rows)
                to_x, to_weights, to_ids = staging.views(rows)
                to_x.copy_(x)
                to_weights.copy_(weights)
                to_ids.copy_(ids)
                hot = lane.hot_of(self.layer, rows)
                if hot is not None:
                    slots, hot_weights = hot.slots(to_ids, to_weights, lane.kept)
                    to_ids.masked_fill_(slots < len(hot.plan.hot), ELSEWHERE)
                call = lane.call(staging, self.layer, rows)
                lane.native.submit(lane.stream(), call, staging.device_send.data_ptr())
                if hot is not None:  # behind the submit: while the CPU works
                    self._on_device = hot.compute(x, slots, hot_weights)
        return ids.new_empty((), dtype=torch.int64)

    def collect_rows(self, x: Tensor) -> Tensor:
        """-> f32 [T, H] on the device of x; valid for whatever the stream does next."""
        lane, rows = self.lane, x.shape[0]
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if rows:
            with lane.on_device():
                staging = lane.staging(rows)
                lane.native.collect(lane.stream(), lane.call(staging, self.layer, rows), out.data_ptr())
            if lane.device.type == "cpu":
                lane.native.synchronize(0)
        if self._on_device is not None:
            out.add_(self._on_device)
            self._on_device = None
        return out
