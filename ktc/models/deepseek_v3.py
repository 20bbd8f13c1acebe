"""DeepSeek-V3 and R1; also Kimi-K2 (the same classes under another model_type) and Moonlight (no q_lora)."""

from __future__ import annotations

from ktc.models.checks import require, require_experts, require_groups, require_silu
from ktc.models.family import Config, Family, shape_from


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.n_routed_experts, config.num_experts_per_tok)
    require_groups(config, config.n_routed_experts, config.num_experts_per_tok)
    # Hugging Face's router hard-codes these two, and its layers alternate by first_k_dense_replace only.
    require(config, "scoring_func", "sigmoid")
    require(config, "topk_method", "noaux_tc")
    require(config, "moe_layer_freq", 1)


FAMILY = Family(
    model_type="deepseek_v3",
    aliases=("kimi_k2", "kimi_k25"),
    moe_class="DeepseekV3MoE",
    shape=shape_from("n_routed_experts", "moe_intermediate_size"),
    shared="shared_experts",
    mla=True,
    protected=(r"\.self_attn\.kv_b_proj$",),
    # kimi_k25 is a vision wrapper around this text model; ktc compiles the text model.
    ignorable=(r"^vision_tower\.", r"^mm_projector\.", r"^model\.vision_tower\.", r"^model\.mm_projector\."),
    check=check,
    notes="kv_b_proj is read as a matrix by the absorbed attention; the router and its bias stay fp32.",
)
