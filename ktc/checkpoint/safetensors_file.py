"""One safetensors file: its header, checked before anything is believed, and reads of single tensors.

Not a general safetensors library: no writing, no tensors as framework objects. A read is one `pread`
of exactly the bytes asked for, so memory is bounded by one tensor (or one slice of its first axis)
and a file that shrinks under us is an error, not a SIGBUS.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.errors import CheckpointError

# Bytes per element of every dtype with whole bytes; sub-byte dtypes (F4, F6) are refused by name.
ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
# numpy has no bf16 and no fp8: their bits are handed out as unsigned integers.
NUMPY_DTYPE: dict[str, str] = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "BF16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
}
MAX_HEADER_BYTES = 100_000_000
LFS_PREFIX = b"version https://git-lfs"
_AGAIN = "download the file again; it is incomplete or damaged"


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it lies in a file. `begin` is the absolute file offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice")
    return out


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(path: Path, name: str, entry: object, data_start: int, data_len: int) -> RawTensor:
    """One header entry, or CheckpointError naming the tensor."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CheckpointError(f"{where} has no dtype, shape or data_offsets in the header", hint=_AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{where} has data type {dtype!r}, which ktc does not know",
            hint="ktc reads BF16, F16, F32, FP8 (F8_E4M3), compressed-tensors int4 and MXFP4 checkpoints",
        )
    if not isinstance(shape, list) or not all(_natural(d) for d in shape):
        raise CheckpointError(f"{where} has shape {shape!r}", hint=_AGAIN)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(o) for o in offsets):
        raise CheckpointError(f"{where} has data_offsets {offsets!r}", hint=_AGAIN)
    begin, end = offsets
    if begin > end or end > data_len:
        raise CheckpointError(
            f"{where} lies at bytes {begin} to {end} of the data, but the file holds {data_len}"
            f" (file size {data_start + data_len})",
            hint=_AGAIN,
        )
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{where} is {dtype} {shape}, {expected} bytes, but takes up {end - begin} bytes", hint=_AGAIN
        )
    return RawTensor(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def read_header(path: Path) -> dict[str, RawTensor]:
    """Every tensor of a file. Reads the header only; checks it against the file's size.

    Raises:
        CheckpointError: missing or unreadable file, Git LFS pointer, truncated file, absurd header length,
            header that is not the JSON it should be, unknown dtype, tensors that overlap, leave holes or
            run past the end.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer forever
            raise CheckpointError(f"{path} is not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(64)
            if head.startswith(LFS_PREFIX):
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights themselves",
                    hint="run `git lfs pull` in the checkpoint's folder",
                )
            if len(head) < 8:
                raise CheckpointError(
                    f"{path} is truncated: {size} bytes is less than a safetensors header", hint=_AGAIN
                )
            length = int.from_bytes(head[:8], "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} is not a safetensors file: its header would be {length} bytes long", hint=_AGAIN
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated: the header needs {8 + length} bytes and the file has {size}", hint=_AGAIN
                )
            file.seek(8)
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_pairs)
        if not isinstance(entries, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged: {error}", hint=_AGAIN) from error
    entries.pop("__metadata__", None)
    start, data_len = 8 + length, size - 8 - length
    tensors = {name: _entry(path, name, entry, start, data_len) for name, entry in entries.items()}
    position = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.nbytes)):
        if tensor.begin != position:
            fault = "overlaps the one before it" if tensor.begin < position else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} {fault} (offset {tensor.begin - start})", hint=_AGAIN
            )
        position += tensor.nbytes
    if position != size:
        raise CheckpointError(f"{path}: the tensors end at byte {position} and the file at byte {size}", hint=_AGAIN)
    return tensors


def read_array(tensor: RawTensor, index: int | None = None) -> NDArray[Any]:
    """The tensor's elements (or those of `tensor[index]`) as a fresh, C-ordered array.

    Dtypes that numpy lacks come as their bits: BF16 as uint16, FP8 and e8m0 as uint8.

    Raises:
        CheckpointError: the file cannot be read, or is shorter than its header said.
    """
    shape, begin, nbytes = tensor.shape, tensor.begin, tensor.nbytes
    if index is not None:
        if not shape or not 0 <= index < shape[0]:
            raise IndexError(f"{tensor.name}{list(shape)} has no slice {index}")
        nbytes //= shape[0]
        begin, shape = begin + index * nbytes, shape[1:]
    if tensor.dtype not in NUMPY_DTYPE:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has data type {tensor.dtype}, which ktc cannot read"
        )
    out = np.empty(nbytes, dtype=np.uint8)
    try:
        fd = os.open(tensor.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            view, done = out.data, 0
            while done < nbytes:
                got = os.preadv(fd, [view[done:]], begin + done)
                if got == 0:
                    raise CheckpointError(
                        f"{tensor.file} is truncated: tensor {tensor.name!r} ends {nbytes - done} bytes past the end",
                        hint="the file changed while it was being read; download it again",
                    )
                done += got
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"cannot read {tensor.file}: {error.strerror or error}") from error
    return out.view(NUMPY_DTYPE[tensor.dtype]).reshape(shape)


def same_bytes(a: RawTensor, b: RawTensor, chunk: int = 1 << 24) -> bool:
    """Whether two tensors have the same data type, shape and bytes; reads them in chunks."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    for offset in range(0, a.nbytes, chunk):
        size = min(chunk, a.nbytes - offset)
        parts = [RawTensor(t.name, "U8", (size,), t.file, t.begin + offset, size) for t in (a, b)]
        if not np.array_equal(read_array(parts[0]), read_array(parts[1])):
            return False
    return True
