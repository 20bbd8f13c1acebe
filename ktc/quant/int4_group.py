"""Symmetric int4 with a float scale per group, found by a search over twelve steps.

For each step t = x / step is rounded to q in [-8, 7]; the best multiple of that step, by least squares, is
(sum t q) / (sum q^2), and the step with the lowest squared error wins. The sign of the scale puts the largest
weight at -8, the longer side of the range. Scales may therefore be negative.
"""

from __future__ import annotations

import numpy as np

from ktc.quant.base import F32, TINY, Quantized, Quantizer, dequantize_scaled, round_clamp, spans

DIVISORS = np.array([5.5, 6.0, 6.4, 6.8, 7.2, 7.6, 8.0, 8.4, 8.9, 9.5, 10.2, 11.0], np.float32)


def _best_scale(x: F32) -> F32:
    """x [n, width], no all-zero row -> scale [n]."""
    n = x.shape[0]
    largest = np.abs(x).argmax(axis=1)  # the first of equals
    signed_max = -x[np.arange(n), largest]
    inverse = DIVISORS[None, :] * (np.float32(1) / signed_max)[:, None]  # [n, candidates]
    dot = np.zeros((n, len(DIVISORS)), np.float32)
    norm = np.zeros_like(dot)
    for i in range(x.shape[1]):
        t = x[:, i, None] * inverse
        q = round_clamp(t, -8, 7)
        dot += t * q
        norm += q * q
    fit = dot / norm
    gain = dot * fit / (DIVISORS * DIVISORS)
    best = gain.argmax(axis=1)
    scale: F32 = fit[np.arange(n), best] * (signed_max / DIVISORS[best])
    return scale


def quantize(w: F32, group: int) -> Quantized:
    n, k_pad = w.shape
    q = np.zeros((n, k_pad), np.int8)
    scale = np.zeros((n, len(list(spans(k_pad, group)))), np.float32)
    for g, begin, end in spans(k_pad, group):
        live = np.abs(w[:, begin:end]).max(axis=1) >= TINY
        x = w[live, begin:end]
        if not len(x):
            continue
        found = _best_scale(x)
        scale[live, g] = found
        q[live, begin:end] = round_clamp(x * (np.float32(1) / found)[:, None], -8, 7)
    return Quantized(q, scale)


GROUP = Quantizer("int4-group", "int4", "group", quantize, dequantize_scaled)
