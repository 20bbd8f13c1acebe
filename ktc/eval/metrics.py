"""Per-token figures of logits against the text and against a reference. Log-probabilities are fp32 (failure Q8).

Letters: T predicted tokens, V vocabulary. Sums over tokens are fp64. Nothing here runs a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ROWS_AT_ONCE = 64
"""Rows of one pass: bounds the temporaries of a large vocabulary."""


def log_probabilities(logits: Floats) -> Floats:
    """Log-softmax of logits f32 [T, V], in fp32 throughout (the normaliser is summed in fp64)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    out: Floats = shifted - np.log(total).astype(np.float32)
    return out


def kl_divergence(reference: Floats, other: Floats) -> NDArray[np.float64]:
    """KL(reference || other) per row, nats [T], of log-probabilities f32 [T, V]."""
    out: NDArray[np.float64] = (np.exp(reference) * (reference - other)).sum(axis=1, dtype=np.float64)
    return out


@dataclass
class Score:
    """Figures of one way to run a model, token by token.

    Attributes:
        nll: negative log-probability of each token of the text, nats.
        kl: KL(reference || this) at each token, nats; empty without a reference.
        same_top: whether the reference's likeliest token is this one's too, per token; empty without a reference.
        seconds: spent in the model.
    """

    nll: list[NDArray[np.float64]] = field(default_factory=list)
    kl: list[NDArray[np.float64]] = field(default_factory=list)
    same_top: list[NDArray[np.bool_]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, logits: Floats, targets: NDArray[np.int64], reference: Floats | None) -> None:
        """Count T tokens.

        Args:
            logits: f32 [T, V], row i predicts targets[i].
            reference: logits f32 [T, V] of the reference at the same places.
        """
        for begin in range(0, len(targets), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            ours, chosen = log_probabilities(logits[rows]), targets[rows]
            self.nll.append(-ours[np.arange(len(chosen)), chosen].astype(np.float64))
            if reference is not None:
                theirs = log_probabilities(reference[rows])
                self.kl.append(kl_divergence(theirs, ours))
                self.same_top.append(theirs.argmax(axis=1) == ours.argmax(axis=1))

    @property
    def tokens(self) -> int:
        return sum(len(part) for part in self.nll)

    @property
    def mean_nll(self) -> float:
        return _mean(self.nll)

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_nll)

    @property
    def mean_kl(self) -> float | None:
        """Nats; None without a reference."""
        return _mean(self.kl) if self.kl else None

    @property
    def top_agreement(self) -> float | None:
        """Share of tokens at which both would choose the same, greedily; None without a reference."""
        return _mean(self.same_top) if self.same_top else None

    def change(self, base: Score) -> tuple[float, float]:
        """(relative change of perplexity against `base`, its standard error), both of the same tokens.

        The error is that of the mean of paired differences: much smaller than either perplexity's own.
        """
        difference = np.concatenate(self.nll) - np.concatenate(base.nll)
        ratio = math.exp(float(difference.mean()))
        spread = float(difference.std(ddof=1)) if len(difference) > 1 else 0.0
        return ratio - 1, ratio * spread / math.sqrt(len(difference))


def _mean(parts: list[NDArray[np.float64]] | list[NDArray[np.bool_]]) -> float:
    return float(np.concatenate(parts).mean(dtype=np.float64))
