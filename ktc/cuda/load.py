"""The CUDA half of `ktc.load`: from an opened bundle to a model on its devices. The rest is ktc/engine/loader.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ktc.cuda import build
from ktc.cuda.build import Places
from ktc.cuda.device import check_memory as check_device_memory
from ktc.cuda.experts import ExpertLane
from ktc.cuda.pipeline import Pipeline
from ktc.engine.opening import no_kernel
from ktc.engine.weights import WeightStore
from ktc.engine.weights import check_memory as refuse_too_large
from ktc.models.registry import family_for, hf_config, meta_model
from ktc.plan.stages import Placement
from ktc.progress import Progress

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle
    from ktc.engine.kernels import Kernels


def build_on_device(
    bundle: Bundle,
    kernels: Kernels,
    placement: Placement,
    devices: Mapping[str, torch.device],
    dtype: str | None,
    bind: bool,
    check_memory: bool,
) -> tuple[Any, WeightStore, list[tuple[str, str]]]:
    """
    Args:
        placement, devices: from `ktc.cuda.device.lane_devices`.
    Returns:
        The model (its `ktc_lane`, `ktc_pipeline` and `ktc_dtype` are what a `CudaSession` needs), the store that its
        experts point into, and the lines of the report.
    """
    from ktc.engine.loader import set_generation_config

    compute = build.compute_dtype(dtype)
    config = hf_config(json.loads(bundle.read("model/config.json")))
    family = family_for(config)
    model = meta_model(config)
    build.replace_modules(model, bundle.plan, family)
    weights = [ref for ref in bundle.tensors.values() if ref.file.name != "goldens.safetensors"]
    experts = sum(ref.nbytes for (node, _), ref in bundle.tensors.items() if node is not None)
    if check_memory:
        refuse_too_large(experts)
        for name, nbytes in build.device_bytes(bundle.plan, compute, placement).items():
            check_device_memory(devices[name], nbytes)
    with Progress("load weights", sum(ref.nbytes for ref in weights), "B") as progress:
        store = WeightStore(bundle, kernels.pool, progress, bind)
        try:
            lane = build.fill(model, bundle.plan, store, kernels, Places(placement, devices), compute)
        except (RuntimeError, ValueError) as error:
            raise no_kernel(bundle, kernels.lib, kernels.force, error) from error
    model.config.dtype = compute
    model.ktc_lane, model.ktc_dtype = lane, compute
    model.ktc_pipeline = Pipeline(model, placement, devices)
    set_generation_config(model, bundle)
    _check_after(model, lane)
    return model.eval(), store, build.describe(model, bundle.plan, kernels.lib, compute)


def _check_after(model: Any, lane: ExpertLane) -> None:
    """A forward that nobody captures (Hugging Face's generate) ends with a worker's exception, if there was one."""

    on_cuda = any(side.device.type == "cuda" for side in lane.sides.values())

    def check(module: Any, arguments: Any, out: Any) -> None:
        if lane.decode or (on_cuda and torch.cuda.is_current_stream_capturing()):
            return  # a session's step: it checks when the step is over
        lane.synchronize()

    model.register_forward_hook(check)
