"""Tiny models as native executors, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from ktc.graph.build import GraphExecutor
from ktc.graph.inventory import Inventory
from ktc.graph.lower import lower
from ktc.graph.oracle import ModelWeights
from tests.tiny import tiny_model


def executor(model: Any, pool: Any = None, *, callbacks: Collection[str] = (), **options: Any) -> GraphExecutor:
    """The model's own weights on the native operators, nothing packed."""
    program = lower(model.config, Inventory.from_model(model), callbacks)
    return GraphExecutor(program, ModelWeights(model), pool, **{"chunk": 64, **options})


def hf_logits(model: Any, ids: torch.Tensor, chunks: Sequence[int] | None = None) -> NDArray[np.float32]:
    """[T, vocab] of one sequence, by Hugging Face, fp32.

    Args:
        chunks: prefill in these and then token by token, as `run`; None = all at once. The two differ where frequencies
            or chosen keys (scores of an indexer are zero more often than not) depend on how much was seen.
    """
    sizes = [len(ids)] if chunks is None else [*chunks, *[1] * (len(ids) - sum(chunks))]
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in ids.split(sizes):
            parts.append(model(part[None], cache=cache, use_cache=True).logits[0].float().numpy())
    return np.concatenate(parts)


def run(graph: GraphExecutor, ids: torch.Tensor, chunks: list[int]) -> NDArray[np.float32]:
    """Logits of every position: prefill in `chunks`, then token by token."""
    n, at, out = ids.numpy().astype(np.int64), 0, []
    for rows in chunks:
        out.append(graph.step(n[at : at + rows], at, rows=rows))
        at += rows
    for i in range(at, len(n)):
        out.append(graph.step(n[i : i + 1], i, decode=True))
    return np.concatenate(out)


def tokens(count: int, seed: int = 1, vocab: int = 128) -> torch.Tensor:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def relative(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


def deep_model(family: str = "deepseek_v3", layers: int = 5, **overrides: Any) -> Any:
    """More MoE layers and slots than the tiny default: deferral needs both."""
    slots: dict[str, Any] = {"num_hidden_layers": layers, "num_experts_per_tok": 6}
    slots |= {"n_routed_experts": 16} if family.startswith(("deepseek", "glm")) else {}
    return tiny_model(family, **{**slots, **overrides})
