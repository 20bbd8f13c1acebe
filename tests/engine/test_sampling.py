from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ktc.engine.sampling import Sampler, SamplingOptions, probabilities
from ktc.errors import KtcError


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 200),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 500]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_probabilities_equal_transformers_warpers(seed, size, temperature, top_k, top_p, min_p) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)
    ours = probabilities(logits, SamplingOptions(temperature, top_k, top_p, min_p))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature != 1 else [])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits)[None].double())[0], -1)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-9)


def test_a_seed_repeats_and_another_differs() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int) -> list[int]:
        sampler = Sampler(SamplingOptions(1.0, top_p=1.0, seed=seed))
        return [sampler(logits) for _ in range(20)]

    assert draw(1) == draw(1) != draw(2)
    fresh = Sampler(SamplingOptions(1.0, top_p=1.0))
    again = Sampler(SamplingOptions(1.0, top_p=1.0, seed=fresh.seed))
    assert [fresh(logits) for _ in range(20)] == [again(logits) for _ in range(20)]


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.7], np.float32))
    sampler = Sampler(SamplingOptions(1.0, top_p=1.0, seed=5))
    counts = np.bincount([sampler(logits) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.7], atol=0.03)


def test_greedy_takes_the_first_largest_and_nan_is_refused() -> None:
    sampler = Sampler(SamplingOptions(temperature=0))
    assert sampler(np.array([1, 3, 3, -np.inf], np.float32)) == 1
    with pytest.raises(KtcError, match="NaN logits"):
        sampler(np.array([1, np.nan], np.float32))


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"min_p": 2}, {"seed": -4}],
)
def test_bad_options_are_named(bad) -> None:
    with pytest.raises(KtcError, match=next(iter(bad)).replace("_", "-")):
        SamplingOptions(**bad)


def test_the_models_own_settings_are_the_defaults() -> None:
    config = SimpleNamespace(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=None)
    assert SamplingOptions.from_config(config) == SamplingOptions(0.6, 20, 0.95)
    assert SamplingOptions.from_config(config, temperature=0, top_k=None) == SamplingOptions(0, 20, 0.95)
    plain = SimpleNamespace(do_sample=False, temperature=0.1)
    assert SamplingOptions.from_config(plain) == SamplingOptions()
