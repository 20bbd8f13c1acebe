"""Plan + weights -> a Hugging Face model with ktc's modules in it and nothing left on the meta device.

Two steps: `replace_modules` swaps modules on the meta model by their plan (parents before children;
a replacement keeps the names of the children it takes over, so every planned name stays valid), and `fill`
gives everything its weights. What this file is not: opening or judging a bundle (loader.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktc.engine.embedding import KtcEmbedding
from ktc.engine.kernels import Kernels
from ktc.engine.linear import KtcLinear
from ktc.engine.mla import KtcMLAAttention
from ktc.engine.moe import KtcFusedMoE
from ktc.engine.packed import expert_pointers, native_linear, native_moe
from ktc.engine.weights import WeightStore
from ktc.errors import BundleError, KtcError
from ktc.models.family import Family
from ktc.plan.ir import ModulePlan, MoePlan, Plan

_META = torch.device("meta")


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def replace_modules(model: nn.Module, plan: Plan, family: Family) -> None:
    """Swap the modules of a meta model as the plan says."""
    for planned in plan.modules:
        if planned.device != "cpu":
            raise BundleError(
                f"{planned.name} is planned for {planned.device}; this build of ktc runs models on the cpu only",
                "compile with device: cpu in the recipe",
            )
        original = model.get_submodule(planned.name)
        if planned.moe is not None:
            set_module(model, planned.name, KtcFusedMoE(original, family, planned.moe))
        elif planned.linear is not None:
            set_module(model, planned.name, KtcLinear(planned.linear))
        elif planned.operator == "mla":
            set_module(model, planned.name, KtcMLAAttention(original))
        elif planned.operator == "embedding":
            old: Any = original
            set_module(model, planned.name, KtcEmbedding(old.weight.detach(), old.padding_idx))


def fill(model: nn.Module, plan: Plan, store: WeightStore, kernels: Kernels) -> None:
    """Give every module its weights.

    Raises:
        BundleError: a tensor is missing, or something would stay without a value.
    """
    _fill_packed_linears(model, plan, store, kernels)
    for planned in plan.modules:
        _fill_own(model.get_submodule(planned.name), planned, store)
    for planned in plan.moe_modules():
        assert planned.moe is not None
        _fill_experts(model.get_submodule(planned.name), planned.name, planned.moe, store, kernels)
    _tie(model, plan)
    _rebuild_buffers(model)
    for module in model.modules():
        if isinstance(module, KtcMLAAttention):
            module.absorb()
    model.requires_grad_(False)
    _check_complete(model)


def _fill_packed_linears(model: nn.Module, plan: Plan, store: WeightStore, kernels: Kernels) -> None:

    linears = [m for m in plan.modules if m.linear is not None]
    wanted = []
    for planned in linears:
        for part in _parts(planned):
            name = f"{planned.name}.{part}"
            wanted.append((name, store.ref(name)))
    address = store.read(wanted)
    for planned in linears:
        p = planned.linear
        assert p is not None
        at = {part: address[f"{planned.name}.{part}"] for part in _parts(planned)}
        native = native_linear(kernels.lib, kernels.pool, p, at, **kernels.options())
        module = model.get_submodule(planned.name)
        assert isinstance(module, KtcLinear)
        module.attach(native)


def _parts(planned: ModulePlan) -> list[str]:
    """Tensors of a packed linear, relative to its name."""
    p = planned.linear
    assert p is not None
    layout = p.layout
    present = {"tiles": True, "scale": layout.scale_count, "mult": layout.mult_bytes, "bias": p.bias}
    return [part for part, there in present.items() if there]


def _fill_own(module: nn.Module, planned: ModulePlan, store: WeightStore) -> None:
    """Parameters and persistent buffers that the plan keeps as they are."""
    for key, (shape, _) in planned.params.items():
        name = f"{planned.name}.{key}" if planned.name else key
        ref = store.ref(name)
        if ref.shape != shape:
            raise BundleError(f"{ref.file}: {name} is {list(ref.shape)}, the plan says {list(shape)}")
        if isinstance(module, KtcEmbedding):
            value = store.view(store.read([(name, ref)])[name], ref)
        else:
            value = store.tensor(name)
        set_tensor(module, key, value)


def set_tensor(module: nn.Module, key: str, value: Tensor) -> None:
    """Set a parameter or buffer, whichever `key` is."""
    if key in module._parameters:
        module._parameters[key] = nn.Parameter(value, requires_grad=False)
    elif key in module._buffers:
        module._buffers[key] = value
    else:
        raise BundleError(
            f"{type(module).__name__} has no parameter {key}", "this bundle is for another release of ktc"
        )


def _fill_experts(module: nn.Module, name: str, moe: MoePlan, store: WeightStore, kernels: Kernels) -> None:
    assert isinstance(module, KtcFusedMoE)
    module.attach(make_moe(moe, layer_addresses(store, name, moe), kernels))


def make_moe(moe: MoePlan, weights: list[list[dict[str, int]]], kernels: Kernels) -> Any:
    """The `_runtime.Moe` of one layer; `weights` from `layer_addresses`, and it points where they do."""
    return native_moe(kernels.lib, kernels.pool, moe, weights, **kernels.options(moe.backend, str(moe.scheme)))


def layer_addresses(store: WeightStore, name: str, moe: MoePlan) -> list[list[dict[str, int]]]:
    """Read one layer's experts into the store; per node and expert the addresses that `_runtime.Moe` takes."""
    return [expert_addresses(store, name, moe, node) for node in range(len(moe.splits))]


