"""What a module of the Hugging Face tree is, in the words that recipes match on (`match: {role: linear}`).

Works on names and class names only, so it needs neither torch nor transformers itself.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from ktc.models.family import Family

Role = Literal[
    "moe",  # the block that ktc.FusedMoE replaces
    "experts",  # the container of routed experts inside it
    "router",
    "shared_expert",
    "dense_mlp",
    "mla",  # latent attention that ktc.MLAAttention may replace
    "attention",
    "linear",  # a dense nn.Linear that may be packed
    "protected_linear",  # an nn.Linear that a rule must leave alone
    "lm_head",
    "norm",
    "embedding",
    "rotary",
    "activation",
    "decoder_layer",
    "other",
]
ROLES: tuple[str, ...] = get_args(Role)


def _is_torch(module: Any, name: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith("torch.nn") for c in type(module).__mro__)


def is_protected(family: Family, name: str, module: Any) -> bool:
    """Whether the Linear `name` must keep its weights as they are (see Family.protected)."""
    return getattr(module, "out_features", 0) == 1 or any(re.search(p, name) for p in family.protected)


def role_of(family: Family, name: str, module: Any) -> Role:
    """The role of `module` at path `name`; "other" for containers and anything a family does not name."""
    kind, last = type(module).__name__, name.rpartition(".")[2]
    if kind == family.moe_class:
        return "moe"
    if hasattr(module, "_apply_gate") and hasattr(module, "has_gate"):
        return "experts"
    if last == family.router:
        return "router"
    if _is_torch(module, "Linear"):
        if last == "lm_head":
            return "lm_head"
        return "protected_linear" if is_protected(family, name, module) else "linear"
    if last == family.shared:
        return "shared_expert"
    if kind.endswith("Attention"):
        return "mla" if family.mla else "attention"
    if kind.endswith("RotaryEmbedding"):
        return "rotary"
    if kind.endswith("Norm"):
        return "norm"
    if _is_torch(module, "Embedding"):
        return "embedding"
    if kind.endswith("MLP"):
        return "dense_mlp"
    if kind.endswith("DecoderLayer"):
        return "decoder_layer"
    if last == "act_fn":
        return "activation"
    return "other"
