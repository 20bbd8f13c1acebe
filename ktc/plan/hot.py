"""Which experts of a MoE block its device computes too: a recipe's hot_experts and hot_profile, resolved."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from ktc.errors import KtcError, RecipeError
from ktc.paths import expand
from ktc.plan.expert_use import ExpertUse, ModelShape, layer_number, read_expert_use
from ktc.plan.ir import ModulePlan, MoePlan
from ktc.recipe.model import Recipe, Rule

ALL_UP_TO = 3
"""Hot experts per top_k up to which a device computes them all; above, a gather takes the token's own, and has to read,
write and read again what it computes with."""


def choose_hot(moe: MoePlan, module: ModulePlan, rule: Rule, recipe: Recipe, model: ModelShape) -> MoePlan:
    """`moe` with its hot experts.

    Raises:
        RecipeError: no device to put them on, more than there are, or a profile that cannot be read, is of another
            model or has no counts of this layer.
    """
    if not rule.hot_experts:
        return moe
    where = f"{recipe.where(rule)}: {module.name}"
    if module.device == "cpu":
        raise RecipeError(
            f"{where}: hot_experts: the block is on the cpu, where all its experts are anyway",
            "give the rule (or one above it, see int4-cuda.yaml) device: cuda:0, or remove hot_experts",
        )
    if rule.hot_experts > moe.experts:
        raise RecipeError(
            f"{where}: hot_experts: {rule.hot_experts} of {moe.experts} experts", f"use at most {moe.experts}"
        )
    path = Path(recipe.file).parent / expand(rule.hot_profile)
    try:
        stat = path.stat()
        use = _read(path, (stat.st_size, stat.st_mtime_ns))
    except OSError as error:
        raise RecipeError(
            f"{where}: hot_profile: {path}: cannot be read: {error.strerror}",
            "ktc profile BUNDLE --text FILE -o PROFILE makes one; a relative path starts at the recipe's folder",
        ) from error
    except KtcError as error:
        raise RecipeError(f"{where}: hot_profile: {error.message}", error.hint) from error
    if use.model != model:
        theirs, ours = asdict(use.model), asdict(model)
        differ = ", ".join(f"{key} {theirs[key]} instead of {ours[key]}" for key in ours if theirs[key] != ours[key])
        raise RecipeError(
            f"{where}: hot_profile: {path} is of another model: {differ}", "make one of this model with ktc profile"
        )
    layer = layer_number(module.name)
    if layer not in use.layers:
        raise RecipeError(
            f"{where}: hot_profile: {path} has no counts of layer {layer}",
            "make it with a bundle in which this layer is a ktc.FusedMoE",
        )
    hot = use.hottest(layer, rule.hot_experts)
    return replace(moe, hot=hot, hot_share=round(use.share(layer, hot), 6))


@lru_cache(maxsize=4)
def _read(path: Path, version: tuple[int, int]) -> ExpertUse:
    """Once for all layers, as long as the file stays what it is."""
    return read_expert_use(path)