def expert_addresses(store: WeightStore, name: str, moe: MoePlan, node: int) -> list[dict[str, int]]:
    """Read one layer's experts of one node; per expert the addresses that `_runtime.Moe` takes (0 = none)."""
    prefix = f"{name}.experts."
    wanted = [
        (key[len(prefix) :], ref)
        for (at, key), ref in store.bundle.tensors.items()
        if at == node and key.startswith(prefix)
    ]
    address = store.read(wanted, node)
    parts = [(key, ref, address[key]) for key, ref in wanted]
    return expert_pointers(parts, moe.experts, f"{store.bundle.path}: {name} on node {node}")


def _tie(model: nn.Module, plan: Plan) -> None:
    """Give tied parameters their value; a packed linear has its own packed copy."""
    for tied, stored in plan.tied.items():
        module_name, _, key = tied.rpartition(".")
        module = model.get_submodule(module_name)
        if isinstance(module, KtcLinear):
            continue
        source_name, _, source_key = stored.rpartition(".")
        value: Any = getattr(model.get_submodule(source_name), source_key)
        if value.dtype == torch.float32 and isinstance(value, nn.Parameter):
            module._parameters[key] = value
        else:  # the embedding keeps its table in 16 bits; a linear on torch needs fp32
            set_tensor(module, key, value.to(torch.float32))


def _rebuild_buffers(model: nn.Module) -> None:
    """Non-persistent buffers (rope's inverse frequencies) are in no file: build their modules again from the config."""
    for name, module in list(model.named_modules()):
        missing = [
            key
            for key, buffer in module.named_buffers(recurse=False)
            if buffer.device == _META and key in module._non_persistent_buffers_set
        ]
        if not missing:
            continue
        kind: Any = type(module)
        try:
            fresh = kind(config=module.config)
        except (TypeError, AttributeError) as error:
            raise KtcError(f"cannot rebuild buffers {missing} of {name} ({kind.__name__}): {error}") from error
        for key in missing:
            module._buffers[key] = fresh._buffers[key]


def _check_complete(model: nn.Module) -> None:
    empty = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.device == _META]
    empty += [n for n, m in model.named_modules() if isinstance(m, KtcLinear | KtcFusedMoE) and m.native is None]
    if empty:
        raise BundleError(f"the bundle has no weights for {', '.join(empty[:5])} ({len(empty)} in all)")
