"""Qwen1.5-MoE and Qwen2-MoE: softmax router, one shared expert behind a sigmoid gate with a single output."""

from __future__ import annotations

from ktc.models.checks import silu_experts
from ktc.models.family import Family, shape_from

FAMILY = Family(
    model_type="qwen2_moe",
    moe_class="Qwen2MoeSparseMoeBlock",
    shape=shape_from("num_experts", "moe_intermediate_size"),
    shared="shared_expert",
    shared_gate="shared_expert_gate",
    protected=(r"\.mlp\.shared_expert_gate$",),
    check=silu_experts("num_experts"),
)
