"""Mixtral 8x7B and 8x22B: softmax router that always renormalises; w1 is gate, w3 is up, w2 is down."""

from __future__ import annotations

from ktc.models.checks import silu_experts
from ktc.models.family import FUSED_V5, PER_EXPERT_W1_W3_W2, Family, shape_from

FAMILY = Family(
    model_type="mixtral",
    moe_class="MixtralSparseMoeBlock",
    shape=shape_from("num_local_experts", "intermediate_size"),
    experts=(PER_EXPERT_W1_W3_W2, FUSED_V5),
    renames=((r"\.block_sparse_moe\.", ".mlp."),),
    check=silu_experts("num_local_experts"),
)
