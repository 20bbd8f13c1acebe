"""Native replay equals Hugging Face's fp32 logits to 1e-5 for every family: prefill chunks, decode, far positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ktc import _runtime
from tests.graph.models import executor, hf_logits, relative, run, tokens
from tests.tiny import FAMILIES, tiny_model

TOLERANCE = 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_odd_chunks_then_decode(family: str) -> None:
    """Also failures R1 to R7 (routers, gates, clamps), A1 and A2: gpt_oss passes its window and original context."""
    model, ids, chunks = tiny_model(family), tokens(150), [13, 1, 50, 7, 64]
    graph = executor(model, _runtime.Pool([[0, 0]], pin=False))
    want = hf_logits(model, ids, chunks if family == "glm_moe_dsa" else None)
    assert relative(run(graph, ids, chunks), want) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_greedy_steps(family: str) -> None:
    model, prompt = tiny_model(family), tokens(9, seed=3)
    graph = executor(model)
    ids, logits = prompt.tolist(), graph.step(prompt.numpy(), 0)
    for _ in range(16):
        ids.append(int(logits[0].argmax()))
        logits = graph.step(np.array(ids[-1:]), len(ids) - 1, decode=True)
    with torch.no_grad():
        want = model.generate(prompt[None], max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ids == want[0].tolist()


VARIATIONS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0,
                     "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32}}),
    ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": 24}),
    ("deepseek_v2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 16}}),
    ("mixtral", {"sliding_window": 11}),
    ("mixtral", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "qkv_bias": False}),
    ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "num_hidden_layers": 3}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4, "attention_bias": True}),
    ("olmoe", {"clip_qkv": 0.5, "norm_topk_prob": True, "num_key_value_heads": 2}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
    ("granitemoe", {"attention_bias": True, "tie_word_embeddings": False}),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    ("mixtral", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "overrides"), VARIATIONS, ids=[f"{f}-{'-'.join(o)}" for f, o in VARIATIONS])
def test_config_values_that_change_the_arithmetic(family: str, overrides: dict[str, Any]) -> None:
    # failure A1: YaRN's mscale shows only past the original context.
    model, ids = tiny_model(family, **overrides), tokens(100, seed=5)
    assert relative(run(executor(model), ids, [61, 30]), hf_logits(model, ids)) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "granitemoe"])
def test_half_precision_weights_are_read_exactly(family: str, dtype: str) -> None:
    model, ids = tiny_model(family, dtype=dtype), tokens(40)
    got = run(executor(model), ids, [30])
    assert relative(got, hf_logits(model.float(), ids)) <= TOLERANCE


@pytest.mark.parametrize("isa", _runtime.ops.available())
def test_every_isa(isa: str) -> None:
    model, ids = tiny_model("deepseek_v3"), tokens(40)
    graph = executor(model, isa=isa)
    assert graph.native.isa == isa
    assert relative(run(graph, ids, [29]), hf_logits(model, ids)) <= TOLERANCE


def test_same_bits_for_every_thread_count() -> None:
    # failure Q5
    model, ids = tiny_model("deepseek_v3"), tokens(90)
    alone = run(executor(model), ids, [64, 9])
    for threads in (2, 5):
        assert np.array_equal(run(executor(model, _runtime.Pool([[0] * threads], pin=False)), ids, [64, 9]), alone)


def test_rows_of_logits_and_reuse_of_the_cache() -> None:
    """The last R rows are the same whatever R is; going back to a position overwrites what was there."""
    model, ids = tiny_model("qwen2_moe"), tokens(50)
    graph, n = executor(model), ids.numpy()
    every = graph.step(n, 0, rows=50)
    assert np.array_equal(graph.step(n, 0, rows=3), every[-3:])
    graph.step(tokens(20, seed=8).numpy(), 30)  # another continuation from position 30
    again = graph.step(n[30:], 30, rows=20)
    assert relative(again, every[30:]) <= TOLERANCE
