"""Routed experts: which shards a MoE layer becomes, and one expert's way into them.

Pure planning (`plan_parts`) and pure packing (`pack_expert`, `split_expert`, `join_expert`); files,
threads and resuming are in pipeline.py. Names and shapes of the tensors are those of
docs/bundle-format.md.
Letters: E experts, H hidden, I expert intermediate size, node = NUMA node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ktc.errors import CheckpointError, KtcError
from ktc.layout import LAYOUT_VERSION, MatrixLayout
from ktc.pack.matrix import (
    NonFiniteAt,
    PackedMatrix,
    interleaved_rows,
    join_columns,
    join_rows,
    pack_sources,
)
from ktc.pack.writer import DATA_ALIGN, MAX_SHARD_BYTES, ShardLayout, ShardWriter, TensorSpec
from ktc.plan.ir import MoePlan, Plan

if TYPE_CHECKING:
    from ktc.checkpoint.experts import ExpertWeights

Array = NDArray[Any]
METADATA = {"format": "ktc", "layout": str(LAYOUT_VERSION)}
_HEADER_ROOM = 4 * DATA_ALIGN  # header and alignment gaps of one expert shard, generously


@dataclass(frozen=True)
class ExpertPart:
    """Experts first..last (inclusive) of one MoE layer: one shard per node.

    Attributes:
        module: the MoE block's module path.
        files: shard path within the bundle, per node.
        layouts: what is where in it, per node.
    """

    module: str
    moe: MoePlan
    first: int
    last: int
    files: tuple[str, ...]
    layouts: tuple[ShardLayout, ...]

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def tensor(self, suffix: str) -> str:
        return f"{self.module}.experts.{self.first}-{self.last}.{suffix}"


def layer_of(module: str) -> int:
    """The layer number in a module path.

    Raises:
        KtcError: the path has none, so its shards could not be named.
    """
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    if match is None:
        raise KtcError(f"MoE module {module} has no layer number in its path")
    return int(match[1])


def expert_tensors(module: str, moe: MoePlan, node: int, first: int, last: int) -> list[TensorSpec]:
    """The tensors of experts first..last on one node, in file order; row e - first is expert e."""
    count, out = last - first + 1, []
    for name, layout in (("gate_up", moe.gate_up_layout(node)), ("down", moe.down_layout(node))):
        stem = f"{module}.experts.{first}-{last}.{name}"
        out.append(TensorSpec(f"{stem}.tiles", "U8", (count, layout.tile_bytes)))
        if layout.scale_count:
            out.append(TensorSpec(f"{stem}.scale", "F32", (count, layout.scale_count)))
        if layout.mult_bytes:
            out.append(TensorSpec(f"{stem}.mult", "U8", (count, layout.mult_bytes)))
        if moe.bias and (name == "gate_up" or node == 0):  # down's bias is added once
            out.append(TensorSpec(f"{stem}.bias", "F32", (count, layout.n_pad)))
    return out


def plan_parts(plan: Plan, max_bytes: int = MAX_SHARD_BYTES) -> list[ExpertPart]:
    """Every expert shard of the plan, in layer order: a pure function of the plan.

    A layer that would pass `max_bytes` on some node is divided by experts into equal parts.

    Raises:
        KtcError: one expert alone is larger than a shard may be, or two MoE blocks share a layer.
    """
    parts: list[ExpertPart] = []
    seen: dict[int, str] = {}
    for planned in plan.modules:
        moe = planned.moe
        if moe is None:
            continue
        layer = layer_of(planned.name)
        if layer in seen:
            raise KtcError(f"MoE modules {seen[layer]} and {planned.name} are in the same layer {layer}")
        seen[layer] = planned.name
        nodes = range(len(moe.splits))
        expert_bytes = max(moe.node_bytes(node) for node in nodes) // moe.experts
        room = (max_bytes - _HEADER_ROOM) // expert_bytes
        if room < 1:
            raise KtcError(f"{planned.name}: one expert of {expert_bytes} bytes does not fit a shard of {max_bytes}")
        pieces = -(-moe.experts // room)
        for piece in range(pieces):
            first, last = moe.experts * piece // pieces, moe.experts * (piece + 1) // pieces - 1
            suffix = f".p{piece}" if pieces > 1 else ""
            parts.append(
                ExpertPart(
                    planned.name,
                    moe,
                    first,
                    last,
                    tuple(f"weights/experts/node{node}/L{layer:03d}{suffix}.safetensors" for node in nodes),
                    tuple(
                        ShardLayout(expert_tensors(planned.name, moe, node, first, last), METADATA) for node in nodes
                    ),
                )
            )
    return parts


@dataclass(frozen=True)
class PackedExpert:
    """One expert, whole or one node's slice of it: gate_up [2 I_pad, H] and down [H, I_pad], packed."""

    gate_up: PackedMatrix
    down: PackedMatrix


