"""Native operators over packed weights: what a plan's entry and addresses become. Imports no torch.

Whoever makes an operator keeps the memory that the addresses point into for as long as the operator lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ktc.errors import BundleError
from ktc.plan.ir import LinearPlan, MoePlan

if TYPE_CHECKING:
    from ktc.bundle.reader import TensorRef

_FIELDS = [f"{matrix}{part}" for matrix in ("gate_up", "down") for part in ("", "_scale", "_mult", "_bias")]


def native_linear(lib: Any, pool: Any, plan: LinearPlan, at: Mapping[str, int], **choice: Any) -> Any:
    """`_runtime.Linear`.

    Args:
        at: addresses of "tiles" and, where the scheme has them, "scale", "mult", "bias".
        choice: of kernels: `force`, `min_rows`.
    Raises:
        RuntimeError, ValueError: the library has no kernel for it.
    """
    from ktc import _runtime

    tiles, scale, mult, bias = at["tiles"], at.get("scale", 0), at.get("mult", 0), at.get("bias", 0)
    scheme = (plan.data_type, plan.scale, plan.group)
    return _runtime.Linear(lib, pool, plan.n, plan.k, *scheme, tiles, scale, mult, bias, **choice)


def native_moe(lib: Any, pool: Any, plan: MoePlan, weights: Sequence[Sequence[dict[str, int]]], **choice: Any) -> Any:
    """`_runtime.Moe`.

    Args:
        weights: [node][expert] -> addresses, named as in `_runtime.Moe`; 0 = none.
        choice: `force`, `min_rows`, `scheduling`.
    Raises:
        RuntimeError, ValueError: the library has no kernel for it.
    """
    from ktc import _runtime

    return _runtime.Moe(
        lib,
        pool,
        experts=plan.experts,
        top_k=plan.top_k,
        hidden=plan.hidden,
        intermediate=plan.intermediate,
        activation=plan.activation,
        alpha=plan.alpha,
        limit=plan.limit,
        data_type=plan.data_type,
        scale=plan.scale,
        group=plan.group,
        splits=list(plan.splits),
        weights=weights,
        **choice,
    )


def expert_pointers(parts: Iterable[tuple[str, TensorRef, int]], experts: int, where: str) -> list[dict[str, int]]:
    """Per expert the addresses that `native_moe` takes; spans of experts may be split over files.

    Args:
        parts: of one layer and node: ("0-63.gate_up.tiles", its entry in the bundle, where it lies in memory).
        where: names layer and node in messages.
    Raises:
        BundleError: a tensor that does not hold the experts it names, or an expert without weights.
    """
    out = [dict.fromkeys(_FIELDS, 0) for _ in range(experts)]
    for key, ref, address in parts:
        span, matrix, part = key.split(".")  # "0-63", "gate_up" | "down", "tiles" | "scale" | "mult" | "bias"
        first, last = (int(n) for n in span.split("-"))
        if not 0 <= first <= last < experts or ref.shape[0] != last - first + 1:
            shape = list(ref.shape)
            raise BundleError(f"{where}: {ref.file} does not hold experts {span} of {experts}: shape {shape}")
        stride = ref.nbytes // ref.shape[0]
        for expert in range(first, last + 1):
            out[expert][matrix if part == "tiles" else f"{matrix}_{part}"] = address + (expert - first) * stride
    if missing := [e for e, entry in enumerate(out) if not entry["gate_up"] or not entry["down"]]:
        raise BundleError(f"{where} lacks experts {missing[:8]}")
    return out
