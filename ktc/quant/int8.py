"""Symmetric int8: scale = amax / 127, per row (channel) or per group; q in [-127, 127]."""

from __future__ import annotations

import numpy as np

from ktc.quant.base import F32, TINY, Quantized, Quantizer, dequantize_scaled, round_clamp, spans

_LIMIT = np.float32(127)


def quantize(w: F32, group: int) -> Quantized:
    n, k_pad = w.shape
    q = np.zeros((n, k_pad), np.int8)
    scale = np.zeros((n, len(list(spans(k_pad, group)))), np.float32)
    for g, begin, end in spans(k_pad, group):
        x = w[:, begin:end]
        amax = np.abs(x).max(axis=1)
        live = amax >= TINY
        safe = np.where(live, amax, np.float32(1))
        scale[:, g] = np.where(live, amax / _LIMIT, np.float32(0))
        inverse = np.where(live, _LIMIT / safe, np.float32(0))
        q[:, begin:end] = round_clamp(x * inverse[:, None], -127, 127)
    return Quantized(q, scale)


CHANNEL = Quantizer("int8-channel", "int8", "channel", lambda w, group: quantize(w, 0), dequantize_scaled)
GROUP = Quantizer("int8-group", "int8", "group", quantize, dequantize_scaled)
