"""Quantise, pack and unpack one matrix, naively: the oracle of runtime/src/pack.cpp, byte for byte.

The layout is that of runtime/include/ktc/abi.h. Packing a model does not come here (ktc/pack/matrix.py calls
the native code); tests and small tools do. Works in numpy's float32 with the order of operations fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.layout import BLOCK_ROWS, TILES_PER_STEP, QuantScheme, round_up
from ktc.quant.base import F32, Quantized
from ktc.quant.registry import quantizer_for


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix as it lies on disk.

    Attributes:
        tiles: uint8 [tile_bytes].
        scale: float32 [N_pad] (channel, integer, codebook), [N_pad/32 * groups * 32] (group), or empty.
        mult: uint8 [N_pad/32 * groups * 32] (integer), [N_pad/32 * groups * 16] (codebook), or empty.
    """

    tiles: NDArray[np.uint8]
    scale: F32
    mult: NDArray[np.uint8]


def bf16_bits(w: F32) -> NDArray[np.uint16]:
    """Round float32 to bf16, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(w, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), nan, rounded).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def stored_rows(w: F32, rows: NDArray[np.int64]) -> F32:
    """W [n, k] -> [n_pad, k_pad] in stored order: rows[i] is the source row, -1 = zeros."""
    k_pad = round_up(w.shape[1], 64)
    out = np.zeros((len(rows), k_pad), np.float32)
    out[rows >= 0, : w.shape[1]] = w[rows[rows >= 0]]
    return out


def pack(w: F32, rows: NDArray[np.int64], scheme: QuantScheme) -> PackedMatrix:
    """Quantise W [n, k] (float32) and lay out its stored rows. NaN and infinity count as 0 in integer formats."""
    stored = stored_rows(w, rows)
    no_scale, no_mult = np.zeros(0, np.float32), np.zeros(0, np.uint8)
    if scheme.data_type == "fp32":
        return PackedMatrix(_tiles_of_words(stored.view(np.uint8), scheme), no_scale, no_mult)
    if scheme.data_type == "bf16":
        return PackedMatrix(_tiles_of_words(bf16_bits(stored).view(np.uint8), scheme), no_scale, no_mult)
    finite = np.where(np.isfinite(stored), stored, np.float32(0))
    quantized = quantizer_for(scheme).quantize(finite, scheme.group)
    if scheme.data_type == "int8":
        unsigned: NDArray[np.uint8] = (quantized.q.astype(np.int16) + 128).astype(np.uint8)
    else:
        nibbles: NDArray[np.uint8] = (quantized.q + 8).astype(np.uint8).reshape(-1, 2, 16, stored.shape[1])
        unsigned = (nibbles[:, 0] | np.left_shift(nibbles[:, 1], np.uint8(4))).reshape(-1, stored.shape[1])
    scale = _by_block(quantized.scale) if scheme.scale == "group" else quantized.scale[:, 0].copy()
    mult = no_mult if quantized.mult is None else _by_block(quantized.mult)
    if scheme.scale == "codebook":
        halves = mult.reshape(-1, 2, BLOCK_ROWS // 2)
        mult = (halves[:, 0] | np.left_shift(halves[:, 1], np.uint8(4))).reshape(-1)
    return PackedMatrix(_tiles_of_words(unsigned, scheme), scale.astype(np.float32), mult.astype(np.uint8))


def unpack(packed: PackedMatrix, n_pad: int, k_pad: int, scheme: QuantScheme) -> F32:
    """Dequantised W [n_pad, k_pad] in stored row order."""
    raw = _words_of_tiles(packed.tiles, n_pad, scheme)
    if scheme.data_type == "fp32":
        return raw.view(np.float32)
    if scheme.data_type == "bf16":
        return bf16_values(raw.view(np.uint16))
    if scheme.data_type == "int8":
        q = (raw.astype(np.int16) - 128).astype(np.int8)
    else:
        halves = raw.reshape(n_pad // BLOCK_ROWS, 16, k_pad)
        q = np.stack([halves & 15, halves >> 4], axis=1).reshape(n_pad, k_pad).astype(np.int8) - np.int8(8)
    groups = scheme.groups(k_pad)
    scale = _by_row(packed.scale, groups) if scheme.scale == "group" else packed.scale.reshape(n_pad, 1)
    mult = None
    if scheme.scale == "integer":
        mult = _by_row(packed.mult, groups)
    elif scheme.scale == "codebook":
        both = packed.mult.reshape(-1, BLOCK_ROWS // 2)
        mult = _by_row(np.concatenate([both & 15, both >> 4], axis=1).reshape(-1), groups)
    return quantizer_for(scheme).dequantize(Quantized(q, scale, mult), scheme.group)


def _tiles_of_words(raw: NDArray[np.uint8], scheme: QuantScheme) -> NDArray[np.uint8]:
    """raw uint8 [rows, bytes of a row] -> tiles: words of 4 bytes, [block][step][half][word of k][row]."""
    halves = TILES_PER_STEP[scheme.data_type]
    words = raw.reshape(-1, halves, 16, raw.shape[1] // 64, 16, 4)  # block, half, row, step, word, byte
    return np.ascontiguousarray(words.transpose(0, 3, 1, 4, 2, 5)).reshape(-1)


def _words_of_tiles(tiles: NDArray[np.uint8], n_pad: int, scheme: QuantScheme) -> NDArray[np.uint8]:
    """Inverse of _tiles_of_words: uint8 [rows (int4: half of them), bytes of a row]."""
    halves = TILES_PER_STEP[scheme.data_type]
    blocks = n_pad // BLOCK_ROWS
    words = tiles.reshape(blocks, -1, halves, 16, 16, 4)  # block, step, half, word, row, byte
    return np.ascontiguousarray(words.transpose(0, 2, 4, 1, 3, 5)).reshape(blocks * halves * 16, -1)


def _by_block(per_row: NDArray[Any]) -> NDArray[Any]:
    """[n_pad, groups] -> [n_pad / 32][groups][32], flat."""
    return np.ascontiguousarray(per_row.reshape(-1, BLOCK_ROWS, per_row.shape[1]).transpose(0, 2, 1)).reshape(-1)


def _by_row(by_block: NDArray[Any], groups: int) -> NDArray[Any]:
    """Inverse of _by_block: [n_pad, groups]."""
    return np.ascontiguousarray(by_block.reshape(-1, groups, BLOCK_ROWS).transpose(0, 2, 1)).reshape(-1, groups)
