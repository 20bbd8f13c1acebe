"""Config and recipe -> `Plan`: one walk over the Hugging Face module tree on the meta device.

Reads no weights. `verify` runs on every plan before it is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.errors import KtcError, RecipeError, UnsupportedModelError, UsageError
from ktc.layout import split_intermediate, split_unit
from ktc.models.family import ExpertShape, Family
from ktc.models.roles import role_of
from ktc.plan.caches import in_host_memory
from ktc.plan.deferral import MIN_IMMEDIATE_EXPERTS
from ktc.plan.expert_use import ModelShape
from ktc.plan.hot import choose_hot
from ktc.plan.ir import LinearPlan, ModulePlan, MoePlan, Plan
from ktc.plan.match import RuleMatcher
from ktc.plan.schemes import padding_note, resolve
from ktc.plan.stages import check_pipeline
from ktc.plan.verify import verify
from ktc.recipe.model import Recipe, Rule

if TYPE_CHECKING:
    import torch

    Module = torch.nn.Module

CALLBACK_NOTE = "stays Hugging Face's code in the decode graph too, so torch is loaded at run time"


def build_plan(config: Mapping[str, Any] | Any, recipe: Recipe, nodes: int = 1) -> Plan:
    """Decide what every module of the model becomes.

    Args:
        config: raw config.json as a dict, or a transformers config object.
        recipe: from `ktc.recipe`.
        nodes: NUMA nodes that every expert is split over.
    Raises:
        UnsupportedModelError: not a model that ktc knows.
        RecipeError: the recipe does not fit this model: a rule without a module, a group that does not
            divide, ...
        UsageError: `nodes` over which the experts cannot be split.
    """
    if nodes < 1:
        raise UsageError(f"{nodes} NUMA nodes: at least 1 is needed")
    hf, family, model = _meta(config)
    layers = int(hf.num_hidden_layers)
    builder = _Builder(family, family.shape(hf), layers, recipe, nodes, dict(model.all_tied_weights_keys))
    builder.visit("", model, "cpu", None, None)
    builder.rules.check_rules()
    plan = Plan(
        model_type=family.model_type,
        architecture=type(model).__name__,
        layers=layers,
        nodes=nodes,
        modules=tuple(builder.modules),
        tied=builder.tied,
        recipe=recipe.name,
        rules=tuple(builder.rules.rule_use(rule) for rule in recipe.rules),
    )
    verify(plan, {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()})
    check_pipeline(plan, builder.placed)
    return plan


def _meta(config: Mapping[str, Any] | Any) -> tuple[Any, Family, Any]:
    """The checked config object, its family, and the model on meta."""
    from ktc.models.registry import family_for, hf_config, meta_model

    try:
        hf = hf_config(config) if isinstance(config, Mapping) else config
        return hf, family_for(hf), meta_model(hf)
    except (KtcError, MemoryError):
        raise
    except Exception as error:  # transformers and torch answer a nonsensical config with any exception
        text = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"config.json does not describe a model that can be built: {type(error).__name__}: {text}",
            "compare it with the config.json of the released model",
        ) from error


class _Builder:
    """State of one walk.

    Attributes:
        rules: what matches, and counts.
        placed: module -> the rule that gave it its device, in words.
    """

    def __init__(
        self, family: Family, shape: ExpertShape, layers: int, recipe: Recipe, nodes: int, tied: dict[str, str]
    ) -> None:
        self.family, self.shape, self.recipe, self.nodes, self.tied = family, shape, recipe, nodes, tied
        self.layers = layers
        self.modules: list[ModulePlan] = []
        self.rules = RuleMatcher(family, recipe)
        self.placed: dict[str, str] = {}

    def visit(self, name: str, module: Module, device: str, placed_by: Rule | None, kept_by: Rule | None) -> None:
        """Plan `module` and everything under it.

        Args:
            device: of the parent; a rule's own `device` replaces it for the whole subtree.
            placed_by: the rule that said so.
            kept_by: the `recursive: false` rule above, under which nothing is matched.
        """
        role = role_of(self.family, name, module)
        hf_class = f"{type(module).__module__}.{type(module).__qualname__}"
        rule, note = (kept_by, "") if kept_by is not None else self.rules.match(name, hf_class, role)
        if rule is not None and kept_by is None and rule.device is not None:
            device, placed_by = rule.device, rule
        self.placed[name] = "" if placed_by is None else self.recipe.where(placed_by)
        own = ModulePlan(
            name=name,
            hf_class=hf_class,
            role=role,
            operator="hf",
            device=device,
            rule=None if rule is None else rule.index,
            nbytes=0,
            note=note,
        )
        skipped: set[str] = set()
        if rule is None or kept_by is not None or rule.operator == "hf":
            planned = self._keep(own, module)
            if rule is not None and kept_by is None and rule.callback:
                planned = replace(planned, callback=True, note=CALLBACK_NOTE)
        elif rule.operator == "linear":
            planned = self._linear(own, module, rule)
        elif rule.operator == "moe":
            planned, skipped = self._moe(own, module, rule)
        else:
            planned = self._keep(replace(own, operator=rule.operator), module)
        if rule is not None and kept_by is None and rule.kv_cache:
            planned = in_host_memory(planned)
        if planned.params or planned.operator != "hf" or planned.note:
            self.modules.append(planned)
        for child_name, child in module.named_children():
            if child_name not in skipped:
                stop = rule if kept_by is not None or (rule is not None and not rule.recursive) else None
                self.visit(f"{name}.{child_name}" if name else child_name, child, device, placed_by, stop)

    def _keep(self, own: ModulePlan, module: Module) -> ModulePlan:
        """The module's own weights stay as they are."""
        prefix = f"{own.name}." if own.name else ""
        params: dict[str, tuple[tuple[int, ...], str]] = {}
        nbytes, notes = 0, [own.note] if own.note else []
        for key, tensor in _own_tensors(module):
            if prefix + key in self.tied:
                notes.append(f"tied to {self.tied[prefix + key]}")
                continue
            params[key] = (tuple(tensor.shape), _dtype_name(tensor.dtype))
            nbytes += tensor.numel() * tensor.element_size()
        return replace(own, params=params, nbytes=nbytes, note="; ".join(notes))

    def _linear(self, own: ModulePlan, module: Module, rule: Rule) -> ModulePlan:
        assert rule.scheme is not None
        hf: Any = module
        n, k, bias = hf.out_features, hf.in_features, hf.bias is not None
        if min(n, k) < 1:
            raise UnsupportedModelError(f"config.json gives {own.name} the shape [{n}, {k}]")
        scheme, note = resolve(rule.scheme, [("input size", k)], self.recipe.where(rule), own.name)
        linear = LinearPlan(n, k, bias, scheme.data_type, scheme.scale, scheme.group)
        source = self.tied.get(f"{own.name}.weight")
        layout = linear.layout
        notes = [note, padding_note("input size", k, layout.k_pad), padding_note("output size", n, layout.n_pad)]
        if source is not None:
            notes.append(f"packed copy of {source}, to which it is tied")
        nbytes = layout.nbytes + (4 * layout.n_pad if bias else 0)
        return replace(own, operator="linear", linear=linear, nbytes=nbytes, note="; ".join(filter(None, notes)))

    def _moe(self, own: ModulePlan, module: Module, rule: Rule) -> tuple[ModulePlan, set[str]]:
        """The MoE block, and the names of the children that it swallows (the container of experts)."""
        assert rule.scheme is not None
        shape, where = self.shape, self.recipe.where(rule)
        if min(shape.hidden, shape.intermediate) < 1:
            raise UnsupportedModelError(
                f"config.json gives the experts the shape [{shape.hidden}, {shape.intermediate}]"
            )
        columns = [("hidden size", shape.hidden), ("intermediate size", shape.intermediate)]
        scheme, note = resolve(rule.scheme, columns, where, own.name)
        try:
            splits = split_intermediate(shape.intermediate, self.nodes, split_unit(scheme))
        except ValueError as error:
            smaller = f", or a smaller group than {scheme.group}" if scheme.group > 64 else ""
            raise UsageError(
                f"{where}: {own.name}: {error}", f"choose another node count with --nodes{smaller}"
            ) from error
        moe = MoePlan(
            experts=shape.experts,
            top_k=shape.top_k,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            activation=shape.activation,
            alpha=shape.alpha,
            limit=shape.limit,
            bias=shape.bias,
            data_type=scheme.data_type,
            scale=scheme.scale,
            group=scheme.group,
            backend=rule.backend,
            n_deferred_experts=self._deferred(rule, own.name),
            splits=tuple(splits),
        )
        moe = choose_hot(moe, own, rule, self.recipe, ModelShape.of(self.family.model_type, self.layers, moe))
        containers = {n for n, c in module.named_children() if role_of(self.family, f"{own.name}.{n}", c) == "experts"}
        notes = [note, padding_note("hidden size", shape.hidden, moe.gate_up_layout(0).k_pad)]
        notes.append(padding_note("intermediate size", shape.intermediate, moe.i_pad))
        if moe.hot:
            notes.append(
                f"the {len(moe.hot)} most used experts of each layer ({Path(rule.hot_profile).name}) are on"
                f" {own.device} too, in 16 bits, and decode steps compute them there"
            )
        kept = self._keep(replace(own, operator="moe", moe=moe, note="; ".join(filter(None, notes))), module)
        return kept, containers

    def _deferred(self, rule: Rule, name: str) -> Any:
        n, top_k = rule.n_deferred_experts, self.shape.top_k
        if n == "auto" or n == 0 or top_k - int(n) >= MIN_IMMEDIATE_EXPERTS:
            return n
        most = max(0, top_k - MIN_IMMEDIATE_EXPERTS)
        raise RecipeError(
            f"{self.recipe.where(rule)}: {name}: n_deferred_experts: {n} of {top_k} experts per token would leave"
            f" {max(0, top_k - int(n))} immediate; at least {MIN_IMMEDIATE_EXPERTS} must stay",
            f"use n_deferred_experts: {most} or fewer, or auto",
        )


def _own_tensors(module: Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of the module itself: what a checkpoint holds for it."""
    persistent = [
        (name, buffer)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    return [*module.named_parameters(recurse=False, remove_duplicate=False), *persistent]


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)
