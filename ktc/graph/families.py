"""What the decode graph of each family looks like: one skeleton, and the values that differ.

Every supported family is the same decoder: norm, attention, norm, MoE or dense MLP, with residuals.
A family is described by flavours only; biases, sinks and per-head norms are there if their tensors are.
Needs a transformers config object, not transformers itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ktc.errors import UnsupportedModelError

Config = Any
# Values of the native enumerations (runtime/src/ops/ops.h).
ROPE_HALF, ROPE_INTERLEAVED_HALF, ROPE_INTERLEAVED = 0, 1, 2
SOFTMAX, SIGMOID, TOPK_SOFTMAX = 0, 1, 2
NO_GROUPS, GROUP_MAX, GROUP_TOP2_SUM = 0, 1, 2


@dataclass(frozen=True)
class RouterSpec:
    """Flavour of the router; the maths is runtime/src/ops/router.inc."""

    score: int
    group_score: int = NO_GROUPS
    n_group: int = 1
    topk_group: int = 1
    renormalise: bool = False
    renormalise_eps: float = 0.0
    scale: float = 1.0
    choice_bias: str = ""  # tensor relative to the MoE block that is added for the choice only


@dataclass(frozen=True)
class Skeleton:
    """Flavours of one model.

    Attributes:
        attention: "gqa" or "mla"; `rope`: a ROPE_ value; `scale`: of the scores.
        window: layer index -> keys that a token sees, 0 = all.
        clip: limit on q, k and v before rope, 0 = none.
        attention_stays: why the attention has no native operator and stays Hugging Face's code, "" = it has one;
            `attention` then says what its cache holds, and `rope` and `scale` mean nothing.
        moe: attribute of the decoder layer that holds the MoE block (or dense MLP); `router`: its router.
        embed_scale, residual_scale, logit_divisor: granite's multipliers.
    """

    attention: Literal["gqa", "mla"]
    router: RouterSpec
    scale: float
    rope: int = ROPE_HALF
    window: Callable[[int], int] = lambda layer: 0
    clip: float = 0.0
    attention_stays: str = ""
    moe: str = "mlp"
    router_name: str = "gate"
    shared: str | None = None
    shared_gate: str | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0


def head_dim(config: Config) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _inverse_sqrt_head(config: Config) -> float:
    return float(head_dim(config) ** -0.5)


def _mla_scale(config: Config) -> float:
    """(nope + rope)^-0.5, times mscale^2 under YaRN (failure A1)."""
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim", 0):
        factor = rope["factor"]
        mscale = 1.0 if factor <= 1 else 0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0
        scale *= mscale * mscale
    return scale


def _grouped_sigmoid(config: Config) -> RouterSpec:
    return RouterSpec(
        SIGMOID, GROUP_TOP2_SUM, int(config.n_group), int(config.topk_group), bool(config.norm_topk_prob), 1e-20,
        float(config.routed_scaling_factor), "gate.e_score_correction_bias",
    )  # fmt: skip


def _deepseek_v3(config: Config) -> Skeleton:
    rope = ROPE_INTERLEAVED_HALF if config.rope_interleave else ROPE_HALF
    return Skeleton("mla", _grouped_sigmoid(config), _mla_scale(config), rope, shared="shared_experts")


def _deepseek_v2(config: Config) -> Skeleton:
    limited = config.topk_method == "group_limited_greedy"
    router = RouterSpec(
        SOFTMAX, GROUP_MAX if limited else NO_GROUPS, int(config.n_group) if limited else 1,
        int(config.topk_group) if limited else 1, scale=float(config.routed_scaling_factor),
    )  # fmt: skip
    return Skeleton("mla", router, _mla_scale(config), ROPE_INTERLEAVED, shared="shared_experts")


def _glm4_moe(config: Config) -> Skeleton:
    return Skeleton("gqa", _grouped_sigmoid(config), _inverse_sqrt_head(config), shared="shared_experts")


def _layer_window(config: Config) -> Callable[[int], int]:
    kinds = getattr(config, "layer_types", None)
    window = int(config.sliding_window or 0)
    return lambda layer: window if kinds is not None and kinds[layer] == "sliding_attention" else 0


def _qwen2_moe(config: Config) -> Skeleton:
    return Skeleton(
        "gqa", RouterSpec(SOFTMAX, renormalise=bool(config.norm_topk_prob)), _inverse_sqrt_head(config),
        window=_layer_window(config), shared="shared_expert", shared_gate="shared_expert_gate",
    )  # fmt: skip


def _qwen3_moe(config: Config) -> Skeleton:
    window = int(config.sliding_window or 0)
    return Skeleton(
        "gqa", RouterSpec(SOFTMAX, renormalise=bool(config.norm_topk_prob)), _inverse_sqrt_head(config),
        window=lambda layer: window,
    )  # fmt: skip


def _olmoe(config: Config) -> Skeleton:
    return Skeleton(
        "gqa", RouterSpec(SOFTMAX, renormalise=bool(config.norm_topk_prob)), _inverse_sqrt_head(config),
        clip=float(config.clip_qkv or 0.0),
    )  # fmt: skip


def _mixtral(config: Config) -> Skeleton:
    window = int(config.sliding_window or 0)
    return Skeleton(
        "gqa", RouterSpec(SOFTMAX, renormalise=True), _inverse_sqrt_head(config), window=lambda layer: window
    )


def _gpt_oss(config: Config) -> Skeleton:
    return Skeleton(
        "gqa", RouterSpec(TOPK_SOFTMAX), _inverse_sqrt_head(config), window=_layer_window(config), router_name="router"
    )


def _minimax_m2(config: Config) -> Skeleton:
    router = RouterSpec(SIGMOID, renormalise=True, choice_bias="e_score_correction_bias")
    return Skeleton("gqa", router, _inverse_sqrt_head(config))


def _granitemoe(config: Config) -> Skeleton:
    return Skeleton(
        "gqa", RouterSpec(TOPK_SOFTMAX), float(config.attention_multiplier), moe="block_sparse_moe",
        router_name="router", embed_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier), logit_divisor=float(config.logits_scaling),
    )  # fmt: skip


def _glm_moe_dsa(config: Config) -> Skeleton:
    stays = "sparse attention (its indexer chooses the keys of each token) has no native operator"
    return Skeleton("mla", _grouped_sigmoid(config), _mla_scale(config), shared="shared_experts", attention_stays=stays)


SKELETONS: dict[str, Callable[[Config], Skeleton]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v2": _deepseek_v2,
    "glm4_moe": _glm4_moe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "granitemoe": _granitemoe,
    "glm_moe_dsa": _glm_moe_dsa,
}


def skeleton_for(config: Config) -> Skeleton:
    """
    Raises:
        UnsupportedModelError: the family has no decode graph.
    """
    make = SKELETONS.get(config.model_type)
    if make is None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has no native decode graph",
            f"`ktc run --graph off` runs Hugging Face's modules; native: {', '.join(sorted(SKELETONS))}",
        )
    return make(config)
