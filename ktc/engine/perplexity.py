"""Held-out perplexity of a model on a text. Log-probabilities are fp32, their sum fp64 (failure Q8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ktc.errors import UsageError
from ktc.progress import Progress


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-probability (`nll`, nats) over `tokens` predicted tokens."""

    tokens: int
    nll: float

    @property
    def value(self) -> float:
        return math.exp(self.nll)


def perplexity(model: Any, tokenizer: Any, text: str, window: int = 512) -> Perplexity:
    """Perplexity over consecutive windows that do not overlap.

    Every window starts with the BOS token if the tokenizer has one, so that each of its tokens is predicted; without
    a BOS the first token of a window is context only.

    Args:
        model: a causal `PreTrainedModel` on the CPU, in any dtype.
        window: tokens of text per window.
    Raises:
        UsageError: the text has fewer than two tokens.
    """
    import torch

    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # longer than the context is fine
    bos = getattr(tokenizer, "bos_token_id", None)
    if len(ids) < 2:
        raise UsageError("the text has fewer than two tokens")
    total, count = 0.0, 0
    with Progress("perplexity", len(ids), "tokens") as progress, torch.inference_mode():
        for begin in range(0, len(ids), window):
            part = ids[begin : begin + window]
            row = torch.tensor([part if bos is None else [bos, *part]])
            if row.shape[1] < 2:
                continue
            logits = model(row[:, :-1], use_cache=False).logits[0].float()  # [T, V]
            chosen = torch.log_softmax(logits, dim=-1).gather(1, row[0, 1:, None])
            total -= chosen.double().sum().item()
            count += chosen.shape[0]
            progress.update(len(part))
    return Perplexity(count, total / count)
