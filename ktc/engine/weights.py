"""A bundle's weights in memory, once: huge pages on their own node, packed bytes as they lie on disk.

`WeightStore.read` brings tensors into node-bound buffers and returns their addresses; nothing is
repacked or copied again (failure M1). Small parameters that torch computes with come through
`tensor` and are widened to fp32. Not here: which tensors a module needs (build.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ktc.engine.memory import check_memory as check_memory
from ktc.engine.memory import huge_bytes, read_weights, weight_buffer
from ktc.engine.placement import NodePlacement, check
from ktc.errors import BundleError
from ktc.layout import round_up
from ktc.progress import Progress

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle, TensorRef

Key = TypeVar("Key", bound=Hashable)
ALIGN = 64
MERGE_GAP = 4096
"""Tensors that lie closer than this in a file are read as one range, the gap included."""

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8, "I8": torch.int8,
          "I32": torch.int32, "I64": torch.int64, "F64": torch.float64, "BOOL": torch.bool}  # fmt: skip


class WeightStore:
    """Buffers of one loaded bundle; whoever holds pointers into them must hold the store.

    Args:
        bind: place a node's weights on that NUMA node (not where nodes are emulated).
    """

    def __init__(self, bundle: Bundle, pool: Any, progress: Progress | None = None, bind: bool = True) -> None:
        self.bundle, self.pool, self.bind = bundle, pool, bind
        self.buffers: list[Any] = []
        self._progress = progress

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers)

    def huge_bytes(self) -> int:
        """Bytes that the kernel really keeps in huge pages."""
        return huge_bytes(self.buffers)

    def placement(self) -> list[NodePlacement]:
        """Where each node's weights really lie; empty where there is one node, or none is bound."""
        return check(self.buffers)

    def ref(self, name: str, node: int | None = None) -> TensorRef:
        """
        Raises:
            BundleError: the bundle has no such tensor.
        """
        found = self.bundle.tensors.get((node, name))
        if found is None:
            where = "on the device" if node is None else f"on node {node}"
            raise BundleError(f"{self.bundle.path}: tensor {name} is missing {where}", "compile the checkpoint again")
        return found

    def read(self, wanted: Iterable[tuple[Key, TensorRef]], node: int = -1) -> dict[Key, int]:
        """Read tensors into huge pages of `node` (-1: anywhere); key -> address.

        Raises:
            KtcError: no memory; BundleError: a file cannot be read.
        """
        node = node if self.bind and self.bundle.nodes > 1 else -1  # one node: its threads may be anywhere
        by_file: dict[Path, list[tuple[Key, TensorRef]]] = {}
        for key, ref in wanted:
            by_file.setdefault(ref.file, []).append((key, ref))
        out: dict[Key, int] = {}
        for file, items in by_file.items():
            items.sort(key=lambda item: item[1].offset)
            out.update(self._read_file(file, items, node))
        return out

    def _read_file(self, file: Path, items: list[tuple[Key, TensorRef]], node: int) -> dict[Key, int]:
        ranges, places = _ranges(file, items)
        total = sum(round_up(size, ALIGN) for _, size in ranges)
        buffer = weight_buffer(total, node, file)
        self.buffers.append(buffer)
        at, starts = 0, []
        for offset, size in ranges:
            read_weights(buffer, file, offset, size, at, self.pool)
            starts.append(at)
            at += round_up(size, ALIGN)
            if self._progress is not None:
                self._progress.update(size, file.name)
        return {key: buffer.ptr + starts[index] + within for key, (index, within) in places.items()}

    def tensor(self, name: str) -> Tensor:
        """A device tensor in memory of its own: floats widened to fp32, the rest as it is."""
        ref = self.ref(name)
        tensor = torch.from_numpy(np.array(ref.array()))
        tensor = tensor.view(_TORCH[ref.dtype])
        if self._progress is not None:
            self._progress.update(ref.nbytes, ref.file.name)
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor

    def view(self, address: int, ref: TensorRef) -> Tensor:
        """A tensor over bytes that `read` brought in; the store must outlive it."""
        raw = (ctypes.c_uint8 * ref.nbytes).from_address(address)
        return torch.frombuffer(raw, dtype=_TORCH[ref.dtype]).view(ref.shape)


def _ranges(file: Path, items: list[tuple[Key, TensorRef]]) -> tuple[list[tuple[int, int]], dict[Key, tuple[int, int]]]:
    """Tensors sorted by offset -> ranges (offset, size) of the file, and key -> (range, offset within it)."""
    ranges: list[tuple[int, int]] = []
    places: dict[Key, tuple[int, int]] = {}
    for key, ref in items:
        if ref.offset % ALIGN:
            raise BundleError(f"{file}: a tensor at byte {ref.offset} is not aligned to {ALIGN}")
        if ranges and 0 <= ref.offset - sum(ranges[-1]) < MERGE_GAP:
            start = ranges[-1][0]
            ranges[-1] = (start, ref.offset + ref.nbytes - start)
        else:
            ranges.append((ref.offset, ref.nbytes))
        places[key] = (len(ranges) - 1, ref.offset - ranges[-1][0])
    return ranges, places
