"""What a native model runs on: printed by `ktc run -v`. Same role as ktc/engine/report.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ktc.engine.placement import NodePlacement
from ktc.graph.ir import Program
from ktc.native.weights import row_tables
from ktc.plan.names import group_name
from ktc.progress import format_bytes, format_seconds

if TYPE_CHECKING:
    from ktc.native.weights import BundleWeights
    from ktc.plan.ir import ModulePlan, Plan


@dataclass
class NativeReport:
    """What was loaded and what is worse than it could be; same role as the eager engine's LoadReport."""

    bundle: str
    variant: str
    isa: str
    attention: str
    threads: list[int]
    weight_bytes: int = 0
    weights: BundleWeights | None = None
    arena_bytes: int = 0
    cache_bytes: int = 0
    context: int = 0
    n_deferred: int | None = None
    n_skipped: int = 0
    seconds: float = 0.0
    placement: list[NodePlacement] = field(default_factory=list)
    degraded: list[str] = field(default_factory=list)
    plan: Plan | None = None
    lib: Any = None
    program: Program | None = None
    tuning: str = ""

    @property
    def huge_bytes(self) -> int:
        """Bytes of the weights that the kernel really keeps in huge pages; asked now, which takes a while."""
        return self.weights.huge_bytes() if self.weights is not None else 0

    @property
    def layers(self) -> list[tuple[str, str]]:
        return describe_native(self.plan, self.lib, self.program) if self.plan is not None else []

    def lines(self) -> list[str]:
        share = self.huge_bytes / self.weight_bytes if self.weight_bytes else 0.0
        out = [
            f"native graph: {format_bytes(self.weight_bytes)} of weights in {format_seconds(self.seconds)},"
            f" {share:.0%} in huge pages; kernels {self.variant}, operators {self.isa},"
            f" prefill attention {self.attention}, {sum(self.threads)} thread{'s' * (sum(self.threads) != 1)}",
            f"  caches {format_bytes(self.cache_bytes)} for {self.context} positions,"
            f" scratch {format_bytes(self.arena_bytes)}",
        ]
        if self.tuning:
            out.append(f"  kernel choice: {self.tuning}")
        out += [f"  {p.line()}" for p in self.placement]
        if self.n_deferred:
            out.append(f"  {self.n_deferred} experts of each MoE layer are deferred while decoding")
        if self.n_skipped:
            out.append(f"  the {self.n_skipped} lowest experts of each MoE layer are skipped while decoding")
        if self.program is not None and self.program.callbacks():
            out.append("  torch is loaded: these modules are called in every step, which is slower")
            out += [f"    {note}" for note in self.program.notes]
        layers = self.layers
        width = max((len(where) for where, _ in layers), default=0)
        out += [f"  {where:<{width}}  {what}" for where, what in layers]
        return out + [f"  degraded: {reason}" for reason in self.degraded]


def describe_native(plan: Plan, lib: Any, program: Program | None = None) -> list[tuple[str, str]]:
    """(where, what it runs on); what the eager engine leaves to Hugging Face runs on the graph's operators here, but
    for the modules that the program calls and those below them."""
    return [(group_name([m.name for m in group]), what) for what, group in native_groups(plan, lib, program)]


def native_groups(plan: Plan, lib: Any, program: Program | None) -> list[tuple[str, list[ModulePlan]]]:
    """(what it runs on, modules), as `ktc.engine.report.by_words`, for a model on the graph."""
    from ktc.engine.report import by_words

    called = program.callbacks() if program is not None else []
    in_file = row_tables(program) if program is not None else set()

    def is_called(name: str) -> bool:
        return any(name == module or name.startswith(f"{module}.") for module in called)

    out = []
    for what, group in by_words(replace(plan, modules=tuple(m for m in plan.modules if not is_called(m.name))), lib):
        what = what.replace("latent attention, torch fp32", "latent attention, native fp32")
        what = re.sub(r"^Hugging Face (\w+), fp32", r"native graph (\1), weights as stored", what)
        if all(f"{m.name}.weight" in in_file for m in group):
            what = what.replace(" as stored", " as stored, rows read from its file when used", 1)
        out.append((what, group))
    return out + by_words(replace(plan, modules=tuple(m for m in plan.modules if is_called(m.name))), lib)
