"""Native operators over packed weights: what a plan's entry and addresses become. Imports no torch.

Whoever makes an operator keeps the memory that the addresses point into for as long as the operator lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktc.plan.ir import LinearPlan, MoePlan


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
