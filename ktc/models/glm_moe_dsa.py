"""GLM-5: DeepSeek-V3's MoE under latent attention with a sparse-attention indexer.

The attention stays Hugging Face's code (the indexer selects positions, which ktc's own MLA operator
does not do), so `mla` is False here although the projections are MLA's.
"""

from __future__ import annotations

from ktc.models.checks import require, require_experts, require_groups, require_silu
from ktc.models.family import Config, ExpertShape, Family


def shape(config: Config) -> ExpertShape:
    return ExpertShape(
        config.n_routed_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size
    )


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.n_routed_experts, config.num_experts_per_tok)
    require_groups(config, config.n_routed_experts, config.num_experts_per_tok)
    require(config, "scoring_func", "sigmoid")
    require(config, "topk_method", "noaux_tc")
    require(config, "moe_layer_freq", 1)


FAMILY = Family(
    model_type="glm_moe_dsa",
    moe_class="GlmMoeDsaMoE",
    shape=shape,
    shared="shared_experts",
    protected=(r"\.self_attn\.kv_b_proj$", r"\.self_attn\.indexer\."),
    check=check,
)
