"""Qwen3 MoE (30B-A3B, 235B-A22B, Coder): softmax router, norms on queries and keys, no shared expert."""

from __future__ import annotations

from ktc.models.checks import silu_experts
from ktc.models.family import Family, shape_from

FAMILY = Family(
    model_type="qwen3_moe",
    moe_class="Qwen3MoeSparseMoeBlock",
    # Released configs say num_experts, files saved by transformers 5 num_local_experts: the config object maps both.
    shape=shape_from("num_experts", "moe_intermediate_size"),
    check=silu_experts("num_experts"),
)
