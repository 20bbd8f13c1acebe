"""Every family against Hugging Face's fp32, and the quantised recipes against the oracle of ktc.engine.reference."""

from __future__ import annotations

import pytest
import torch

from ktc.engine.reference import reference_model
from tests.parity.conftest import MODELS, cache_of, error, random_ids

FLOAT_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
LENGTHS = (1, 7, 19, 83)  # 83: past the windows of 8 and 16 (A2) and the original context of 32 (A1)


@torch.no_grad()
@pytest.mark.parametrize("recipe", list(FLOAT_TOLERANCE))
@pytest.mark.parametrize("name", list(MODELS))
def test_r1_r7_a1_a2_prefill_equals_hf(name: str, recipe: str, loaded, hf) -> None:
    # failures R1-R7 (router and activation maths of each family), A1 (YaRN past the original context), A2 (window)
    model, reference = loaded(name, recipe), hf(name)
    for length in LENGTHS:
        ids = random_ids(model, 1, length, seed=length)
        assert error(model(ids).logits, reference(ids).logits) < FLOAT_TOLERANCE[recipe], length
    batch = random_ids(model, 3, 5)
    assert error(model(batch).logits, reference(batch).logits) < FLOAT_TOLERANCE[recipe]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", list(MODELS))
def test_16_steps_with_cache_equal_hf(name: str, kind: str, loaded, hf) -> None:
    model, reference = loaded(name, "fp32"), hf(name)
    ids = random_ids(model, 1, 31)
    caches = [cache_of(m, kind) for m in (model, reference)]
    for _ in range(17):
        ours, theirs = (
            m(ids, cache=cache, use_cache=True).logits[:, -1]
            for m, cache in zip((model, reference), caches, strict=True)
        )
        assert error(ours, theirs) < 1e-4
        ids = theirs.argmax(-1, keepdim=True)
        assert ours.argmax(-1, keepdim=True).equal(ids)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("name", list(MODELS))
def test_quantised_equals_the_reference(name: str, recipe: str, loaded) -> None:
    # the reference: dequantised weights, activations quantised per row, plain torch. failure Q1: fp32 scales
    model = loaded(name, recipe)
    oracle = reference_model(model)
    for length in (1, 19):
        ids = random_ids(model, 1, length, seed=length + 1)
        assert error(model(ids).logits, oracle(ids).logits) < 1e-4, length


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "minimax_m2"])
def test_quantised_is_near_hf(name: str, loaded, hf) -> None:
    """The oracle shares the unpacking with the packer: this catches both being wrong in the same way."""
    ids = random_ids(None, 1, 19)
    expected = hf(name)(ids).logits
    errors = [
        ((loaded(name, r)(ids).logits - expected).norm() / expected.norm()).item() for r in ("bf16", "int8", "int4")
    ]
    assert errors[0] < 0.02 and errors[1] < 0.1 and errors[2] < 0.6
    assert errors == sorted(errors)
