"""int4 through a 16-entry codebook: w = scale[n] * level(selector[n, g], nibble), integer levels in [-126, 126].

The codebook is uneven (dense near zero, where weights are) and longer on one side; a selector of 4 bits per
group chooses one of eight multipliers and on which side the long end lies. Kernels look the level up and
accumulate int32 over all of K, as with integer scales, at 4 + 4/group bits per weight.

Weights are first rounded to quarters of a level, so that everything after is exact integers: the squared
error of a group under each of the 16 selectors is a sum over a table, and the nibble is a table entry too.
Four channel scales are tried per row (relative to its largest weight); the best is then fitted to the
levels by least squares.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ktc.quant.base import F32, TINY, Quantized, Quantizer, expand_groups, fit_dot, round_clamp, spans

CODEBOOK = np.array([-127, -92, -74, -58, -45, -33, -21, -10, 0, 11, 22, 34, 48, 62, 79, 98], np.int64)
MULTIPLIERS = np.array([26, 58, 69, 79, 89, 100, 111, 127], np.int64)
ZERO = 8
"""The nibble of level 0."""

LEVELS: NDArray[np.int64] = (CODEBOOK[None, :] * MULTIPLIERS[:, None] + 64) >> 7
LEVELS = np.concatenate([LEVELS, -LEVELS])
"""[selector, nibble]; selector 8 + i is selector i negated. runtime/include/ktc/codebook.h holds the same."""

CHANNEL_DIVISORS = np.array([126.0, 132.0, 137.0, 146.0], np.float32)
"""Channel scale = largest weight of the row / divisor. Above 126 the largest weights clip."""

STEPS = 4
LIMIT = 160 * STEPS
"""Weights are rounded to 1 / STEPS of a level and limited to +-LIMIT of these steps."""


def _tables() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Squared error (in steps^2) and nibble by (position + LIMIT, selector); of equal levels the lower nibble."""
    position = np.arange(-LIMIT, LIMIT + 1)
    distance = np.abs(position[:, None, None] - STEPS * LEVELS[None, :8])  # [positions, 8, 16]
    error, code = distance.min(axis=2) ** 2, distance.argmin(axis=2)
    # The negated codebook at x is the codebook at -x.
    return np.concatenate([error, error[::-1]], axis=1), np.concatenate([code, code[::-1]], axis=1)


ERROR, CODE = _tables()


def _positions(x: F32, inverse: F32) -> NDArray[np.int64]:
    return round_clamp(x * inverse[:, None], -LIMIT, LIMIT).astype(np.int64) + LIMIT


def quantize(w: F32, group: int) -> Quantized:
    n, k_pad = w.shape
    groups = list(spans(k_pad, group))
    q = np.zeros((n, k_pad), np.int8)
    scale = np.zeros((n, 1), np.float32)
    selector = np.zeros((n, len(groups)), np.uint8)
    row_amax = np.abs(w).max(axis=1)
    rows = np.flatnonzero(row_amax >= TINY)
    x, row_amax = w[rows], row_amax[rows]

    total = np.zeros((len(CHANNEL_DIVISORS), len(rows)), np.int64)
    chosen = np.zeros((len(CHANNEL_DIVISORS), len(rows), len(groups)), np.int64)
    for c, divisor in enumerate(CHANNEL_DIVISORS):
        position = _positions(x, np.float32(STEPS) / (row_amax / divisor))
        for g, begin, end in groups:
            error = ERROR[position[:, begin:end]].sum(axis=1)  # [rows, selectors]
            chosen[c, :, g] = error.argmin(axis=1)
            total[c] += error.min(axis=1)
    # A step of candidate c is 126 / divisor of a step of the first.
    relative = (np.float64(CHANNEL_DIVISORS[0]) / CHANNEL_DIVISORS.astype(np.float64)) ** 2
    best = (total.astype(np.float64) * relative[:, None]).argmin(axis=0)

    inverse = np.float32(STEPS) / (row_amax / CHANNEL_DIVISORS[best])
    position = _positions(x, inverse)
    steps = x * inverse[:, None]  # the fit is in steps, where it cannot overflow
    s = chosen[best, np.arange(len(rows))]  # [rows, groups]
    dot = np.zeros(len(rows), np.float64)
    norm = np.zeros(len(rows), np.int64)
    for g, begin, end in groups:
        of_group = s[:, g, None]
        code = CODE[position[:, begin:end], of_group]
        level = LEVELS[of_group, code]
        q[rows, begin:end] = code - ZERO
        dot += fit_dot(steps[:, begin:end], level.astype(np.float32)).astype(np.float64)
        norm += (level * level).sum(axis=1)
    scale[rows, 0] = (dot / norm / inverse.astype(np.float64)).astype(np.float32)
    selector[rows] = s
    return Quantized(q, scale, selector)


def dequantize(quantized: Quantized, group: int) -> F32:
    assert quantized.mult is not None
    selector = expand_groups(quantized.mult, quantized.q.shape[1], group)
    level = LEVELS[selector, quantized.q.astype(np.int64) + ZERO]
    out: F32 = quantized.scale * level.astype(np.float32)
    return out


QUANTIZER = Quantizer("int4-codebook", "int4", "codebook", quantize, dequantize)
