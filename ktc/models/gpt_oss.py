"""gpt-oss 20b and 120b: biased experts stored [E, in, out] with gate and up columns alternating, clamped SwiGLU."""

from __future__ import annotations

from ktc.models.checks import require_experts, require_silu
from ktc.models.family import Config, ExpertNames, ExpertShape, Family

# MXFP4 files hold the same tensors as `<name>_blocks` and `<name>_scales`; the reader presents them under these names.
EXPERTS = ExpertNames(
    "fused",
    gate_up="experts.gate_up_proj",
    down="experts.down_proj",
    gate_up_bias="experts.gate_up_proj_bias",
    down_bias="experts.down_proj_bias",
    transposed=True,
    interleaved=True,
)


def shape(config: Config) -> ExpertShape:
    return ExpertShape(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.hidden_size,
        config.intermediate_size,
        activation="swiglu_oai",
        alpha=float(config.swiglu_alpha),
        limit=float(config.swiglu_limit),
        bias=True,
    )


def check(config: Config) -> None:
    require_silu(config)
    require_experts(config, config.num_local_experts, config.num_experts_per_tok)


FAMILY = Family(
    model_type="gpt_oss",
    moe_class="GptOssMLP",
    shape=shape,
    experts=(EXPERTS,),
    router="router",
    returns_scores=True,
    check=check,
)
