"""Rotary frequencies as constants of a program: what Hugging Face computes from the config, frozen at compile time.

Frequencies that depend on the position ("longrope") are refused: a program has one table.
Attention then stays Hugging Face's code (lower.py).
"""

from __future__ import annotations

from typing import Any

from ktc.errors import UnsupportedModelError

# "dynamic" changes them beyond max_position_embeddings, where no program goes.
STATIC_TYPES = ("default", "linear", "yarn", "llama3", "proportional", "dynamic")


def rotary_constants(config: Any) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies [rotary_dim / 2] (fp32 values) and the factor on cos and sin.

    Raises:
        UnsupportedModelError: frequencies that depend on the position.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in STATIC_TYPES:
        raise UnsupportedModelError(
            f"rope type {kind!r} changes its frequencies with the position; the decode graph has one table"
        )
    if kind == "default":
        inv_freq, scaling = _model_rotary(config)
    else:
        tensor, scaling = ROPE_INIT_FUNCTIONS[kind](config)
        inv_freq = tuple(float(v) for v in tensor.float().tolist())
    return inv_freq, float(scaling)


def _model_rotary(config: Any) -> tuple[tuple[float, ...], float]:
    """The default type is a method of the family's own rotary class (partial rotary differs between them)."""
    import importlib

    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    classes: list[Any] = [v for k, v in vars(module).items() if k.endswith("RotaryEmbedding") and isinstance(v, type)]
    if len(classes) != 1:
        raise UnsupportedModelError(f"model type {config.model_type!r}: cannot tell which rotary embedding it uses")
    tensor, scaling = classes[0].compute_default_rope_parameters(config)
    return tuple(float(v) for v in tensor.float().tolist()), float(scaling)