def whole_layouts(moe: MoePlan) -> tuple[MatrixLayout, MatrixLayout]:
    """Layouts of gate_up and down before they are divided over nodes."""
    return MatrixLayout(2 * moe.i_pad, moe.hidden, moe.scheme), MatrixLayout(moe.hidden, moe.i_pad, moe.scheme)


def pack_expert(
    moe: MoePlan, weights: ExpertWeights, where: Mapping[str, str], allow_nonfinite: bool = False
) -> PackedExpert:
    """Quantise and pack one expert, whole.

    Args:
        where: how to name "gate", "up", "down" and their biases in an error (tensor names on disk).
    Raises:
        CheckpointError: a NaN or an infinity, unless allowed; shapes that are not the plan's.
    """
    hidden, intermediate, i_pad = moe.hidden, moe.intermediate, moe.i_pad
    for name, array, shape in (
        ("gate", weights.gate, (intermediate, hidden)),
        ("up", weights.up, (intermediate, hidden)),
        ("down", weights.down, (hidden, intermediate)),
    ):
        if array.shape != shape:
            raise CheckpointError(f"{where[name]}: shape {list(array.shape)}, but the config says {list(shape)}")
    row, is_up = interleaved_rows(intermediate, i_pad)
    gate_up, bad = pack_sources([weights.gate, weights.up], weights.dtype, is_up, row, moe.scheme)
    if bad is not None and not allow_nonfinite:
        raise nonfinite_error(where["up" if bad.source else "gate"], bad)
    down_rows = np.arange(MatrixLayout(hidden, i_pad, moe.scheme).n_pad, dtype=np.int64)
    down_rows[hidden:] = -1
    down, bad = pack_sources([weights.down], weights.dtype, np.zeros_like(down_rows), down_rows, moe.scheme)
    if bad is not None and not allow_nonfinite:
        raise nonfinite_error(where["down"], bad)
    down = replace(down, layout=MatrixLayout(hidden, i_pad, moe.scheme))
    if moe.bias:
        biases = {"gate": weights.gate_bias, "up": weights.up_bias, "down": weights.down_bias}
        checked = {name: _bias(bias, where[f"{name}_bias"], allow_nonfinite) for name, bias in biases.items()}
        stored = np.where(is_up == 1, checked["up"][row], checked["gate"][row])
        gate_up = replace(gate_up, bias=np.where(row < 0, 0, stored).astype(np.float32))
        padded = np.zeros(down.layout.n_pad, np.float32)
        padded[:hidden] = checked["down"]
        down = replace(down, bias=padded)
    return PackedExpert(gate_up, down)


def to_float32(array: Array) -> NDArray[np.float32]:
    """Widen exactly; uint16 is bf16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _bias(bias: Array | None, name: str, allow_nonfinite: bool) -> NDArray[np.float32]:
    if bias is None:
        raise CheckpointError(f"{name}: the config says experts have biases, but there is none")
    values = to_float32(bias)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size and not allow_nonfinite:
        raise nonfinite_error(name, NonFiniteAt(0, int(bad[0]), -1))
    return values


def nonfinite_error(tensor: str, bad: NonFiniteAt) -> CheckpointError:
    """The user's form of a NaN or infinity found while packing."""
    index = f"[{bad.row}]" if bad.column < 0 else f"[{bad.row}, {bad.column}]"
    return CheckpointError(
        f"{tensor}: NaN or infinity at {index}", "the checkpoint is damaged; --allow-nonfinite packs it all the same"
    )


def split_expert(moe: MoePlan, expert: PackedExpert) -> Iterator[PackedExpert]:
    """The expert's slice for each node, in node order."""
    for node, (begin, end) in enumerate(moe.splits):
        down = expert.down if len(moe.splits) == 1 else expert.down.columns(begin, end)
        yield PackedExpert(expert.gate_up.rows(2 * begin, 2 * end), down if node == 0 else replace(down, bias=None))


def join_expert(slices: list[PackedExpert]) -> PackedExpert:
    """Inverse of `split_expert`."""
    return PackedExpert(join_rows([s.gate_up for s in slices]), join_columns([s.down for s in slices]))


def write_expert(part: ExpertPart, writers: tuple[ShardWriter, ...], expert: int, packed: PackedExpert) -> None:
    """Write expert `expert`, whole, as its row of every tensor of every node's shard.

    Raises:
        DiskError: see `ShardWriter.write`.
    """
    row = expert - part.first
    for writer, piece in zip(writers, split_expert(part.moe, packed), strict=True):
        for name, matrix in (("gate_up", piece.gate_up), ("down", piece.down)):
            writer.write(part.tensor(f"{name}.tiles"), matrix.tiles, row)
            if matrix.scale.size:
                writer.write(part.tensor(f"{name}.scale"), matrix.scale, row)
            if matrix.mult.size:
                writer.write(part.tensor(f"{name}.mult"), matrix.mult, row)
            if matrix.bias is not None:
                writer.write(part.tensor(f"{name}.bias"), matrix.bias, row)
