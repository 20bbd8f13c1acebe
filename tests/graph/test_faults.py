"""A step that fails between submit and collect: nothing outstanding, the next step right, the error that it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktc import _runtime
from ktc.graph.build import GraphExecutor
from ktc.graph.inventory import Inventory
from ktc.graph.ir import Node
from ktc.graph.lower import lower
from ktc.graph.oracle import ModelWeights
from tests.graph.models import deep_model, tokens


class Disturbed(ModelWeights):
    """Callbacks raise `error` on request."""

    error: BaseException | None = None

    def callback(self, node: Node) -> Any:
        inner = super().callback(node)

        def call(*args: int) -> None:
            if self.error is not None:
                raise self.error
            inner(*args)

        return call


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the module broke")])
def test_an_error_while_deferred_experts_are_outstanding(error: BaseException) -> None:
    """Dense layers lie between MoE layers: in their callback the last MoE layer's deferred experts are under way."""
    model = deep_model("qwen3_moe", 7, decoder_sparse_step=2, num_experts=16)
    dense = [f"model.layers.{i}.mlp" for i in (0, 2, 4, 6)]
    program = lower(model.config, Inventory.from_model(model), callbacks=dense[1:3])
    weights = Disturbed(model)
    graph = GraphExecutor(program, weights, _runtime.Pool([[0, 0]], pin=False), chunk=16, n_deferred=3)
    ids = tokens(12, seed=21).numpy()
    graph.step(ids, 0)
    want = [graph.step(ids[i : i + 1], 12 + i, decode=True) for i in range(3)]
    for _ in range(5):  # more often than there are places for tickets
        weights.error = error
        with pytest.raises(type(error)):
            graph.step(ids[:1], 12, decode=True)
        weights.error = None
        for i in range(3):
            assert np.array_equal(graph.step(ids[i : i + 1], 12 + i, decode=True), want[i])


def test_s6_a_nan_stays_in_its_row() -> None:
    """failure S6, through the whole graph: a NaN in one row's embedding reaches no other row of a step of one layer."""
    model = deep_model(layers=3)
    model.model.embed_tokens.weight.data[77] = float("nan")
    graph = GraphExecutor(lower(model.config, Inventory.from_model(model)), ModelWeights(model), chunk=16, n_deferred=3)
    ids = tokens(8, seed=22, vocab=70).numpy()
    clean = graph.step(ids, 0, rows=8)
    bad = ids.copy()
    bad[5] = 77
    got = graph.step(bad, 0, rows=8)
    assert np.array_equal(got[:5], clean[:5]) and np.isnan(got[5:]).any(axis=1).all()  # 6 and 7 attend to 5
    assert np.array_equal(graph.step(ids, 0, rows=8), clean), "the NaN is gone with its tokens"
