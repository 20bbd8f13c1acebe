"""Count which experts a model chooses on a text: `ktc profile`.

Every window is read as a prompt. A bundle with a decode graph is counted inside the native executor; any other (a
GPU's, or one that runs on Hugging Face's modules) by looking at what each router returns. Not here: tables and
plots (expert_use_report.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ktc.errors import UsageError
from ktc.plan.expert_use import ExpertUse, ModelShape, layer_number
from ktc.plan.ir import Plan
from ktc.progress import Progress


def expert_use(model: Any, windows: Sequence[list[int]], text: str) -> ExpertUse:
    """Counts over all windows.

    Args:
        model: a `NativeModel`, or a model from `ktc.load`.
        windows: token ids; every token of a window is counted.
        text: what the text is, for the file.
    Raises:
        UsageError: the model has no MoE layer that ktc runs, or a window does not fit its context.
    """
    plan = model.ktc_plan
    shape = _shape(plan)
    native = hasattr(model, "graph")
    with Progress("profile", sum(map(len, windows)), "tokens") as progress:
        counted = _native(model, windows, progress) if native else _eager(model, windows, progress)
    layers = {layer_number(module): tuple(counts) for module, counts in counted.items()}
    return ExpertUse(shape, text, sum(map(len, windows)), layers)


def _shape(plan: Plan) -> ModelShape:
    shapes = {ModelShape.of(plan.model_type, plan.layers, m.moe) for m in plan.moe_modules() if m.moe is not None}
    if not shapes:
        raise UsageError("no MoE layer of this bundle is run by ktc, so there is nothing to count")
    if len(shapes) > 1:
        raise UsageError("the MoE layers of this model have different shapes; a profile has one")
    return shapes.pop()


def _native(model: Any, windows: Sequence[list[int]], progress: Progress) -> dict[str, list[int]]:
    from ktc import _runtime

    experts = {m.name: m.moe.experts for m in model.ktc_plan.moe_modules()}
    nodes = [(i, n) for i, n in enumerate(model.graph.program.nodes) if n.op == "moe_submit" and n.module in experts]
    blocks = [(i, n.inputs[2], int(n.params["top_k"]), experts[n.module]) for i, n in nodes]
    counter = _runtime.RoutingCounter(model.graph.native, blocks)
    for window in windows:
        model.reset()
        model.prefill(window)
        progress.update(len(window))
    counts = counter.counts()
    return {n.module: list(c) for (_, n), c in zip(nodes, counts, strict=True)}


def _eager(model: Any, windows: Sequence[list[int]], progress: Progress) -> dict[str, list[int]]:
    import torch

    counts = {m.name: torch.zeros(m.moe.experts, dtype=torch.int64) for m in model.ktc_plan.moe_modules()}
    with _watched(model, counts), torch.inference_mode():
        for window in windows:
            model(torch.tensor([window], device=model.device), use_cache=False)
            progress.update(len(window))
    return {name: count.tolist() for name, count in counts.items()}


@contextmanager
def _watched(model: Any, counts: dict[str, Any]) -> Iterator[None]:
    """Every block's `route` also adds to its counts."""
    import torch

    blocks = {name: model.get_submodule(name) for name in counts}

    def watch(block: Any, count: Any) -> Any:
        route = block.route

        def counting(x: Any) -> Any:
            weights, ids = route(x)
            count.add_(torch.bincount(ids.reshape(-1).cpu(), minlength=len(count)))
            return weights, ids

        return counting

    for name, block in blocks.items():
        block.route = watch(block, counts[name])
    try:
        yield
    finally:
        for block in blocks.values():
            del block.route
