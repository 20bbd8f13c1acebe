"""`ktc.load`: a bundle becomes a Hugging Face `PreTrainedModel` that runs on ktc's kernels.

In this order: the bundle is opened and judged (nothing of it is loaded before that), the model is built
on the meta device and its modules are replaced by the plan, weights are read once into huge pages, and
what is left is checked and reported. Not here: generating text (generate.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.engine import pool as pools
from ktc.engine.opening import no_kernel, open_judged, open_kernels
from ktc.engine.placement import misplaced
from ktc.errors import KtcError, UsageError
from ktc.progress import Progress

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle
    from ktc.engine.kernels import Kernels
    from ktc.engine.weights import WeightStore
    from ktc.plan.ir import Plan
    from ktc.plan.stages import Placement


def load(
    bundle: str | Path,
    *,
    threads: int | None = None,
    variant: str | None = None,
    force_kernel: str = "",
    emulate_nodes: bool = False,
    strict: bool = False,
    trust_sha256: Sequence[str] = (),
    kernel_library: str | Path | None = None,
    check_memory: bool = True,
    dtype: str | None = None,
) -> Any:
    """Load a bundle.

    Args:
        bundle: its directory.
        threads: of the native pool; None = the CPUs that this process may use.
        variant: kernel variant (a name of `ktc.codegen.variants.VARIANTS`); None = the best one here.
        force_kernel: part of a kernel's name to use whatever the token count, e.g. "avx512".
        emulate_nodes: run a bundle that is split over more NUMA nodes than this machine has.
        strict: fail rather than run on anything worse than the best this machine can do (failure M6).
        trust_sha256: kernel libraries in the bundle that the user vouches for.
        kernel_library: a library of the user's own, used instead of the bundle's or a local build.
        check_memory: refuse up front what does not fit in memory.
        dtype: what a CUDA device computes in: "bf16" (default), "fp16" or "fp32"; the CPU computes in fp32.
    Returns:
        A `PreTrainedModel` in eval mode, computing in fp32 (on a CUDA device, in `dtype`); its `ktc_report`
        is a `LoadReport`.
    Raises:
        BundleError: damaged, untrusted, not for this machine; BuildError: no kernel library can be had;
        KtcError: not enough memory, no such device, or `strict` and degraded.
    """
    opened, degraded = open_judged(bundle, emulate_nodes, trust_sha256, own_kernels=kernel_library is not None)
    placed = _cuda_devices(opened, dtype)
    from ktc import _runtime
    from ktc.engine.kernels import Kernels
    from ktc.engine.report import LoadReport, describe
    from ktc.perf.tuning import load as load_tuning

    placement = pools.place(_runtime.numa_nodes(), opened.plan.nodes, threads, emulate_nodes)
    degraded += pools.crowded(_runtime.numa_nodes(), threads)
    lib, slower = open_kernels(opened, variant, trust_sha256, kernel_library)
    pool = pools.get_pool(placement)
    started = time.perf_counter()
    tuning = load_tuning()
    kernels = Kernels(lib, pool, force_kernel, tuning.min_rows)
    if placed is None:
        model, store = _build(opened, kernels, bind=not emulate_nodes, check_memory=check_memory)
        layers = describe(opened.plan, lib)
    else:
        from ktc.cuda.load import build_on_device

        model, store, layers = build_on_device(opened, kernels, *placed, dtype, not emulate_nodes, check_memory)

    report = LoadReport(str(opened.path), lib.variant, force_kernel, [len(n) for n in placement])
    report.weight_bytes, report.huge_bytes = store.nbytes, store.huge_bytes()
    report.layers = layers
    report.tuning = str(tuning)
    report.seconds = time.perf_counter() - started
    report.placement = store.placement()
    degraded = degraded + slower + kernels.notes + pool.warnings() + misplaced(report.placement)
    if not opened.plan.uses_cuda() and _defers(opened.plan):
        degraded.append("the recipe defers experts, which only the decode graph does: here all are immediate")
    report.degraded = degraded
    if strict and degraded:
        raise KtcError("strict: " + "; ".join(degraded), "leave out --strict to run all the same")
    model.ktc_report = report
    model.ktc_store = store  # native operators point into its buffers
    model.ktc_plan = opened.plan
    return model


def _cuda_devices(bundle: Bundle, dtype: str | None) -> tuple[Placement, dict[str, Any]] | None:
    """Placement and CUDA devices of the plan, checked before anything is built or read; None for a plan on the CPU."""
    from ktc.cuda import device

    placed = device.lane_devices(bundle.plan)
    if placed is None and dtype not in (None, "fp32"):
        raise UsageError(f"the CPU computes in fp32, not in {dtype}", "leave out dtype")
    return placed


def _build(bundle: Bundle, kernels: Kernels, bind: bool, check_memory: bool) -> tuple[Any, WeightStore]:
    import torch

    from ktc.engine import build
    from ktc.engine.lane import Lane, single_threaded
    from ktc.engine.mla import KtcMLAAttention
    from ktc.engine.weights import WeightStore
    from ktc.engine.weights import check_memory as refuse_too_large
    from ktc.models.registry import family_for, hf_config, meta_model

    config = hf_config(bundle.read_object("model/config.json"))
    family = family_for(config)
    model = meta_model(config)
    build.replace_modules(model, bundle.plan, family)
    weights = [ref for ref in bundle.tensors.values() if ref.file.name != "goldens.safetensors"]
    total = sum(ref.nbytes for ref in weights)
    if check_memory:
        widened = sum(m.nbytes for m in bundle.plan.modules if m.operator not in ("embedding", "linear"))
        refuse_too_large(total + widened)  # what torch computes with is widened from 16 bits to fp32
    with Progress("load weights", total, "B") as progress:
        store = WeightStore(bundle, kernels.pool, progress, bind)
        try:
            build.fill(model, bundle.plan, store, kernels)
        except (RuntimeError, ValueError) as error:  # the library lacks a kernel that is needed, or forced
            raise no_kernel(bundle, kernels.lib, kernels.force, error) from error
    model.config.dtype = torch.float32
    single_threaded(model)
    lane = Lane(kernels.pool.threads)
    for module in model.modules():
        if isinstance(module, KtcMLAAttention):
            module.lane = lane
    set_generation_config(model, bundle)
    refuse_saving(model)
    return model.eval(), store


def refuse_saving(model: Any) -> None:
    """What is left as parameters is no checkpoint: saving it would write a model without its experts."""

    def save_pretrained(*_: Any, **__: Any) -> None:
        raise KtcError(
            "a model loaded from a bundle cannot be saved as a checkpoint: its experts are packed in the bundle",
            "copy the bundle's directory instead",
        )

    model.save_pretrained = model.push_to_hub = save_pretrained


def set_generation_config(model: Any, bundle: Bundle) -> None:
    """The bundle's own generation defaults, where it has any."""
    if "model/generation_config.json" in bundle.files:
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_dict(bundle.read_object("model/generation_config.json"))


def _defers(plan: Plan) -> bool:
    counts = [m.moe.n_deferred_experts for m in plan.moe_modules() if m.moe is not None]
    return any(isinstance(n, int) and n > 0 for n in counts)
