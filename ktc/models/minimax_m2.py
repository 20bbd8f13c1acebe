"""MiniMax-M2, M2.5 and M2.7: sigmoid router whose correction bias belongs to the MoE block, not to the router."""

from __future__ import annotations

from typing import Any

from ktc.models.checks import require, require_experts, require_silu
from ktc.models.family import FUSED_V5, PER_EXPERT_GATE_UP_DOWN, PER_EXPERT_W1_W3_W2, Config, Family, shape_from


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.num_local_experts, config.num_experts_per_tok)
    require(config, "scoring_func", "sigmoid")
    require(config, "use_routing_bias", True)
    require(config, "shared_intermediate_size", 0)
    require(config, "use_qk_norm", True)
    require(config, "qk_norm_type", "per_layer")


def route(block: Any, hidden: Any) -> tuple[Any, Any]:
    """(weights [T, k], ids [T, k]) of hidden [T, H]: the block hands its bias to the router."""
    _, weights, ids = block.gate(hidden, block.e_score_correction_bias)
    return weights, ids


FAMILY = Family(
    model_type="minimax_m2",
    moe_class="MiniMaxM2SparseMoeBlock",
    shape=shape_from("num_local_experts", "intermediate_size"),
    experts=(PER_EXPERT_W1_W3_W2, PER_EXPERT_GATE_UP_DOWN, FUSED_V5),
    route=route,
    renames=((r"\.block_sparse_moe\.", ".mlp."),),
    check=check,
)
