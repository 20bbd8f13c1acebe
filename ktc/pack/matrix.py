"""One matrix: quantise and pack it whole (native), cut it into node slices, join slices again.

A matrix is always quantised whole and cut afterwards, along whole tiles and whole groups, so the
bytes of a block do not depend on the number of nodes, and repacking for another number moves blocks.
Letters: N stored rows (padded to 32), K columns (padded to 64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.layout import BLOCK_ROWS, STEP_K, TILE_BYTES, TILES_PER_STEP, MatrixLayout, QuantScheme

Array = NDArray[Any]
ROWS_PER_HALF = BLOCK_ROWS // 2


@dataclass(frozen=True)
class PackedMatrix:
    """A packed W [N, K] (`layout`), as flat arrays.

    Attributes:
        tiles: u8 [layout.tile_bytes].
        scale: f32 [layout.scale_count], empty where the scheme has none.
        mult: u8 [layout.mult_bytes], empty where the scheme has none.
        bias: f32 [N_pad] in stored row order, or None.
    """

    layout: MatrixLayout
    tiles: NDArray[np.uint8]
    scale: NDArray[np.float32]
    mult: NDArray[np.uint8]
    bias: NDArray[np.float32] | None = None

    def _blocked(self) -> tuple[NDArray[np.uint8], int]:
        """Tiles as [blocks, steps, bytes of a step], and the groups of a row."""
        layout = self.layout
        step_bytes = TILES_PER_STEP[layout.scheme.data_type] * TILE_BYTES
        tiles = self.tiles.reshape(layout.blocks, layout.steps, step_bytes)
        return tiles, layout.scheme.groups(layout.k_pad)

    def rows(self, begin: int, end: int) -> PackedMatrix:
        """Stored rows [begin, end), multiples of 32; views, no copies."""
        assert begin % BLOCK_ROWS == 0 and end % BLOCK_ROWS == 0, (begin, end)
        tiles, groups = self._blocked()
        per_scale = groups if self.layout.scheme.scale == "group" else 1
        per_block = groups * self.layout.scheme.group_mult_bytes
        return PackedMatrix(
            layout=replace(self.layout, n=end - begin),
            tiles=tiles[begin // BLOCK_ROWS : end // BLOCK_ROWS].reshape(-1),
            scale=self.scale[begin * per_scale : end * per_scale] if self.scale.size else self.scale,
            mult=self.mult[begin // BLOCK_ROWS * per_block : end // BLOCK_ROWS * per_block],
            bias=None if self.bias is None else self.bias[begin:end],
        )

    def columns(self, begin: int, end: int) -> PackedMatrix:
        """Columns [begin, end): whole steps and whole groups (or up to the end). Copies.

        Scales of the whole row (channel, integer, codebook) are kept as they are; so is the bias, which the
        caller gives to one slice only.
        """
        layout, scheme = self.layout, self.layout.scheme
        step = STEP_K[scheme.data_type]
        assert begin % step == 0 and end % step == 0, (begin, end)
        assert not scheme.group or (begin % scheme.group == 0 and (end % scheme.group == 0 or end == layout.k_pad))
        tiles, groups = self._blocked()

        def cut(values: Array) -> Array:
            first, last = begin // scheme.group, math.ceil(end / scheme.group)
            return np.ascontiguousarray(values.reshape(layout.blocks, groups, -1)[:, first:last]).reshape(-1)

        return PackedMatrix(
            layout=replace(layout, k=end - begin),
            tiles=np.ascontiguousarray(tiles[:, begin // step : end // step]).reshape(-1),
            scale=cut(self.scale) if scheme.scale == "group" else self.scale,
            mult=cut(self.mult) if self.mult.size else self.mult,
            bias=self.bias,
        )


def join_rows(slices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Inverse of `rows` over consecutive ranges."""
    first = slices[0]
    return PackedMatrix(
        layout=replace(first.layout, n=sum(s.layout.n for s in slices)),
        tiles=np.concatenate([s.tiles for s in slices]),
        scale=np.concatenate([s.scale for s in slices]),
        mult=np.concatenate([s.mult for s in slices]),
        bias=None if first.bias is None else np.concatenate([s.bias for s in slices if s.bias is not None]),
    )


