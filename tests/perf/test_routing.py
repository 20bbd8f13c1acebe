"""Routing of measured calls: valid, reproducible, uneven when asked, and always to the weights used longest ago."""

from __future__ import annotations

import numpy as np

from ktc.perf.routing import Deck, draw, even_rows
from ktc.perf.shapes import MoeShape

SHAPE = MoeShape("s", 16, 64, 64, 4)


def loads(ids: np.ndarray) -> np.ndarray:
    return np.bincount(ids.reshape(-1), minlength=SHAPE.experts)


def test_every_token_gets_distinct_experts_and_weights_that_sum_to_one() -> None:
    route = draw(np.random.default_rng(0), SHAPE, 50)
    assert route.ids.dtype == np.int64 and route.weights.dtype == np.float32 and route.tokens == 50
    assert all(len(set(row)) == SHAPE.top_k for row in route.ids.tolist())
    assert route.ids.min() >= 0 and route.ids.max() < SHAPE.experts
    np.testing.assert_allclose(route.weights.sum(1), 1, rtol=1e-6)
    again = draw(np.random.default_rng(0), SHAPE, 50)
    assert (again.ids == route.ids).all() and (again.weights == route.weights).all()


def test_skew_makes_loads_uneven() -> None:
    even = loads(draw(np.random.default_rng(1), SHAPE, 400).ids)
    uneven = loads(draw(np.random.default_rng(1), SHAPE, 400, skew=1.5).ids)
    assert even.sum() == uneven.sum() == 400 * SHAPE.top_k
    assert uneven.max() > 2 * even.max() / 1.5 and uneven.min() < even.min()


def test_a_deck_keeps_loads_and_uses_experts_in_turn() -> None:
    rng = np.random.default_rng(2)
    deck = Deck(rng, SHAPE.experts)
    seen: list[int] = []
    for _ in range(8):
        drawn = draw(rng, SHAPE, 1)
        dealt = deck.deal(drawn)
        assert sorted(loads(drawn.ids)) == sorted(loads(dealt.ids))
        assert dealt.weights is drawn.weights
        seen += dealt.ids.reshape(-1).tolist()
    # 8 calls of 4 experts over 16: nothing is used again before everything else was.
    assert sorted(seen[:16]) == sorted(seen[16:]) == list(range(16))
    assert [set(seen[i : i + 4]) for i in range(0, 16, 4)] == [set(seen[i : i + 4]) for i in range(16, 32, 4)]


def test_even_rows_give_each_active_expert_the_same_count() -> None:
    route = even_rows(SHAPE, 7)
    assert route.active == SHAPE.top_k and set(loads(route.ids)) == {0, 7}
