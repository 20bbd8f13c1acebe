"""OLMoE: softmax over all experts before top-k, not renormalised; norms over the full query and key width."""

from __future__ import annotations

from ktc.models.checks import silu_experts
from ktc.models.family import Family, shape_from

FAMILY = Family(
    model_type="olmoe",
    moe_class="OlmoeSparseMoeBlock",
    shape=shape_from("num_experts", "intermediate_size"),
    check=silu_experts("num_experts"),
)
