"""Granite 3.x MoE: top-k then softmax, experts fused on disk as input_linear / output_linear, tied embeddings."""

from __future__ import annotations

from ktc.models.checks import require_experts, require_silu
from ktc.models.family import FUSED_V5, Config, ExpertNames, Family, shape_from

EXPERTS = ExpertNames("fused", gate_up="input_linear.weight", down="output_linear.weight")


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.num_local_experts, config.num_experts_per_tok)


FAMILY = Family(
    model_type="granitemoe",
    moe_class="GraniteMoeMoE",
    shape=shape_from("num_local_experts", "intermediate_size"),
    experts=(EXPERTS, FUSED_V5),
    router="router",
    renames=((r"\.router\.layer\.weight$", ".router.weight"),),
    check=check,
)
