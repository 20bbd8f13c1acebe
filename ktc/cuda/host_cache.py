"""KV caches in host memory: pinned buffers that the device also sees, and one working copy for all layers of a device.

A step writes its new rows straight into the pinned buffers (a kernel's stores over PCIe). torch's attention then reads
the layer's whole buffer once, by an asynchronous copy into the working copy, which the next such layer overwrites;
FlashInfer reads the positions in use where they lie. Addresses never change and nothing is allocated after the first
step, so all of it may be captured. What this file is not: which layers (ktc/plan/caches.py), positions and masks
(cache.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ktc.cuda.side import DeviceSide

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class HostCaches:
    """Of one device's layers."""

    def __init__(self, side: DeviceSide) -> None:
        self.side = side
        self._working: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._pinned: dict[int, Tensor] = {}  # by address, kept alive for the views

    @property
    def device_nbytes(self) -> int:
        return sum(t.nbytes for t in self._working.values())

    def room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A zeroed buffer in pinned host memory, as a tensor of the device."""
        device = self.side.device
        with self.side.current():
            host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
            view = on_device(host, device)
        self._pinned[view.data_ptr()] = host
        return view

    def working_copies(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Enqueue copies of two whole buffers (from `room`) to the device. Valid until the next call."""
        return self._copied(0, keys), self._copied(1, values)

    def _copied(self, slot: int, view: Tensor) -> Tensor:
        key = (slot, view.shape, view.dtype)
        target = self._working.get(key)
        if target is None:
            target = self._working[key] = torch.empty(view.shape, dtype=view.dtype, device=self.side.device)
        self.side.copy(target, self._pinned[view.data_ptr()])
        return target


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Contiguous pinned memory as a tensor of a CUDA device (unified addressing: the same address); on a device of type
    cpu, as another tensor over it. Whoever calls keeps `host`."""
    from ktc import _runtime

    number = (device.index or 0) if device.type == "cuda" else -1
    capsule = _runtime.view_memory(host.data_ptr(), list(host.shape), _TYPES[host.dtype], number)
    view: Tensor = from_dlpack(capsule)
    return view
