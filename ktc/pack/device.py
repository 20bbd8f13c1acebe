"""What is not a routed expert: packed linears and parameters kept as they are, streamed into shards.

Pure planning (`plan_device`) and streaming (`write_entry`): no tensor is held whole unless the
checkpoint format forces it, so that an embedding of gigabytes costs a chunk of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ktc.errors import CheckpointError
from ktc.layout import BLOCK_ROWS, MatrixLayout, round_up
from ktc.pack.experts import METADATA, nonfinite_error, to_float32
from ktc.pack.matrix import NonFiniteAt, PackedMatrix, pack_sources
from ktc.pack.writer import MAX_SHARD_BYTES, ShardLayout, ShardWriter, TensorSpec
from ktc.plan.ir import LinearPlan, Plan

CHUNK_BYTES = 32 << 20
# Data types that are stored as the checkpoint has them; every other one is decoded to bf16.
KEPT = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", **{name: name for name in ("I64", "I32", "U8", "I8", "BOOL")}}


class Source(Protocol):
    """What packing needs of the checkpoint, under the names of the module tree."""

    def info(self, tree_name: str) -> tuple[str, tuple[int, ...]]:
        """(data type as the reader gives it, shape) of a parameter."""

    def rows(self, tree_name: str, begin: int, end: int) -> tuple[NDArray[Any], str]:
        """Rows [begin, end) and their data type; bf16 as uint16. A 0-d tensor ignores the range."""

    def disk_name(self, tree_name: str) -> str:
        """How the checkpoint spells it, for messages."""


@dataclass(frozen=True)
class DeviceEntry:
    """One parameter, or one packed linear (`linear` set; then `name` is the module's path)."""

    name: str
    tensors: tuple[TensorSpec, ...]
    linear: LinearPlan | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class DeviceShard:
    """One file of `weights/device/`."""

    file: str
    entries: tuple[DeviceEntry, ...]
    layout: ShardLayout


def linear_tensors(name: str, linear: LinearPlan) -> tuple[TensorSpec, ...]:
    """The tensors of a packed linear, in file order."""
    layout = linear.layout
    out = [TensorSpec(f"{name}.tiles", "U8", (layout.tile_bytes,))]
    if layout.scale_count:
        out.append(TensorSpec(f"{name}.scale", "F32", (layout.scale_count,)))
    if layout.mult_bytes:
        out.append(TensorSpec(f"{name}.mult", "U8", (layout.mult_bytes,)))
    if linear.bias:
        out.append(TensorSpec(f"{name}.bias", "F32", (layout.n_pad,)))
    return tuple(out)


def plan_device(plan: Plan, source: Source, max_bytes: int = MAX_SHARD_BYTES) -> list[DeviceShard]:
    """Every device shard, in module order: a pure function of the plan and of the checkpoint's headers.

    Raises:
        CheckpointError: a parameter is missing or has another shape than the plan's.
    """
    entries: list[DeviceEntry] = []
    for module in plan.modules:
        prefix = module.name + "." if module.name else ""
        if module.linear is not None:
            linear = module.linear
            weight = plan.tied.get(f"{prefix}weight", f"{prefix}weight")
            _expect(source, weight, (linear.n, linear.k))
            if linear.bias:
                _expect(source, f"{prefix}bias", (linear.n,))
            entries.append(DeviceEntry(module.name, linear_tensors(module.name, linear), linear))
            continue
        for local, (shape, _) in module.params.items():
            name = prefix + local
            if name in plan.tied:
                continue
            dtype = _expect(source, name, shape)
            entries.append(DeviceEntry(name, (TensorSpec(name, KEPT.get(dtype, "BF16"), shape),)))
    shards: list[DeviceShard] = []
    batch: list[DeviceEntry] = []
    for entry in entries:
        if batch and sum(e.nbytes for e in batch) + entry.nbytes > max_bytes - (1 << 20):
            shards.append(_shard(len(shards), batch))
            batch = []
        batch.append(entry)
    return [*shards, _shard(len(shards), batch)] if batch else shards


def _shard(index: int, entries: list[DeviceEntry]) -> DeviceShard:
    specs = [tensor for entry in entries for tensor in entry.tensors]
    return DeviceShard(f"weights/device/D{index:03d}.safetensors", tuple(entries), ShardLayout(specs, METADATA))


def _expect(source: Source, name: str, shape: tuple[int, ...]) -> str:
    dtype, actual = source.info(name)
    if tuple(actual) != tuple(shape):
        raise CheckpointError(
            f"{source.disk_name(name)}: shape {list(actual)}, but the config says {list(shape)}",
            "config.json and the weights are not of the same model",
        )
    return dtype


def write_entry(
    writer: ShardWriter,
    entry: DeviceEntry,
    source: Source,
    tied: Mapping[str, str],
    allow_nonfinite: bool = False,
) -> None:
    """Stream one entry into its shard; `tied` as in the plan (a packed lm_head may read the embedding).

    Raises:
        CheckpointError: a NaN or an infinity, unless allowed.
        DiskError: see `ShardWriter.write`.
    """
    if entry.linear is None:
        _write_plain(writer, entry.tensors[0], source, allow_nonfinite)
    else:
        weight = tied.get(f"{entry.name}.weight", f"{entry.name}.weight")
        _write_linear(writer, entry.name, weight, entry.linear, source, allow_nonfinite)


def _chunks(rows: int, row_bytes: int, align: int) -> Iterator[tuple[int, int]]:
    """Ranges of about CHUNK_BYTES, in multiples of `align` rows."""
    step = max(align, CHUNK_BYTES // max(1, row_bytes) // align * align)
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


def _write_plain(writer: ShardWriter, tensor: TensorSpec, source: Source, allow_nonfinite: bool) -> None:
    rows = tensor.shape[0] if tensor.shape else 1
    for begin, end in _chunks(rows, tensor.row_bytes, 1):
        array, dtype = source.rows(tensor.name, begin, end)
        if dtype in ("fp32", "bf16", "fp16") and not allow_nonfinite:
            _check_finite(array, dtype, source.disk_name(tensor.name), begin)
        if tensor.dtype == "BF16" and dtype != "bf16":
            array = to_bf16(array)
        writer.write(tensor.name, np.ascontiguousarray(array), begin)


def to_bf16(array: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to bf16 (to nearest even; NaN stays NaN), as uint16."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def _check_finite(array: NDArray[Any], dtype: str, name: str, first_row: int) -> None:
    if dtype == "bf16":
        bad = (array & 0x7F80) == 0x7F80
    else:
        bad = ~np.isfinite(array)
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]] or [0]
        where[0] += first_row
        raise CheckpointError(
            f"{name}: NaN or infinity at {where}", "the checkpoint is damaged; --allow-nonfinite packs it all the same"
        )


def _write_linear(
    writer: ShardWriter, name: str, weight: str, linear: LinearPlan, source: Source, allow_nonfinite: bool
) -> None:
    """Rows are quantised independently, so a chunk of whole N-blocks packs to the same bytes as the whole."""
    layout = linear.layout
    per_row = linear.k * 4
    for begin, end in _chunks(linear.n, per_row, 128):
        array, dtype = source.rows(weight, begin, end)
        packed = _pack_rows(array, dtype, linear, source.disk_name(weight), begin, allow_nonfinite)
        block = begin // BLOCK_ROWS
        writer.write_at(f"{name}.tiles", packed.tiles, block * layout.block_bytes)
        if packed.scale.size:
            writer.write_at(f"{name}.scale", packed.scale, 4 * begin * (layout.scale_count // layout.n_pad))
        if packed.mult.size:
            writer.write_at(f"{name}.mult", packed.mult, begin // BLOCK_ROWS * (layout.mult_bytes // layout.blocks))
    if linear.bias:
        array, dtype = source.rows(f"{name}.bias", 0, linear.n)
        if not allow_nonfinite:
            _check_finite(array, dtype, source.disk_name(f"{name}.bias"), 0)
        bias = np.zeros(layout.n_pad, np.float32)
        bias[: linear.n] = to_float32(array)
        writer.write_at(f"{name}.bias", bias, 0)


def _pack_rows(
    array: NDArray[Any], dtype: str, linear: LinearPlan, disk_name: str, first_row: int, allow_nonfinite: bool
) -> PackedMatrix:
    count = array.shape[0]
    rows = np.arange(round_up(count, BLOCK_ROWS), dtype=np.int64)
    rows[count:] = -1
    packed, bad = pack_sources([array], dtype, np.zeros_like(rows), rows, linear.scheme)
    if bad is not None and not allow_nonfinite:
        raise nonfinite_error(disk_name, NonFiniteAt(0, bad.row + first_row, bad.column))
    return replace(packed, layout=MatrixLayout(count, linear.k, linear.scheme))
