"""Config checks that families share: each refuses a value that would silently change the model's meaning.

Not a validator of whole configs: transformers does that. These look only at values that Hugging
Face's class ignores, or that ktc's operators do not implement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktc.errors import UnsupportedModelError

_MISSING = object()


def require(config: Any, key: str, *allowed: Any) -> None:
    """Refuse `config` if it has `key` and its value is not one of `allowed`; an absent key is fine."""
    value = getattr(config, key, _MISSING)
    if value is _MISSING or value in allowed:
        return
    names = " or ".join(repr(a) for a in allowed)
    raise UnsupportedModelError(
        f"{config.model_type}: config.json says {key} = {value!r}; ktc supports {names}",
        hint=f"this checkpoint needs code that ktc does not have for {key} = {value!r}; see docs/adding-a-model.md",
    )


def require_silu(config: Any) -> None:
    """The experts' kernels implement silu(gate) * up (and the clamped forms that a family declares)."""
    require(config, "hidden_act", "silu", "swish")


def require_experts(config: Any, experts: int | None, top_k: int | None) -> None:
    """Refuse a config of a MoE family that has no experts, or routes to more experts than there are."""
    if not experts or experts < 1:
        raise UnsupportedModelError(
            f"{config.model_type}: config.json says there are {experts} routed experts; ktc needs at least one",
            hint="ktc compiles mixture-of-experts models; run a dense model with a general-purpose engine",
        )
    if not top_k or not 1 <= top_k <= experts:
        raise UnsupportedModelError(
            f"{config.model_type}: config.json routes each token to {top_k} of {experts} experts", hint="1 <= k <= E"
        )


def silu_experts(experts: str) -> Callable[[Any], None]:
    """The whole check of a family whose experts are gated by SiLU and that has nothing else to look at.

    Args:
        experts: the config's key for the number of routed experts of a layer.
    """

    def check(config: Any) -> None:
        require_silu(config)
        require_experts(config, getattr(config, experts), config.num_experts_per_tok)

    return check


def require_groups(config: Any, experts: int, top_k: int) -> None:
    """Group-limited routing: E divides into n_group groups, and the kept groups hold at least top_k experts."""
    groups, kept = getattr(config, "n_group", 1), getattr(config, "topk_group", 1)
    if type(groups) is not int or type(kept) is not int or not 1 <= kept <= groups:
        fits = False
    else:
        fits = not experts % groups and top_k <= kept * (experts // groups)
    if not fits:
        raise UnsupportedModelError(
            f"{config.model_type}: {experts} experts in n_group = {groups} groups of which topk_group = {kept} are kept"
            f" cannot give {top_k} experts per token",
            hint="check n_group, topk_group, num_experts_per_tok and the number of experts in config.json",
        )
