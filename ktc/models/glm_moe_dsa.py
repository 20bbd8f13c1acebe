"""GLM-5: DeepSeek-V3's MoE under latent attention with a sparse-attention indexer.

The attention stays Hugging Face's code (the indexer selects positions, which ktc's own MLA operator
does not do), so `mla` is False here although the projections are MLA's.
"""

from __future__ import annotations

from ktc.models import deepseek_v3
from ktc.models.family import Family, shape_from

FAMILY = Family(
    model_type="glm_moe_dsa",
    moe_class="GlmMoeDsaMoE",
    shape=shape_from("n_routed_experts", "moe_intermediate_size"),
    shared="shared_experts",
    protected=(r"\.self_attn\.kv_b_proj$", r"\.self_attn\.indexer\."),
    check=deepseek_v3.check,
)
