"""The list of families, and the way from a raw config.json to a `Family` and a model on the meta device.

Importing this module is cheap; transformers and torch are imported by `hf_config` and `meta_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktc.errors import UnsupportedModelError
from ktc.models import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    granitemoe,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from ktc.models.family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        deepseek_v3,
        deepseek_v2,
        qwen2_moe,
        qwen3_moe,
        mixtral,
        olmoe,
        glm4_moe,
        gpt_oss,
        minimax_m2,
        granitemoe,
        glm_moe_dsa,
    )
}
ALIASES: dict[str, str] = {alias: f.model_type for f in FAMILIES.values() for alias in f.aliases}

# No model is near these. Beyond them the module tree alone would take all memory before anything else is looked at.
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 31

# Any of these in a config means that the model routes tokens to experts.
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "moe_intermediate_size")


def supported() -> list[str]:
    """Every `model_type` that ktc compiles, aliases included, sorted."""
    return sorted([*FAMILIES, *ALIASES])


def _unsupported(model_type: object, config: Mapping[str, Any]) -> UnsupportedModelError:
    inner = config.get("text_config")
    known = {**(inner if isinstance(inner, Mapping) else {}), **config}
    hint = f"supported model types: {', '.join(supported())}"
    if not model_type or not isinstance(model_type, str):
        return UnsupportedModelError("config.json has no model_type", hint=hint)
    if any(known.get(key) for key in _EXPERT_KEYS):
        return UnsupportedModelError(
            f"model type {model_type!r} is a mixture of experts that ktc does not know",
            hint=f"{hint}; docs/adding-a-model.md says how to add one",
        )
    return UnsupportedModelError(
        f"model type {model_type!r} is a dense model: its config names no routed experts, and ktc compiles"
        " mixture-of-experts models only",
        hint=hint,
    )


def rewrite_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a raw config.json in which aliases carry the model_type that transformers knows.

    A wrapper whose `text_config` is a supported model (kimi_k25) is replaced by that text model.
    Unknown model types are left alone; `family_for` refuses them.
    """
    out = dict(config)
    inner = out.get("text_config")
    if isinstance(inner, Mapping) and out.get("model_type") in ALIASES:
        out = {**{k: v for k, v in out.items() if k in ("quantization_config",)}, **inner}
    model_type = out.get("model_type")
    if isinstance(model_type, str) and model_type in ALIASES:
        out["model_type"] = ALIASES[model_type]
    return out


def family_for(config: Any) -> Family:
    """The family of a raw config (dict) or of a transformers config object.

    Raises:
        UnsupportedModelError: a dense model, an unknown MoE, or (config objects only, whose defaults
            are filled in) a value that matters and is not supported.
    """
    raw = config if isinstance(config, Mapping) else config.to_dict()
    model_type = raw.get("model_type")
    if isinstance(model_type, str):
        model_type = ALIASES.get(model_type, model_type)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise _unsupported(model_type, raw)
    if not isinstance(config, Mapping) and family.check is not None:
        family.check(config)
    return family


def hf_config(config: Mapping[str, Any]) -> Any:
    """Raw config.json -> checked `PretrainedConfig`. No remote code: `auto_map` is dropped.

    The quantisation section is dropped too: ktc's own reader decodes the weights.
    """
    raw = rewrite_config(config)
    family = family_for(raw)
    for key in ("auto_map", "quantization_config", "compression_config"):
        raw.pop(key, None)
    for key, most in (("num_hidden_layers", MAX_LAYERS), ("max_position_embeddings", MAX_POSITIONS)):
        value = raw.get(key, 1)
        if type(value) is int and not 1 <= value <= most:
            raise UnsupportedModelError(
                f"config.json says {key} = {value}; ktc takes 1 to {most}",
                hint="compare it with the config.json of the released model",
            )
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        built = CONFIG_MAPPING[family.model_type].from_dict(raw)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(
            f"config.json is not a valid {family.model_type} config: {' '.join(str(error).split())}",
            hint="compare it with the config.json of the released model",
        ) from error
    if family.check is not None:
        family.check(built)
    return built


def meta_model(config: Any) -> Any:
    """`PreTrainedModel` of a config object on the meta device: the module tree without a byte of weights.

    Raises:
        UnsupportedModelError: no MoE block came out, or experts sit outside the block that ktc replaces
            (a MoE config must never be built as something else without a word).
    """
    family = family_for(config)
    import torch
    from transformers import AutoModelForCausalLM

    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    blocks = [name for name, module in model.named_modules() if type(module).__name__ == family.moe_class]
    if not blocks:
        raise UnsupportedModelError(
            f"{family.model_type}: this config builds a model without a single {family.moe_class}",
            hint="all layers are dense; check first_k_dense_replace, mlp_only_layers and num_hidden_layers",
        )
    for name, module in model.named_modules():
        if hasattr(module, "_apply_gate") and name.rpartition(".")[0] not in blocks:
            raise UnsupportedModelError(f"{family.model_type}: experts at {name} are not inside a {family.moe_class}")
    return model
