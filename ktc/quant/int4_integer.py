"""int4 with integer group scales: w = scale[n] * mult[n, g] * q, mult in 1..16, q in [-8, 7].

The kernel multiplies inside int8 and touches float once per output, so groups cost no float work. The channel
scale is tried at two values; under each, every group takes the multiplier (of eight neighbours) with the least
squared error. The channel scale is then fitted to the integers by least squares. The idea of a small integer
scale under a channel scale is QServe's progressive quantisation. A group of zeros has multiplier 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ktc.quant.base import F32, TINY, Quantized, Quantizer, expand_groups, fit_dot, round_clamp, spans

CHANNEL_DIVISORS = np.array([7.0, 8.0], np.float32)
WINDOW = 8
MAX_MULT = 16
_FIRST = np.float32(1) / np.float32(9.5)


def _group_multipliers(x: F32, amax: F32, channel: F32, unit: F32) -> tuple[F32, NDArray[np.int64]]:
    """x [n, width], amax and channel scale [n] -> least squared error (in unit^2) and its multiplier, [n]."""
    n = x.shape[0]
    first = np.clip(np.rint(amax / channel * _FIRST), 1, MAX_MULT - WINDOW + 1).astype(np.int64)
    mult = first[:, None] + np.arange(WINDOW)
    step = channel[:, None] * mult.astype(np.float32)
    inverse = np.float32(1) / step
    relative = step / unit[:, None]
    error = np.zeros((n, WINDOW), np.float32)
    for i in range(x.shape[1]):
        t = x[:, i, None] * inverse
        e = t - round_clamp(t, -8, 7)
        error += e * e
    error *= relative * relative
    best = error.argmin(axis=1)
    return error[np.arange(n), best], mult[np.arange(n), best]


def quantize(w: F32, group: int) -> Quantized:
    n, k_pad = w.shape
    groups = list(spans(k_pad, group))
    q = np.zeros((n, k_pad), np.int8)
    scale = np.zeros((n, 1), np.float32)
    mult = np.zeros((n, len(groups)), np.uint8)
    row_amax = np.abs(w).max(axis=1)
    rows = np.flatnonzero(row_amax >= TINY)
    x, row_amax = w[rows], row_amax[rows]
    if not len(rows):
        return Quantized(q, scale, mult)

    unit = row_amax / (np.float32(16) * CHANNEL_DIVISORS[0])
    total = np.zeros((len(CHANNEL_DIVISORS), len(rows)), np.float32)
    chosen = np.zeros((len(CHANNEL_DIVISORS), len(rows), len(groups)), np.int64)
    for g, begin, end in groups:
        amax = np.abs(x[:, begin:end]).max(axis=1)
        live = amax >= TINY
        for c, divisor in enumerate(CHANNEL_DIVISORS):
            channel = row_amax[live] / (np.float32(16) * divisor)
            error, best = _group_multipliers(x[live, begin:end], amax[live], channel, unit[live])
            total[c, live] += error
            chosen[c, live, g] = best
    choice = np.where(total[1] < total[0], 1, 0)
    channel = row_amax / (np.float32(16) * CHANNEL_DIVISORS[choice])
    m = chosen[choice, np.arange(len(rows))]  # [rows, groups]

    dot = np.zeros(len(rows), np.float64)
    norm = np.zeros(len(rows), np.int64)
    for g, begin, end in groups:
        step = channel * m[:, g].astype(np.float32)
        inverse = np.where(m[:, g] > 0, np.float32(1) / np.where(m[:, g] > 0, step, np.float32(1)), np.float32(0))
        rounded = round_clamp(x[:, begin:end] * inverse[:, None], -8, 7)
        q[rows, begin:end] = rounded
        dot += fit_dot(x[:, begin:end], rounded).astype(np.float64) * m[:, g]
        norm += (rounded.astype(np.int64) ** 2).sum(axis=1) * m[:, g] ** 2
    fitted = (dot / np.maximum(norm, 1)).astype(np.float32)
    scale[rows, 0] = np.where(norm > 0, fitted, channel)
    mult[rows] = m
    return Quantized(q, scale, mult)


def dequantize(quantized: Quantized, group: int) -> F32:
    assert quantized.mult is not None
    mult = expand_groups(quantized.mult, quantized.q.shape[1], group)
    product = np.asarray(mult, np.int32) * quantized.q.astype(np.int32)
    return quantized.scale * product.astype(np.float32)


INTEGER = Quantizer("int4-integer", "int4", "integer", quantize, dequantize)
