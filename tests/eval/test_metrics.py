"""Perplexity and KL against torch in fp64, and that fp32 is really what is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ktc.eval.metrics import ROWS_AT_ONCE, Score, log_probabilities


def random_logits(rows: int, seed: int, vocab: int = 300) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 5).astype(np.float32)


def test_scores_equal_torch_in_double_precision() -> None:
    rows = ROWS_AT_ONCE * 2 + 3
    ours, theirs = random_logits(rows, 1), random_logits(rows, 2)
    targets = np.random.default_rng(3).integers(0, 300, rows)
    score = Score()
    score.add(ours[:50], targets[:50], theirs[:50])
    score.add(ours[50:], targets[50:], theirs[50:])
    a, b = (torch.from_numpy(x).double() for x in (ours, theirs))
    nll = torch.nn.functional.cross_entropy(a, torch.from_numpy(targets)).item()
    kl = torch.nn.functional.kl_div(a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="batchmean").item()
    assert score.tokens == rows
    assert score.mean_nll == pytest.approx(nll, rel=1e-6) and score.perplexity == pytest.approx(np.exp(nll), rel=1e-5)
    assert score.mean_kl == pytest.approx(kl, rel=1e-5)
    assert score.top_agreement == pytest.approx((a.argmax(-1) == b.argmax(-1)).double().mean().item())


def test_q8_log_probabilities_are_not_16_bit() -> None:
    # failure Q8: a KL baseline stored in 16 bits gave a wrong perplexity. A KL of 1e-6 must be seen as such.
    logits = random_logits(64, 4)
    nearby = logits + (np.random.default_rng(5).standard_normal(logits.shape) * 2e-3).astype(np.float32)
    score = Score()
    score.add(nearby, np.zeros(64, np.int64), logits)
    a, b = (torch.from_numpy(x).double().log_softmax(-1) for x in (nearby, logits))
    want = torch.nn.functional.kl_div(a, b, log_target=True, reduction="batchmean").item()
    assert 0 < want < 1e-5 and score.mean_kl == pytest.approx(want, rel=0.05)
    assert log_probabilities(logits).dtype == np.float32


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e4, 0.0, -3e4]], np.float32)
    assert np.allclose(log_probabilities(logits), [[0, -3e4, -6e4]])


def test_change_is_paired() -> None:
    """Two runs whose tokens differ wildly from each other but hardly between runs: the error is the difference's."""
    logits, targets = random_logits(400, 6), np.random.default_rng(7).integers(0, 300, 400)
    base, other = Score(), Score()
    base.add(logits, targets, None)
    shifted = logits.copy()
    shifted[np.arange(400), targets] -= 0.01
    other.add(shifted, targets, None)
    change, error = other.change(base)
    assert 0.005 < change < 0.0101 and error < 1e-3
    assert base.mean_kl is None and base.top_agreement is None
