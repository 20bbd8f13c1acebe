"""Plan + weights -> a Hugging Face model on CUDA devices, its routed experts in the native runtime.

The counterpart of ktc/engine/build.py: the same two steps over the same plan and the same bytes. Packed linears are
turned into what the device's kernel reads once, at load; everything else is moved in the computing type,
except what Hugging Face keeps in fp32 (routers and their biases: failure R2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ktc.cuda.experts import ExpertLane
from ktc.cuda.hot import HotExperts
from ktc.cuda.linear import LaneLinear, PackedParts
from ktc.cuda.mla import LaneMLAAttention
from ktc.engine import build
from ktc.engine.moe import KtcFusedMoE
from ktc.errors import BundleError, KtcError, UsageError
from ktc.models.family import Family
from ktc.plan.ir import ModulePlan, Plan
from ktc.plan.stages import Placement

if TYPE_CHECKING:
    from ktc.engine.kernels import Kernels
    from ktc.engine.weights import WeightStore

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STAGED_ROWS = 512
"""Rows of a prefill step that staging is made for at load; a longer one grows it."""
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def compute_dtype(name: str | None) -> torch.dtype:
    """
    Raises:
        UsageError: not bf16, fp16 or fp32.
    """
    try:
        return DTYPES[name or "bf16"]
    except KeyError:
        raise UsageError(f"the device computes in bf16, fp16 or fp32, not {name}") from None


def replace_modules(model: nn.Module, plan: Plan, family: Family) -> None:
    """Swap the modules of a meta model as the plan says. The embedding stays Hugging Face's."""
    for planned in plan.modules:
        original = model.get_submodule(planned.name)
        if planned.moe is not None:
            build.set_module(model, planned.name, KtcFusedMoE(original, family, planned.moe))
        elif planned.linear is not None:
            build.set_module(model, planned.name, LaneLinear(planned.linear))
        elif planned.operator == "mla":
            build.set_module(model, planned.name, LaneMLAAttention(original))


@dataclass(frozen=True)
class Places:
    """The `torch.device` of every module."""

    placement: Placement
    devices: Mapping[str, torch.device]

    def of(self, name: str) -> torch.device:
        return self.devices[self.placement.of(name)]


def fill(
    model: nn.Module, plan: Plan, store: WeightStore, kernels: Kernels, places: Places, dtype: torch.dtype
) -> ExpertLane:
    """Give every module its weights.

    Returns:
        The lane that the MoE modules are attached to; whoever keeps the model keeps it too.
    Raises:
        BundleError: a tensor is missing, or something would stay without a value.
    """
    for planned in plan.modules:
        module, device = model.get_submodule(planned.name), places.of(planned.name)
        if planned.linear is not None:
            assert isinstance(module, LaneLinear)
            module.load(_packed(planned, store), device, dtype)
        for key, (shape, planned_type) in planned.params.items():
            name = f"{planned.name}.{key}" if planned.name else key
            ref = store.ref(name)
            if ref.shape != shape:
                raise BundleError(f"{ref.file}: {name} is {list(ref.shape)}, the plan says {list(shape)}")
            value = store.tensor(name)
            if value.is_floating_point():
                value = value.to(_kept_type(model, name, planned_type, dtype))
            build.set_tensor(module, key, value.to(device))
    _tie(model, plan, places)
    build._rebuild_buffers(model)
    for path, module in model.named_modules():
        device = places.of(path)
        if isinstance(module, LaneMLAAttention):
            module.absorb()
            module.place(device, dtype)
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.device != device and buffer.device.type != "meta":
                module._buffers[key] = buffer.to(device)
    lane = _attach_experts(model, plan, store, kernels, places, dtype)
    model.requires_grad_(False)
    build._check_complete(model)
    return lane


def _attach_experts(
    model: nn.Module, plan: Plan, store: WeightStore, kernels: Kernels, places: Places, dtype: torch.dtype
) -> ExpertLane:
    modules = plan.moe_modules()
    shapes = {(m.moe.hidden, m.moe.top_k) for m in modules if m.moe is not None}
    if len(shapes) != 1:
        raise KtcError(f"the CUDA lane needs MoE layers of one shape, this plan has {sorted(shapes)}")
    moes, hot = [], []
    for planned in modules:
        moe = planned.moe
        assert moe is not None
        addresses = build.layer_addresses(store, planned.name, moe)
        moes.append(build.make_moe(moe, addresses, kernels))
        hot.append(HotExperts(moe, addresses, places.of(planned.name), dtype) if moe.hot else None)
    hidden, top_k = shapes.pop()
    where = [places.placement.of(planned.name) for planned in modules]
    lane = ExpertLane(moes, hidden, top_k, places.devices, where, STAGED_ROWS, hot)
    for planned, operator in zip(modules, lane.operators(), strict=True):
        module = model.get_submodule(planned.name)
        assert isinstance(module, KtcFusedMoE)
        module.attach(operator)
    return lane


