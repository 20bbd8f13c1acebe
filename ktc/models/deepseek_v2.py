"""DeepSeek-V2, V2.5, V2-Lite and Coder-V2: softmax router with or without groups; V2-Lite has no q_lora."""

from __future__ import annotations

from ktc.models.checks import require, require_experts, require_groups, require_silu
from ktc.models.family import Config, Family, shape_from


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.n_routed_experts, config.num_experts_per_tok)
    require(config, "topk_method", "greedy", "group_limited_greedy")
    if config.topk_method == "group_limited_greedy":
        require_groups(config, config.n_routed_experts, config.num_experts_per_tok)
    require(config, "scoring_func", "softmax")
    require(config, "moe_layer_freq", 1)
    # Hugging Face's router ignores norm_topk_prob; the original code would normalise instead of scaling.
    require(config, "norm_topk_prob", False, None)


FAMILY = Family(
    model_type="deepseek_v2",
    moe_class="DeepseekV2Moe",
    shape=shape_from("n_routed_experts", "moe_intermediate_size"),
    shared="shared_experts",
    mla=True,
    rope_interleaved_out=True,
    protected=(r"\.self_attn\.kv_b_proj$",),
    check=check,
)
