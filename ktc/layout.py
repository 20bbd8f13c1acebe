"""Arithmetic of the tile layout: sizes and paddings, nothing else.

The layout itself is described in `runtime/include/ktc/abi.h` (the one source of truth) and in
docs/bundle-format.md; `ktc/pack/tiles.py` is the naive reference that writes it.
Letters: N output rows, K input columns, E experts, H hidden, I expert intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LAYOUT_VERSION = 1
ABI_VERSION = 1

DataType = Literal["fp32", "bf16", "int8", "int4"]
ScaleMode = Literal["none", "channel", "group", "integer", "codebook"]
Activation = Literal["silu_mul", "silu_clamp", "swiglu_oai"]

DATA_TYPES: tuple[DataType, ...] = ("fp32", "bf16", "int8", "int4")
TILE_BYTES = 1024
BLOCK_ROWS = 32
K_ALIGN = 64
UNEVEN = 0.05  # from so much more than its even share on, a node's slice is called uneven
STEP_K: dict[DataType, int] = {"fp32": 16, "bf16": 32, "int8": 64, "int4": 64}
TILES_PER_STEP: dict[DataType, int] = {"fp32": 2, "bf16": 2, "int8": 2, "int4": 1}


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


@dataclass(frozen=True)
class QuantScheme:
    """How one weight matrix is stored.

    Attributes:
        data_type: element format of the tiles.
        scale: "none" for fp32 and bf16; int8: "channel" or "group"; int4: "integer",
            "codebook" or "group".
        group: columns that share a scale; 0 = the whole row (scale "channel").
    """

    data_type: DataType
    scale: ScaleMode = "none"
    group: int = 0

    def groups(self, k_pad: int) -> int:
        return math.ceil(k_pad / self.group) if self.group else 1

    def __str__(self) -> str:
        letter = {"group": "f", "integer": "", "codebook": "c"}
        tail = {"none": "", "channel": "-channel"}.get(self.scale, f"-g{self.group}{letter.get(self.scale)}")
        return self.data_type + tail

    @property
    def group_mult_bytes(self) -> int:
        """Bytes of `mult` for one group of a 32-row block: a multiplier or a 4-bit selector per row, or none."""
        return {"integer": BLOCK_ROWS, "codebook": BLOCK_ROWS // 2}.get(self.scale, 0)


@dataclass(frozen=True)
class MatrixLayout:
    """Byte sizes of one packed matrix W [n, k] (rows already in stored order)."""

    n: int
    k: int
    scheme: QuantScheme

    @property
    def n_pad(self) -> int:
        return round_up(self.n, BLOCK_ROWS)

    @property
    def k_pad(self) -> int:
        return round_up(self.k, K_ALIGN)

    @property
    def blocks(self) -> int:
        return self.n_pad // BLOCK_ROWS

    @property
    def steps(self) -> int:
        return self.k_pad // STEP_K[self.scheme.data_type]

    @property
    def block_bytes(self) -> int:
        return self.steps * TILES_PER_STEP[self.scheme.data_type] * TILE_BYTES

    @property
    def tile_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def scale_count(self) -> int:
        """f32 scales (0 for fp32/bf16)."""
        if self.scheme.scale == "none":
            return 0
        return self.n_pad * (self.scheme.groups(self.k_pad) if self.scheme.scale == "group" else 1)

    @property
    def mult_bytes(self) -> int:
        return self.blocks * self.scheme.groups(self.k_pad) * self.scheme.group_mult_bytes

    @property
    def nbytes(self) -> int:
        return self.tile_bytes + 4 * self.scale_count + self.mult_bytes


def intermediate_pad(intermediate: int) -> int:
    """I_pad: both the row padding of gate/up and the column padding of down."""
    return round_up(intermediate, K_ALIGN)


def split_unit(*schemes: QuantScheme) -> int:
    """Columns of `down` (rows of gate/up) that must stay together on one node: whole tiles, whole groups."""
    return max([K_ALIGN, *(s.group for s in schemes)])


def split_intermediate(intermediate: int, nodes: int, unit: int = K_ALIGN) -> list[tuple[int, int]]:
    """Split I over NUMA nodes in whole units, as evenly as that allows.

    Returns:
        `nodes` half-open ranges [begin, end) over I_pad; every range but the last ends on a multiple of `unit`.
    Raises:
        ValueError: fewer units than nodes; the message names the node counts that work.
    """
    i_pad = intermediate_pad(intermediate)
    units = math.ceil(i_pad / unit)
    if units < nodes:
        raise ValueError(
            f"intermediate size {intermediate} has {units} blocks of {unit} columns and cannot be split over"
            f" {nodes} nodes; 1 to {units} nodes work"
        )
    edges = [min(i_pad, unit * (units * i // nodes)) for i in range(nodes)] + [i_pad]
    return [(edges[i], edges[i + 1]) for i in range(nodes)]


def split_note(splits: Sequence[tuple[int, int]]) -> str:
    """How `split_intermediate` divided, where whole blocks make that noticeably uneven; else an empty string. A layer
    waits for its widest node, so narrow experts gain less from several nodes than their number says."""
    widths = [end - begin for begin, end in splits]
    ratio = max(widths) * len(widths) / sum(widths)
    if ratio < 1 + UNEVEN:
        return ""
    shares = ", ".join(map(str, widths[:8])) + (", ..." if len(widths) > 8 else "")
    return f"unevenly: {sum(widths)} columns as {shares}; a layer waits for the widest, {ratio:.2f}x an even split"
