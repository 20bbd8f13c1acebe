"""What a quantiser takes and gives, and the few float32 steps that all of them share.

Every operation is rounded to float32 once and in a stated order, because packed bytes must not depend on the
host. k is split into groups of `group` consecutive columns; the last may be partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.layout import DataType, QuantScheme, ScaleMode

F32 = NDArray[np.float32]

TINY = np.float32(2.0**-100)
"""A group (or row) whose largest magnitude is below this becomes exact zeros with scale 0."""


@dataclass(frozen=True)
class Quantized:
    """Integers and scales of W [n, k_pad] in plain row order.

    Attributes:
        q: int8 [n, k_pad].
        scale: float32 [n, groups] for group scales, else [n, 1].
        mult: uint8 [n, groups]: multipliers (integer scales) or selectors (codebook), else None.
    """

    q: NDArray[np.int8]
    scale: F32
    mult: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Quantizer:
    """One registry entry.

    Attributes:
        name: as in recipes and reports.
        data_type, scale: what the layout stores.
        quantize: (W float32 [n, k_pad] without NaN or infinity, group) -> Quantized.
        dequantize: (Quantized, group) -> float32 [n, k_pad].
    """

    name: str
    data_type: DataType
    scale: ScaleMode
    quantize: Callable[[F32, int], Quantized]
    dequantize: Callable[[Quantized, int], F32]

    def scheme(self, group: int) -> QuantScheme:
        return QuantScheme(self.data_type, self.scale, 0 if self.scale == "channel" else group)


def spans(k_pad: int, group: int) -> Iterator[tuple[int, int, int]]:
    """(index, begin, end) of each group; group 0 is the whole row."""
    width = group or k_pad
    for index, begin in enumerate(range(0, k_pad, width)):
        yield index, begin, min(begin + width, k_pad)


def round_clamp(values: F32, low: int, high: int) -> F32:
    """Nearest integer, ties to even, limited to [low, high]; float32."""
    return np.clip(np.rint(values), np.float32(low), np.float32(high))


def fit_dot(x: F32, q: F32) -> F32:
    """sum x * q over [n, width]: four lanes by column modulo 4, then (0 + 1) + (2 + 3)."""
    lanes = np.zeros((x.shape[0], 4), np.float32)
    for i in range(0, x.shape[1], 4):
        lanes += x[:, i : i + 4] * q[:, i : i + 4]
    total: F32 = (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])
    return total


def expand_groups(per_group: NDArray[Any], k_pad: int, group: int) -> NDArray[Any]:
    """[n, groups] -> [n, k_pad]."""
    return np.repeat(per_group, group or k_pad, axis=1)[:, :k_pad]


def dequantize_scaled(quantized: Quantized, group: int) -> F32:
    """w = scale * q, with one scale per row or per group."""
    scale = expand_groups(quantized.scale, quantized.q.shape[1], group)
    return np.asarray(scale, np.float32) * quantized.q.astype(np.float32)
