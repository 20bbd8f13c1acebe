"""Which experts the tokens of a measured call go to: even or uneven, reproducible, and always to cold weights.

A weight that an earlier call left in a cache would make a later one look faster than it is in a model, where every
layer has weights of its own. So the experts of a call are renamed to those that were used longest ago: loads
(tokens per expert) stay exactly as drawn, and memory is used strictly in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktc.perf.shapes import MoeShape


@dataclass(frozen=True)
class Routing:
    """ids i64 [T, k] and weights f32 [T, k] (rows sum to 1) of one call, and how many experts it touches."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[0])

    @property
    def active(self) -> int:
        return len(np.unique(self.ids))


def draw(rng: np.random.Generator, shape: MoeShape, tokens: int, skew: float = 0.0) -> Routing:
    """Random routing.

    Args:
        skew: 0 = every expert is equally likely; s > 0: expert of rank r with probability ~ 1 / (r + 1)^s, ranks
            dealt at random (uneven loads as in prefill of one kind of text).
    """
    # Gumbel top-k: sampling without replacement by weight, for all tokens at once.
    log_p = -skew * np.log(np.arange(1, shape.experts + 1, dtype=np.float64))
    keys = rng.permutation(log_p)[None, :] + rng.gumbel(size=(tokens, shape.experts))
    ids = np.argpartition(-keys, shape.top_k - 1, axis=1)[:, : shape.top_k].astype(np.int64)
    weights = rng.random((tokens, shape.top_k), dtype=np.float32) + np.float32(0.1)
    weights /= weights.sum(axis=1, keepdims=True)
    return Routing(np.ascontiguousarray(ids), np.ascontiguousarray(weights, dtype=np.float32))


def even_rows(shape: MoeShape, rows: int) -> Routing:
    """`rows` tokens that all go to the same top_k experts: exactly `rows` tokens for each active expert."""
    ids = np.tile(np.arange(shape.top_k, dtype=np.int64), (rows, 1))
    return Routing(ids, np.full((rows, shape.top_k), 1.0 / shape.top_k, dtype=np.float32))


class Deck:
    """The experts of one layer in a fixed shuffled order, dealt in turn."""

    def __init__(self, rng: np.random.Generator, experts: int) -> None:
        self._order = rng.permutation(experts)
        self._next = 0

    def deal(self, routing: Routing) -> Routing:
        """The same routing on the experts whose turn it is."""
        used, inverse = np.unique(routing.ids, return_inverse=True)
        turn = self._order[(self._next + np.arange(len(used))) % len(self._order)]
        self._next = (self._next + len(used)) % len(self._order)
        return Routing(np.ascontiguousarray(turn[inverse.reshape(routing.ids.shape)]), routing.weights)


class Dealer:
    """Layers in turn, and a deck for each. Whoever measures the same weights in one run must share one, or what one
    contestant leaves in the caches would serve the next."""

    def __init__(self, rng: np.random.Generator, layers: int, experts: int) -> None:
        self._decks = [Deck(rng, experts) for _ in range(layers)]
        self._count = 0

    def deal(self, routing: Routing) -> tuple[int, Routing]:
        """The layer whose turn it is, and the same routing on its experts whose turn it is."""
        layer = self._count % len(self._decks)
        self._count += 1
        return layer, self._decks[layer].deal(routing)
