"""Random experts before anything packs them, what a layer of them computes in fp32, and how far a result is from it.

Letters: H hidden, I expert intermediate size, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktc.perf.routing import Routing
from ktc.perf.shapes import MoeShape

WEIGHT_SIGMA = 0.02
DISTINCT = 2


@dataclass(frozen=True)
class DenseExpert:
    """f32 weights of one expert: gate and up [I, H], down [H, I]."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]

    def bf16(self) -> DenseExpert:
        """Rounded to bf16: what every contestant is given, as a checkpoint would hold it."""
        from ktc.pack.device import to_bf16

        def rounded(w: NDArray[np.float32]) -> NDArray[np.float32]:
            return (to_bf16(w).astype(np.uint32) << 16).view(np.float32)

        return DenseExpert(rounded(self.gate), rounded(self.up), rounded(self.down))


def random_experts(shape: MoeShape, seed: int = 0, distinct: int = DISTINCT) -> list[DenseExpert]:
    """`distinct` experts of weights N(0, 0.02), bf16 values; expert e of a layer holds number e % distinct."""
    rng = np.random.default_rng(seed)
    sigma = np.float32(WEIGHT_SIGMA)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * sigma

    h, i = shape.hidden, shape.intermediate
    return [DenseExpert(matrix(i, h), matrix(i, h), matrix(h, i)).bf16() for _ in range(min(distinct, shape.experts))]


def reference(experts: list[DenseExpert], x: NDArray[np.float32], routing: Routing) -> NDArray[np.float32]:
    """The layer in fp32: sum over a token's experts of weight * down(silu(gate x) * up x); f32 [T, H]."""
    out = np.zeros_like(x)
    which = routing.ids % len(experts)
    for number, e in enumerate(experts):
        tokens, slots = np.nonzero(which == number)
        if not len(tokens):
            continue
        rows = x[tokens]
        gate = rows @ e.gate.T
        h = gate / (1 + np.exp(-gate)) * (rows @ e.up.T)
        np.add.at(out, tokens, (h @ e.down.T) * routing.weights[tokens, slots][:, None])
    return out


def relative_error(out: NDArray[np.float32], ref: NDArray[np.float32]) -> float:
    """||out - ref|| / ||ref||."""
    return float(np.linalg.norm(out.astype(np.float64) - ref) / np.linalg.norm(ref.astype(np.float64)))
