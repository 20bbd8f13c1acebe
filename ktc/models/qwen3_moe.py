"""Qwen3 MoE (30B-A3B, 235B-A22B, Coder): softmax router, norms on queries and keys, no shared expert."""

from __future__ import annotations

from ktc.models.checks import require_experts, require_silu
from ktc.models.family import Config, Family, shape_from


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.num_experts, config.num_experts_per_tok)


FAMILY = Family(
    model_type="qwen3_moe",
    moe_class="Qwen3MoeSparseMoeBlock",
    # Released configs say num_experts, files saved by transformers 5 num_local_experts: the config object maps both.
    shape=shape_from("num_experts", "moe_intermediate_size"),
    check=check,
)
