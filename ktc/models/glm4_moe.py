"""GLM-4.5, 4.5-Air, 4.6 and 4.7: DeepSeek-V3's router and shared expert over grouped-query attention."""

from __future__ import annotations

from ktc.models.checks import require, require_experts, require_groups, require_silu
from ktc.models.family import Config, Family, shape_from


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.n_routed_experts, config.num_experts_per_tok)
    require_groups(config, config.n_routed_experts, config.num_experts_per_tok)
    require(config, "scoring_func", "sigmoid")
    require(config, "topk_method", "noaux_tc")


FAMILY = Family(
    model_type="glm4_moe",
    moe_class="Glm4MoeMoE",
    shape=shape_from("n_routed_experts", "moe_intermediate_size"),
    shared="shared_experts",
    check=check,
)