def join_columns(slices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Inverse of `columns` over consecutive ranges; whole-row scales and the bias are the first slice's."""
    first = slices[0]
    scheme = first.layout.scheme
    blocks = first.layout.blocks

    def merge(parts: Sequence[Array]) -> Array:
        shaped = [
            part.reshape(blocks, s.layout.scheme.groups(s.layout.k_pad), -1)
            for part, s in zip(parts, slices, strict=True)
        ]
        return np.concatenate(shaped, axis=1).reshape(-1)

    return PackedMatrix(
        layout=replace(first.layout, k=sum(s.layout.k_pad for s in slices)),
        tiles=np.concatenate([s._blocked()[0] for s in slices], axis=1).reshape(-1),
        scale=merge([s.scale for s in slices]) if scheme.scale == "group" else first.scale,
        mult=merge([s.mult for s in slices]) if first.mult.size else first.mult,
        bias=first.bias,
    )


def interleaved_rows(intermediate: int, i_pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Stored order of gate and up: for 2 * i_pad stored rows, the row of I and whether it is an up row.

    Returns:
        (row of gate or up, -1 for padding; 0 for gate and 1 for up), int64 [2 * i_pad] each.
    """
    stored = np.arange(2 * i_pad, dtype=np.int64)
    row = stored // BLOCK_ROWS * ROWS_PER_HALF + stored % ROWS_PER_HALF
    is_up = stored % BLOCK_ROWS // ROWS_PER_HALF
    return np.where(row < intermediate, row, -1), is_up


@dataclass(frozen=True)
class NonFiniteAt:
    """The first NaN or infinity met: which source (index into the sources), row and column."""

    source: int
    row: int
    column: int


def pack_sources(
    sources: Sequence[Array],
    dtype: str,
    source_of: NDArray[np.int64],
    row_of: NDArray[np.int64],
    scheme: QuantScheme,
) -> tuple[PackedMatrix, NonFiniteAt | None]:
    """Quantise and pack rows picked from one or several arrays, without copying the arrays together.

    Args:
        sources: 2-D arrays [rows, K] of one item size and one pair of strides (any strides that are
            multiples of the item); bf16 as uint16.
        dtype: "fp32", "bf16" or "fp16": what the items are.
        source_of, row_of: for each stored row the array and the row in it (row -1 = zeros); length N_pad.
    Returns:
        the packed matrix (no bias) and the first non-finite element, if any.
    """
    from ktc import _runtime

    same = len({(a.strides, a.dtype.itemsize, a.shape[1]) for a in sources}) == 1
    if not same or min(sources[0].strides) < 0:
        sources = [np.ascontiguousarray(a) for a in sources]
    item, k = sources[0].dtype.itemsize, sources[0].shape[1]
    stride, column_stride = sources[0].strides
    starts = [a.ctypes.data for a in sources]
    base = min(starts)
    # The native call takes one base and rows at multiples of one pitch: the largest pitch that reaches
    # every array is the greatest common divisor of the row stride and of the distances.
    pitch = math.gcd(stride, *(start - base for start in starts))
    if pitch % item:
        sources = [np.stack(sources).copy()[i] for i in range(len(sources))]
        return pack_sources(sources, dtype, source_of, row_of, scheme)
    shift = np.array([(start - base) // pitch for start in starts], dtype=np.int64)
    rows = np.where(row_of < 0, -1, shift[source_of] + row_of * (stride // pitch))
    layout = MatrixLayout(len(rows), k, scheme)
    packed = PackedMatrix(
        layout,
        np.empty(layout.tile_bytes, np.uint8),
        np.empty(layout.scale_count, np.float32),
        np.empty(layout.mult_bytes, np.uint8),
    )
    bad = _runtime.pack_matrix(
        base,
        dtype,
        np.ascontiguousarray(rows),
        k,
        pitch // item,
        column_stride // item,
        scheme.data_type,
        scheme.scale,
        scheme.group,
        packed.tiles.ctypes.data,
        packed.scale.ctypes.data if packed.scale.size else 0,
        packed.mult.ctypes.data if packed.mult.size else 0,
    )
    if bad < 0:
        return packed, None
    stored = int(np.flatnonzero(rows == bad // k)[0])
    return packed, NonFiniteAt(int(source_of[stored]), int(row_of[stored]), int(bad % k))
