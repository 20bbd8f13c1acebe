"""OLMoE: softmax over all experts before top-k, not renormalised; norms over the full query and key width."""

from __future__ import annotations

from ktc.models.checks import require_experts, require_silu
from ktc.models.family import Config, Family, shape_from


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.num_experts, config.num_experts_per_tok)


FAMILY = Family(
    model_type="olmoe",
    moe_class="OlmoeSparseMoeBlock",
    shape=shape_from("num_experts", "intermediate_size"),
    check=check,
)
