"""Naive numpy references of what the kernels do: quantise, pack, multiply, activate.

Written from abi.h, slow and obvious on purpose. Weights here are given as integers plus scales (how a matrix is
quantised is the packer's business). Shapes: W [N, K], x [M, K], all padded by these functions as the layout says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktc.layout import MatrixLayout, QuantScheme, round_up

Array = NDArray[np.generic]


def to_bf16(x: Array) -> NDArray[np.uint16]:
    """Nearest even, NaN stays NaN. f32 -> bits."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), ((u >> 16) | 0x40).astype(np.uint16), rounded)


def from_bf16(h: Array) -> NDArray[np.float32]:
    return (np.asarray(h, np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass
class Weights:
    """A packed matrix and its exact dequantised value.

    Attributes:
        tiles, scale, mult: as a kernel takes them (scale and mult may be None).
        dense: float64 [n_pad, k_pad], what the bytes mean.
        q: int64 [n_pad, k_pad], integer formats only: what is stored.
        product: int64 [n_pad, k_pad] under multipliers or the codebook: what a kernel multiplies with, else None.
    """

    scheme: QuantScheme
    n: int
    k: int
    tiles: NDArray[np.uint8]
    scale: NDArray[np.float32] | None
    mult: NDArray[np.uint8] | None
    dense: NDArray[np.float64]
    q: NDArray[np.int64] | None
    product: NDArray[np.int64] | None = None

    @property
    def layout(self) -> MatrixLayout:
        return MatrixLayout(self.n, self.k, self.scheme)


def pack_tiles(values: Array, data_type: str) -> NDArray[np.uint8]:
    """Elements [n_pad, k_pad] (f32, bf16 bits, or integers q) -> tile bytes, by the formulas of abi.h."""
    n, k = values.shape
    blocks = n // 32
    if data_type == "fp32":
        t = values.astype(np.float32).reshape(blocks, 2, 16, k // 16, 16)  # b h c s r
        return np.ascontiguousarray(t.transpose(0, 3, 1, 4, 2)).view(np.uint8).reshape(-1)
    if data_type == "bf16":
        t = values.astype(np.uint16).reshape(blocks, 2, 16, k // 32, 16, 2)  # b h c s r j
        return np.ascontiguousarray(t.transpose(0, 3, 1, 4, 2, 5)).view(np.uint8).reshape(-1)
    t = values.reshape(blocks, 2, 16, k // 64, 16, 4)  # b h c s r j
    t = t.transpose(0, 3, 1, 4, 2, 5)  # b s h r c j
    if data_type == "int8":
        return np.ascontiguousarray((t + 128).astype(np.uint8)).reshape(-1)
    nibbles = (t + 8).astype(np.uint8)
    return np.ascontiguousarray(nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(-1)


def random_weights(n: int, k: int, scheme: QuantScheme, rng: np.random.Generator) -> Weights:
    """A matrix that uses every value of its format (-128 and -8 included), padded with zeros as the layout says."""
    layout = MatrixLayout(n, k, scheme)
    n_pad, k_pad = layout.n_pad, layout.k_pad
    live = np.zeros((n_pad, k_pad), bool)
    live[:n, :k] = True
    if scheme.data_type in ("fp32", "bf16"):
        w = np.where(live, rng.standard_normal((n_pad, k_pad)), 0).astype(np.float32)
        if scheme.data_type == "fp32":
            return Weights(scheme, n, k, pack_tiles(w, "fp32"), None, None, w.astype(np.float64), None)
        bits = to_bf16(w)
        return Weights(scheme, n, k, pack_tiles(bits, "bf16"), None, None, from_bf16(bits).astype(np.float64), None)
    low, high = (-128, 127) if scheme.data_type == "int8" else (-8, 7)
    q = np.where(live, rng.integers(low, high + 1, (n_pad, k_pad)), 0).astype(np.int64)
    q[0, : min(k, 4)] = low
    groups = scheme.groups(k_pad)
    span = scheme.group or k_pad
    of_column = np.arange(k_pad) // span  # group of each column
    scale = rng.uniform(0.5, 1.5, (n_pad, groups if scheme.scale == "group" else 1)).astype(np.float32) / 64
    mult, product = None, None
    dense = q.astype(np.float64)
    if scheme.scale == "integer":
        mult = rng.integers(0, 17, (n_pad, groups)).astype(np.uint8)
        mult[0] = 16
        product = q * mult[:, of_column]
        dense = product.astype(np.float64)
    elif scheme.scale == "codebook":
        selector = rng.integers(0, 16, (n_pad, groups))
        selector[0] = 7  # level -126
        product = codebook_level(selector[:, of_column], q + 8)
        dense = product.astype(np.float64)
        mult = selector.astype(np.uint8)
    dense *= scale[:, of_column] if scheme.scale == "group" else scale
    tiles = pack_tiles(q, scheme.data_type)
    assert tiles.nbytes == layout.tile_bytes
    packed_mult = None if mult is None else _by_block(mult)
    if packed_mult is not None and scheme.scale == "codebook":
        halves = packed_mult.reshape(-1, 2, 16)
        packed_mult = np.ascontiguousarray(halves[:, 0] | halves[:, 1] << 4).reshape(-1)
    return Weights(scheme, n, k, tiles, _by_block(scale), packed_mult, dense, q, product)


def codebook_level(selector: Array, code: Array) -> NDArray[np.int64]:
    """The level of KTC_SCALE_CODEBOOK (abi.h, codebook.h) under selectors 0..15 of codes 0..15."""
    book = np.array([-127, -92, -74, -58, -45, -33, -21, -10, 0, 11, 22, 34, 48, 62, 79, 98])
    multiplier = np.array([26, 58, 69, 79, 89, 100, 111, 127])
    level = (book[code] * multiplier[np.asarray(selector) & 7] + 64) >> 7
    return np.where(np.asarray(selector) & 8, -level, level).astype(np.int64)


def _by_block(per_group: Array) -> Array:
    """[n_pad, groups] -> [n_pad / 32][groups][32] (with one group: just [n_pad])."""
    n_pad, groups = per_group.shape
    return np.ascontiguousarray(per_group.reshape(n_pad // 32, 32, groups).transpose(0, 2, 1)).reshape(-1)


def quantize_rows(x: Array, amax: Array | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """x [M, K] -> (q [M, K], scale [M]) exactly as the kernels do it (float32 arithmetic, nearest even)."""
    x = np.asarray(x, np.float32)
    top = np.max(np.abs(x), axis=1, initial=0.0) if amax is None else np.abs(np.asarray(amax, np.float32))
    scale = np.zeros(len(x), np.float32)
    q = np.zeros(x.shape, np.int64)
    for m, a in enumerate(top.astype(np.float32)):
        if not np.isfinite(a):
            scale[m] = np.nan
        elif a > np.float32(1e-36):
            scale[m] = a / np.float32(127)
            q[m] = np.clip(np.rint(x[m] * (np.float32(127) / a)), -127, 127).astype(np.int64)
    return q, scale


def act_tiles(x: Array, k_pad: int, data_type: str, amax: Array | None = None) -> tuple[Array, Array, Array]:
    """x [M, K] -> (tiles [ceil(M/16), steps, 16, 64] u8, scale [M], values [M, k_pad] as float64)."""
    m, k = x.shape
    wide = np.zeros((m, k_pad), np.float32)
    wide[:, :k] = x
    rows = round_up(m, 16)
    scale = np.zeros(m, np.float32)
    if data_type == "fp32":
        raw, values = wide.view(np.uint8), wide.astype(np.float64)
    elif data_type == "bf16":
        bits = to_bf16(wide)
        raw, values = bits.view(np.uint8), from_bf16(bits).astype(np.float64)
    else:
        q, scale = quantize_rows(wide, amax)
        raw, values = q.astype(np.int8).view(np.uint8), q.astype(np.float64)
    padded = np.zeros((rows, raw.shape[1]), np.uint8)
    padded[:m] = raw
    return padded.reshape(rows // 16, 16, -1, 64).transpose(0, 2, 1, 3), scale, values


def gemm(x: Array, w: Weights, amax: Array | None = None) -> NDArray[np.float64]:
    """x [M, K] float32 -> [M, n_pad]: what an exact kernel would give, without bias.

    Integer formats without fp32 group scales follow the kernels bit for bit: float(acc) * (row scale * scale).
    """
    layout = w.layout
    _, row_scale, values = act_tiles(x, layout.k_pad, w.scheme.data_type, amax)
    if w.q is None:
        with np.errstate(invalid="ignore"):
            return values @ w.dense.T
    if w.scheme.scale == "group":
        return (values @ w.dense.T) * row_scale.astype(np.float64)[:, None]
    weights = w.q if w.product is None else w.product
    acc = (values @ weights.T.astype(np.float64)).astype(np.float32)  # integers below 2^53: exact
    assert w.scale is not None
    return (acc * (row_scale[:, None] * w.scale[None, :])).astype(np.float64)


def sigmoid(x: Array) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def gated(y: Array, epilogue: str, alpha: float, limit: float) -> NDArray[np.float64]:
    """y [M, n_pad] with gate and up interleaved in sixteens -> h [M, n_pad / 2]."""
    blocks = np.asarray(y, np.float64).reshape(len(y), -1, 2, 16)
    gate, up = blocks[:, :, 0].reshape(len(y), -1), blocks[:, :, 1].reshape(len(y), -1)
    if epilogue != "silu_mul":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if epilogue == "swiglu_oai":
        return (up + 1) * gate * sigmoid(alpha * gate)
    return gate * sigmoid(gate) * up


def groups_of(scheme: QuantScheme, k_pad: int) -> int:
    """Sums per activation row (abi.h: 1 unless KTC_SCALE_GROUP)."""
    return math.ceil(k_pad / scheme.group) if scheme.scale == "group" else 1
