"""What packed experts compute, in plain numpy float64: the oracle of the goldens.

Reads the packed bytes by the layout of abi.h and nothing else: it shares no code with the native
kernels, with the native packer or with their tests, so an error common to those cannot hide here.
Slow on purpose. Letters: M rows, N_pad/K_pad padded matrix, H hidden, I_pad padded intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.layout import BLOCK_ROWS
from ktc.pack.experts import PackedExpert
from ktc.pack.matrix import PackedMatrix
from ktc.plan.ir import MoePlan

Float = NDArray[np.float64]
_CODEBOOK = np.array([-127, -92, -74, -58, -45, -33, -21, -10, 0, 11, 22, 34, 48, 62, 79, 98])
_MULTIPLIER = np.array([26, 58, 69, 79, 89, 100, 111, 127])
_BLOCKS_AT_ONCE = 32  # bounds the float64 copy of the weights


def stored_values(packed: PackedMatrix, begin: int, end: int) -> NDArray[Any]:
    """N-blocks [begin, end) as [rows, K_pad]: the integers of the integer formats (codebook: the levels), else the
    floats."""
    layout = packed.layout
    raw = packed.tiles.reshape(layout.blocks, -1)[begin:end]
    count, steps = end - begin, layout.steps
    if layout.scheme.data_type == "fp32":
        grid = raw.view(np.float32).reshape(count, steps, 2, 16, 16)  # [b, s, h, r, c]
        return grid.transpose(0, 2, 4, 1, 3).reshape(count * BLOCK_ROWS, -1)
    if layout.scheme.data_type == "bf16":
        halves = raw.view(np.uint16).reshape(count, steps, 2, 16, 16, 2)  # [b, s, h, r, c, j]
        wide = (halves.astype(np.uint32) << 16).view(np.float32)
        return wide.transpose(0, 2, 4, 1, 3, 5).reshape(count * BLOCK_ROWS, -1)
    if layout.scheme.data_type == "int8":
        bytes_ = raw.reshape(count, steps, 2, 16, 16, 4).astype(np.int16) - 128
    else:
        nibbles = raw.reshape(count, steps, 16, 16, 4)
        bytes_ = np.stack([nibbles & 15, nibbles >> 4], axis=2).astype(np.int16) - 8
    rows = bytes_.transpose(0, 2, 4, 1, 3, 5).reshape(count * BLOCK_ROWS, -1)
    return _levels(packed, rows + 8, begin, end) if layout.scheme.scale == "codebook" else rows


def _levels(packed: PackedMatrix, codes: NDArray[Any], begin: int, end: int) -> NDArray[Any]:
    """Codes 0..15 [rows, K_pad] of N-blocks [begin, end) -> codebook levels, as abi.h words them."""
    groups = packed.layout.scheme.groups(packed.layout.k_pad)
    both = packed.mult.reshape(-1, groups, 16)[begin:end]
    by_row = np.concatenate([both & 15, both >> 4], axis=2).transpose(0, 2, 1).reshape(-1, groups)
    selector = np.repeat(by_row, packed.layout.scheme.group, axis=1)[:, : codes.shape[1]]
    level = (_CODEBOOK[codes] * _MULTIPLIER[selector & 7] + 64) >> 7
    out: NDArray[Any] = np.where(selector & 8, -level, level)
    return out


def weight_scales(packed: PackedMatrix) -> NDArray[np.float64]:
    """The factor of every (row, group): [N_pad, groups]; ones for the float formats."""
    layout, scheme = packed.layout, packed.layout.scheme
    groups = scheme.groups(layout.k_pad)

    def by_row(values: NDArray[Any]) -> Float:
        cube = values.reshape(layout.blocks, groups, BLOCK_ROWS).astype(np.float64)
        return cube.transpose(0, 2, 1).reshape(layout.n_pad, groups)

    if scheme.scale == "none":
        return np.ones((layout.n_pad, 1))
    if scheme.scale == "group":
        return by_row(packed.scale)
    rows: Float = packed.scale.astype(np.float64)[:, None]
    return rows * by_row(packed.mult) if scheme.scale == "integer" else np.repeat(rows, groups, axis=1)


def _operand(x: Float, data_type: str) -> tuple[Float, Float]:
    """Activations as the kernels see them, and the factor of each row."""
    if data_type == "fp32":
        return x.astype(np.float32).astype(np.float64), np.ones((len(x), 1))
    if data_type == "bf16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return rounded.view(np.float32).astype(np.float64), np.ones((len(x), 1))
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    safe = np.where(scale > 0, scale, 1)
    return np.rint(x / safe), np.where(scale > 0, scale, 0)


def product(x: Float, packed: PackedMatrix) -> Float:
    """x [M, K] @ W^T + bias -> [M, N_pad], activations quantised per row as the format demands."""
    layout, scheme = packed.layout, packed.layout.scheme
    padded = np.zeros((len(x), layout.k_pad))
    padded[:, : x.shape[1]] = x
    operand, row_scale = _operand(padded, scheme.data_type)
    scales, group = weight_scales(packed), scheme.group or layout.k_pad
    out = np.empty((len(x), layout.n_pad))
    for begin in range(0, layout.blocks, _BLOCKS_AT_ONCE):
        end = min(layout.blocks, begin + _BLOCKS_AT_ONCE)
        rows = slice(begin * BLOCK_ROWS, end * BLOCK_ROWS)
        values = stored_values(packed, begin, end).astype(np.float64)
        total = np.zeros((len(x), values.shape[0]))
        for g, first in enumerate(range(0, layout.k_pad, group)):
            cut = slice(first, min(first + group, layout.k_pad))
            total += operand[:, cut] @ values[:, cut].T * scales[rows, g]
        out[:, rows] = total * row_scale
    return out if packed.bias is None else out + packed.bias.astype(np.float64)


def activate(moe: MoePlan, gate: Float, up: Float) -> Float:
    """The gated activation of the layer (abi.h, ktc_epilogue)."""
    if moe.activation != "silu_mul" and moe.limit > 0:
        gate, up = np.minimum(gate, moe.limit), np.clip(up, -moe.limit, moe.limit)
    sharpness = moe.alpha if moe.activation == "swiglu_oai" else 1.0
    with np.errstate(over="ignore"):
        glu = gate / (1 + np.exp(-sharpness * gate))
    out: Float = (up + 1) * glu if moe.activation == "swiglu_oai" else glu * up
    return out


def run_expert(moe: MoePlan, expert: PackedExpert, x: Float) -> Float:
    """One expert on x [M, H] -> [M, H]."""
    both = product(x, expert.gate_up).reshape(len(x), -1, 2, BLOCK_ROWS // 2)  # [M, blocks, gate | up, 16]
    gate, up = both[:, :, 0].reshape(len(x), -1), both[:, :, 1].reshape(len(x), -1)
    hidden = activate(moe, gate, up).astype(np.float32).astype(np.float64)  # [M, I_pad]
    hidden[:, moe.intermediate :] = 0
    return product(hidden, expert.down)[:, : moe.hidden]


def run_moe(
    moe: MoePlan, experts: Sequence[PackedExpert], x: Float, ids: NDArray[np.int64], weights: Float
) -> Iterator[Float]:
    """Yields the layer's output row [H] of each token: x [T, H], ids [T, k] index `experts`, weights [T, k]."""
    for token in range(len(x)):
        rows = [run_expert(moe, experts[e], x[token : token + 1])[0] for e in ids[token]]
        yield np.sum([w * row for w, row in zip(weights[token], rows, strict=True)], axis=0)
