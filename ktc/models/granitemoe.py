"""Granite 3.x MoE: top-k then softmax, experts fused on disk as input_linear / output_linear, tied embeddings."""

from __future__ import annotations

from ktc.models.checks import silu_experts
from ktc.models.family import FUSED_V5, ExpertNames, Family, shape_from

EXPERTS = ExpertNames("fused", gate_up="input_linear.weight", down="output_linear.weight")


FAMILY = Family(
    model_type="granitemoe",
    moe_class="GraniteMoeMoE",
    shape=shape_from("num_local_experts", "intermediate_size"),
    experts=(EXPERTS, FUSED_V5),
    router="router",
    renames=((r"\.router\.layer\.weight$", ".router.weight"),),
    check=silu_experts("num_local_experts"),
)
