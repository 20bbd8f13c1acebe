"""Invariants of a `Plan`. Anything found here is a fault of whoever made the plan, not of a user's recipe.

Runs after `build_plan` (with the model's parameters) and on a plan.json read from a bundle (without).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ktc.errors import KtcError
from ktc.layout import split_unit
from ktc.plan.ir import ModulePlan, MoePlan, Plan
from ktc.plan.schemes import is_legal

_DEVICE = re.compile(r"^(cpu|cuda:\d{1,3})$")
_BACKENDS = ("auto", "hybrid_AMX_AVX512", "AMX", "AVX512", "AVX2", "portable")
_ACTIVATIONS = ("silu_mul", "silu_clamp", "swiglu_oai")
_ROLES = {"moe": ("moe",), "mla": ("mla",), "embedding": ("embedding",), "linear": ("linear", "lm_head")}


class PlanError(KtcError):
    """A plan breaks an invariant."""

    exit_code = 9


def verify(plan: Plan, parameters: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Check a plan.

    Args:
        parameters: name -> shape of every parameter and persistent buffer of the model, tied ones included.
    Raises:
        PlanError: the first few broken invariants, each naming its module.
    """
    problems = [*_tree(plan)]
    for module in plan.modules:
        problems += [f"{module.name}: {text}" for text in _module(plan, module)]
    if parameters is not None:
        problems += _coverage(plan, parameters)
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise PlanError("the plan is not consistent: " + "; ".join(problems[:5]) + more)


def _tree(plan: Plan) -> Iterator[str]:
    seen: set[str] = set()
    for module in plan.modules:
        if module.name in seen:
            yield f"{module.name} is listed twice"
        seen.add(module.name)
    if plan.nodes < 1:
        yield f"{plan.nodes} nodes"


def _module(plan: Plan, m: ModulePlan) -> Iterator[str]:
    if (m.moe is not None) != (m.operator == "moe") or (m.linear is not None) != (m.operator == "linear"):
        yield f"operator {m.operator} without its own plan"
    if m.operator in _ROLES and m.role not in _ROLES[m.operator]:
        yield f"operator {m.operator} on a module of role {m.role}"
    if not _DEVICE.match(m.device):
        yield f"device {m.device}"
    if m.rule is not None and not 0 <= m.rule < len(plan.rules):
        yield f"rule {m.rule} does not exist"
    if m.kv_cache not in ("", "host") or (m.kv_cache and m.role not in ("attention", "mla")):
        yield f"kv_cache {m.kv_cache} on a module of role {m.role}"
    if m.nbytes < 0:
        yield f"{m.nbytes} bytes"
    if m.linear is not None:
        if not is_legal(m.linear.scheme):
            yield f"data type {m.linear.scheme} does not exist"
        if m.linear.n < 1 or m.linear.k < 1:
            yield f"a linear of shape [{m.linear.n}, {m.linear.k}]"
        elif m.nbytes != m.linear.layout.nbytes + (4 * m.linear.layout.n_pad if m.linear.bias else 0):
            yield f"{m.nbytes} bytes do not match its layout"
    if m.moe is not None:
        if m.moe.hot and m.device == "cpu":
            yield "hot experts without a device"
        yield from _moe(plan, m.moe)


def _moe(plan: Plan, moe: MoePlan) -> Iterator[str]:
    if not is_legal(moe.scheme):
        yield f"data type {moe.scheme} does not exist"
    if min(moe.hidden, moe.intermediate, moe.experts) < 1 or not 1 <= moe.top_k <= moe.experts:
        yield f"{moe.experts} experts of [{moe.hidden}, {moe.intermediate}], top {moe.top_k}"
        return
    if list(moe.hot) != sorted({e for e in moe.hot if 0 <= e < moe.experts}):
        yield f"hot experts {list(moe.hot)} are not ascending ids of {moe.experts} experts"
    if not 0.0 <= moe.hot_share <= 1.0:
        yield f"hot experts take {moe.hot_share} of the uses"
    if moe.activation not in _ACTIVATIONS:
        yield f"activation {moe.activation}"
    if moe.backend not in _BACKENDS:
        yield f"backend {moe.backend}"
    if moe.data_type == "fp32" and moe.backend != "portable":
        yield f"fp32 on backend {moe.backend}; it takes portable only"
    n = moe.n_deferred_experts
    if n != "auto" and n != 0 and not 0 < n <= moe.top_k - 2:
        yield f"{n} deferred experts of {moe.top_k}"
    if len(moe.splits) != plan.nodes:
        yield f"{len(moe.splits)} slices for {plan.nodes} nodes"
        return
    unit = split_unit(moe.scheme)
    edges = [0, *(end for _, end in moe.splits)]
    begins = [begin for begin, _ in moe.splits]
    whole = all(e % unit == 0 for e in edges[:-1]) and edges[-1] == moe.i_pad
    if begins != edges[:-1] or not whole or any(end <= begin for begin, end in moe.splits):
        yield f"slices {list(moe.splits)} do not cover 0..{moe.i_pad} in blocks of {unit}"


def _coverage(plan: Plan, parameters: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Every parameter belongs to exactly one module (tied ones to `tied`), with the planned shape."""
    owner: dict[str, str] = {}
    for m in plan.modules:
        for name, shape in _claims(m, parameters).items():
            if name in plan.tied and m.operator == "linear":
                continue
            if name in owner:
                yield f"{name} belongs to both {owner[name]} and {m.name}"
            owner[name] = m.name
            if name not in parameters:
                yield f"{name} of {m.name} is not in the model"
            elif parameters[name] != shape:
                yield f"{name} is {list(parameters[name])} in the model and {list(shape)} in the plan"
    for name in parameters:
        if name in plan.tied:
            if plan.tied[name] not in owner:
                yield f"{name} is tied to {plan.tied[name]}, which no module owns"
        elif name not in owner:
            yield f"{name} is covered by no module"


def _claims(m: ModulePlan, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    prefix = f"{m.name}." if m.name else ""
    out = {prefix + key: tuple(shape) for key, (shape, _) in m.params.items()}
    if m.linear is not None:
        out[f"{prefix}weight"] = (m.linear.n, m.linear.k)
        if m.linear.bias:
            out[f"{prefix}bias"] = (m.linear.n,)
    if m.moe is not None:
        out |= _expert_claims(f"{prefix}experts.", m.moe, parameters)
    return out


def _expert_claims(prefix: str, moe: MoePlan, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The container's tensors. Either orientation is accepted here; the checkpoint reader knows which one it is."""
    e, h, i = moe.experts, moe.hidden, moe.intermediate
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in (("gate_up_proj", (e, 2 * i, h)), ("down_proj", (e, h, i))):
        flipped = (shape[0], shape[2], shape[1])
        out[prefix + name] = flipped if parameters.get(prefix + name) == flipped else shape
    if moe.bias:
        out |= {f"{prefix}gate_up_proj_bias": (e, 2 * i), f"{prefix}down_proj_bias": (e, h)}
    return out
