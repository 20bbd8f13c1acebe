"""What a loaded model runs on: every layer, its kernels, its memory, and what is worse than it could be.

Printed by `ktc run -v`; `strict` loading fails on `LoadReport.degraded` (failure M6: something silently
not engaged). Not here: judging a bundle before it is loaded (ktc.bundle.verdict).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ktc.engine.placement import NodePlacement
from ktc.plan.ir import ModulePlan, Plan
from ktc.plan.names import group_name, pattern
from ktc.progress import format_bytes, format_seconds


@dataclass
class LoadReport:
    """Attributes:
    variant: kernel library in use; `best`: what this machine could run of what ktc has.
    threads: per node.
    weight_bytes, huge_bytes: memory of packed weights, and how much of it really is in huge pages.
    placement: on a machine with several NUMA nodes, how much of each node's experts is in its own memory.
    tuning: from how many tokens per expert AMX kernels are preferred, and where that comes from (`ktc tune`).
    degraded: each reason why this run is slower than the machine allows, or not what the recipe says.
    """

    bundle: str
    variant: str
    force_kernel: str
    threads: list[int]
    weight_bytes: int = 0
    huge_bytes: int = 0
    seconds: float = 0.0
    tuning: str = ""
    placement: list[NodePlacement] = field(default_factory=list)
    degraded: list[str] = field(default_factory=list)
    layers: list[tuple[str, str]] = field(default_factory=list)

    def summary(self) -> str:
        """One line."""
        nodes = f" on {len(self.threads)} nodes" if len(self.threads) > 1 else ""
        return (
            f"{format_bytes(self.weight_bytes)} of weights in {format_seconds(self.seconds)},"
            f" {self.huge_bytes / self.weight_bytes:.0%} in huge pages;"
            f" kernels {self.variant}{f' ({self.force_kernel} forced)' if self.force_kernel else ''},"
            f" {sum(self.threads)} thread{'s' * (sum(self.threads) != 1)}{nodes}"
            if self.weight_bytes
            else "no packed weights: everything runs on Hugging Face's own code"
        )

    def lines(self) -> list[str]:
        """The summary, then one line per kind of module with where it occurs, then what is degraded."""
        width = max((len(where) for where, _ in self.layers), default=0)
        out = [self.summary(), *(f"  {p.line()}" for p in self.placement)]
        out += [f"  {where:<{width}}  {what}" for where, what in self.layers]
        if self.tuning and not self.force_kernel:
            out.append(f"  kernel choice: {self.tuning}")
        return out + [f"  degraded: {reason}" for reason in self.degraded]


def describe(plan: Plan, lib: Any) -> list[tuple[str, str]]:
    """(where, what it runs on) for every planned module; equal modules of different layers share a line."""
    return [(group_name([m.name for m in group]), what) for what, group in by_words(plan, lib)]


def by_words(plan: Plan, lib: Any) -> list[tuple[str, list[ModulePlan]]]:
    """(what it runs on, modules) of the modules that differ in their layer number only.

    Args:
        lib: the kernel library that the model runs on, or None where none is known yet.
    """
    groups: dict[tuple[str, str], list[ModulePlan]] = defaultdict(list)
    latent = {m.name for m in plan.modules if m.operator == "mla"}
    for planned in plan.modules:
        groups[pattern(planned.name), _what(planned, latent, lib)].append(planned)
    return [(what, group) for (_, what), group in groups.items()]


def kernels_in_use(model: Any) -> dict[str, int]:
    """Kernel name -> calls so far, over all of a model's native operators."""
    calls: dict[str, int] = defaultdict(int)
    for native in _native_operators(model):
        for name, count in native.report().get("kernels", {}).items():
            calls[name] += int(count)
    return dict(calls)


def _native_operators(model: Any) -> list[Any]:
    if hasattr(model, "native_operators"):  # a model of ktc.native
        return list(model.native_operators())
    from ktc.engine.linear import KtcLinear
    from ktc.engine.moe import KtcFusedMoE

    found = (m.native for m in model.modules() if isinstance(m, KtcLinear | KtcFusedMoE))
    return [native for native in found if native is not None]


def _what(planned: ModulePlan, latent: set[str], lib: Any) -> str:
    note = f" [{planned.note}]" if planned.note else ""
    if planned.moe is not None:
        m = planned.moe
        shape = f"{m.experts} experts, top {m.top_k}, {m.hidden} -> {m.intermediate}"
        return f"routed experts {m.scheme} on {_kernels(lib, m.scheme, m.activation)} ({shape}){note}"
    if planned.linear is not None:
        p = planned.linear
        return f"linear {p.scheme} on {_kernels(lib, p.scheme, 'store')} [{p.n}, {p.k}]{note}"
    if planned.operator == "mla":
        return f"absorbed latent attention, torch fp32{note}"
    parent, _, last = planned.name.rpartition(".")
    if last == "kv_b_proj" and parent in latent:
        return f"split into W_UK and W_UV, fp32{note}"
    if planned.operator == "embedding":
        return f"table as stored{note}"
    return f"Hugging Face {planned.hf_class.rpartition('.')[2]}, fp32{note}"


def _kernels(lib: Any, scheme: Any, epilogue: str) -> str:
    """Labels of the kernels that may serve this scheme ("amx, avx512": chosen per expert by its tokens)."""
    if lib is None:
        return "kernels still to be built"
    wanted = f"{scheme}:{epilogue}:"
    names = [str(k["name"]) for k in lib.kernels()]
    labels = {name.partition(":")[0] for name in names if name.partition(":")[2].startswith(wanted)}
    return "/".join(sorted(labels)) or lib.variant
