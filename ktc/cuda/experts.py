"""Routed experts as a stream sees them: the `submit` and `collect` of each MoE layer.

A submit writes hidden states, weights and ids into one device buffer, copies it into pinned memory and enqueues a
callback that hands it to the pool; a collect enqueues a callback that waits, then the copy back. Both may be captured
into a CUDA graph. Layers may be on several devices: there is one exchange with the pool for all of them, so what a
layer deferred is added in the next MoE layer wherever that is. What this file is not: buffers and streams (side.py),
the callbacks (runtime/src/cuda/exchange.h).

On a torch device of type cpu (tests, with a stand-in for libcudart) torch does not know the stream, so each collect
is followed by a synchronisation; everything else is the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ktc.cuda.hot import ELSEWHERE, HotExperts
from ktc.cuda.side import DeviceSide, Staging
from ktc.errors import KtcError
from ktc.plan.deferral import check_split

CUDART = ""
"""Path of libcudart; "" = the one that torch has loaded."""


class ExpertLane:
    """The routed experts of one model beside its CUDA devices.

    Args:
        moes: the `_runtime.Moe` of each MoE layer, in the model's order; all of one shape.
        devices: the model's devices by name.
        where: per MoE layer, the name of its device.
        rows: most rows of a step that fit without growing the staging.
        hot: per layer the experts that its device computes in decode steps of one row, or None.
        help: the callback that waits works too, instead of leaving its core idle for a quicker answer.

    Attributes:
        decode: whether steps enqueued from now on are decode steps (deferral and skipping apply).
        sides: of each device, by name.
    """

    def __init__(
        self,
        moes: Sequence[Any],
        hidden: int,
        top_k: int,
        devices: Mapping[str, torch.device],
        where: Sequence[str],
        rows: int,
        hot: Sequence[HotExperts | None] = (),
        help: bool = False,
    ) -> None:
        from ktc import _runtime

        try:
            self.native = _runtime.CudaLane(list(moes), CUDART, help)
        except RuntimeError as error:
            raise KtcError(f"cannot reach the CUDA runtime: {error}", "install torch with CUDA") from error
        self.moes, self.hidden, self.top_k = list(moes), hidden, top_k
        self.hot = list(hot) or [None] * len(self.moes)
        self.decode = False
        self.sides = {
            name: DeviceSide(self.native, device, hidden, top_k, rows if name in where else 0)
            for name, device in devices.items()
        }
        self._of_layer = [self.sides[name] for name in where]

    def operators(self) -> list[LayerExperts]:
        """What each MoE module is given."""
        return [LayerExperts(self, layer, moe, self._of_layer[layer]) for layer, moe in enumerate(self.moes)]

    def synchronize(self) -> None:
        """Wait for the streams; raise what a worker raised since the last time.

        Raises:
            RuntimeError: naming the MoE layer; the step's results are void, the next step starts clean.
        """
        self._wait()
        self.native.check()

    def _wait(self) -> None:
        for side in self.sides.values():
            side.synchronize()

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
        self._wait()
        self.native.split([*deferred[:-1], 0], [skipped] * len(self.moes))
        for side in self.sides.values():
            side.kept.fill_(self.top_k - skipped)


class LayerExperts:
    """One MoE layer's side of the lane; `ktc::moe_submit` and `ktc::moe_collect` find it by its handle."""

    def __init__(self, lane: ExpertLane, layer: int, moe: Any, side: DeviceSide) -> None:
        self.lane, self.layer, self.moe, self.side = lane, layer, moe, side
        self._on_device: Tensor | None = None  # f32 [1, H] of the hot experts, between submit and collect

    def report(self) -> dict[str, Any]:
        """Kernels used so far, as `_runtime.Moe.report`."""
        found: dict[str, Any] = self.moe.report()
        return found

    def submit_rows(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids and weights [T, top_k] of any type -> a token that `collect_rows` needs not look at."""
        lane, side, rows = self.lane, self.side, x.shape[0]
        self._on_device = None
        if rows:
            with side.current():
                staging = side.staging(rows)
                to_x, to_weights, to_ids = staging.views(rows)
                to_x.copy_(x)
                to_weights.copy_(weights)
                to_ids.copy_(ids)
                hot = lane.hot_of(self.layer, rows)
                if hot is not None:
                    slots, hot_weights = hot.slots(to_ids, to_weights, side.kept)
                    to_ids.masked_fill_(slots < len(hot.plan.hot), ELSEWHERE)
                call = lane.call(staging, self.layer, rows)
                lane.native.submit(side.stream(), call, staging.device_send.data_ptr())
                if hot is not None:  # behind the submit: while the CPU works
                    self._on_device = hot.compute(x, slots, hot_weights)
        return ids.new_empty((), dtype=torch.int64)

    def collect_rows(self, x: Tensor) -> Tensor:
        """-> f32 [T, H] on the device of x; valid for whatever the stream does next."""
        lane, side, rows = self.lane, self.side, x.shape[0]
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if rows:
            with side.current():
                staging = side.staging(rows)
                lane.native.collect(side.stream(), lane.call(staging, self.layer, rows), out.data_ptr())
            if side.device.type == "cpu":
                side.synchronize()
        if self._on_device is not None:
            out.add_(self._on_device)
            self._on_device = None
        return out