def _packed(planned: ModulePlan, store: WeightStore) -> PackedParts:
    assert planned.linear is not None
    arrays = {part: np.array(store.ref(f"{planned.name}.{part}").array()) for part in build._parts(planned)}
    return PackedParts(planned.linear, arrays)


def _kept_type(model: Any, name: str, planned: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a floating-point parameter: the computing type, or fp32 where Hugging Face keeps that."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    loose = getattr(model, "_keep_in_fp32_modules", None) or ()
    patterns = [*strict, *(loose if dtype == torch.float16 else ())]
    if any(re.search(rf"(^|\.){re.escape(p)}($|\.)", name) for p in patterns):
        return torch.float32
    model_type = model.config.dtype
    if planned == "fp32" and isinstance(model_type, torch.dtype) and _NAMES.get(model_type) != "fp32":
        return torch.float32  # declared as fp32 in the model's own code
    return dtype


def _tie(model: nn.Module, plan: Plan, places: Places) -> None:
    """Tied parameters are one tensor, or a copy of it on another device."""
    for tied, stored in plan.tied.items():
        module_name, _, key = tied.rpartition(".")
        module = model.get_submodule(module_name)
        if isinstance(module, LaneLinear):
            continue
        source_name, _, source_key = stored.rpartition(".")
        value, device = getattr(model.get_submodule(source_name), source_key), places.of(module_name)
        module._parameters[key] = value if value.device == device else nn.Parameter(value.detach().to(device))


def device_bytes(plan: Plan, dtype: torch.dtype, placement: Placement) -> dict[str, int]:
    """A lower bound of what the model takes on each device, caches and workspaces left out."""
    size = torch.empty(0, dtype=dtype).element_size()
    out = dict.fromkeys(placement.devices, 0)
    for module in plan.modules:
        total = 0
        if module.linear is not None:
            linear = module.linear
            total += module.nbytes if linear.data_type == "int4" and size == 2 else size * linear.n * linear.k
        else:
            total += sum(size * int(np.prod(shape)) for shape, _ in module.params.values())
        if module.moe is not None:
            total += size * module.moe.hot_elements
        out[placement.of(module.name)] += total
    return out


def describe(model: nn.Module, plan: Plan, lib: Any, dtype: torch.dtype) -> list[tuple[str, str]]:
    """(where, what it runs on) as the CPU engine's report, for the device."""
    from ktc.engine import report

    name = _NAMES[dtype]
    lines = []
    for where, what in report.describe(plan, lib):
        what = what.replace("torch fp32", f"torch {name}, scores fp32").replace("W_UV, fp32", f"W_UV, {name}")
        what = re.sub(r"^(Hugging Face \w+), fp32", rf"\1, {name}", what)
        what = what.replace("table as stored", f"Hugging Face Embedding, {name}")
        lines.append((where, what))
    kernels = {n: m.kernel for n, m in model.named_modules() if isinstance(m, LaneLinear)}
    counts = {kernel: list(kernels.values()).count(kernel) for kernel in sorted(set(kernels.values()))}
    for kernel, count in counts.items():
        text = "PyTorch's int4 matmul (tinygemm)" if kernel == "int4" else f"dequantised to {kernel}, plain matmul"
        lines.append((f"({count} packed linears)", text))
    if hot := {len(m.moe.hot) for m in plan.moe_modules() if m.moe and m.moe.hot}:
        share = sum(m.moe.hot_share for m in plan.moe_modules() if m.moe) / len(plan.moe_modules())
        text = f"{max(hot)} of each layer on the device too, dequantised to {name}, {share:.0%} of the uses profiled"
        lines.append(("(hot experts)", text))
    return [(where, re.sub(r"^linear (\S+) on \S+", r"linear \1 on the device", what)) for where, what in lines]
