from __future__ import annotations

import math

import pytest
import torch

from ktc.engine.perplexity import perplexity
from ktc.errors import KtcError


@torch.no_grad()
def test_equals_the_loss_of_transformers(hf_model, tokenizer) -> None:
    text = "the quick brown fox and the lazy dog, and the other thing"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected, count = 0.0, 0
    for begin in range(0, len(ids), 8):
        row = torch.tensor([[tokenizer.bos_token_id, *ids[begin : begin + 8]]])
        n = row.shape[1] - 1
        expected += hf_model(row, labels=row).loss.item() * n
        count += n
    got = perplexity(hf_model, tokenizer, text, window=8)
    assert got.tokens == count == len(ids)
    assert got.value == pytest.approx(math.exp(expected / count), rel=1e-5)


def test_q8_16_bit_logits_are_widened_first(hf_model, tokenizer) -> None:
    # failure Q8: log-probabilities in 16 bit gave a wrong perplexity
    import copy

    text = "the quick brown fox and the lazy dog"
    half = copy.deepcopy(hf_model).to(torch.bfloat16)
    exact, rounded = perplexity(hf_model, tokenizer, text), perplexity(half, tokenizer, text)
    logits = half(torch.tensor([[0, 100, 101]])).logits
    assert logits.dtype == torch.bfloat16
    assert rounded.value == pytest.approx(exact.value, rel=0.05) and rounded.nll != exact.nll


def test_too_short(hf_model, tokenizer) -> None:
    with pytest.raises(KtcError, match="fewer than two tokens"):
        perplexity(hf_model, tokenizer, "")
