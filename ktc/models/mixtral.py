"""Mixtral 8x7B and 8x22B: softmax router that always renormalises; w1 is gate, w3 is up, w2 is down."""

from __future__ import annotations

from ktc.models.checks import require_experts, require_silu
from ktc.models.family import FUSED_V5, PER_EXPERT_W1_W3_W2, Config, Family, shape_from


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.num_local_experts, config.num_experts_per_tok)


FAMILY = Family(
    model_type="mixtral",
    moe_class="MixtralSparseMoeBlock",
    shape=shape_from("num_local_experts", "intermediate_size"),
    experts=(PER_EXPERT_W1_W3_W2, FUSED_V5),
    renames=((r"\.block_sparse_moe\.", ".mlp."),),
    check=check,
)
