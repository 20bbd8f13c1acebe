"""What a program may read: parameters by module-tree name, packed linears, packed experts.

Built from a plan (compile time, bundle) or from a Hugging Face model in memory (tests, oracles).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ktc.plan.ir import LinearPlan, MoePlan, Plan


@dataclass(frozen=True)
class Inventory:
    """
    Attributes:
        tensors: stored parameter -> shape.
        linears: module -> LinearPlan, for linears on packed tiles.
        moes: module -> MoePlan, for MoE blocks with packed experts.
        tied: parameter that is not stored -> the stored one that it equals.
        callbacks: module that the recipe leaves to Hugging Face's code in the graph too -> why.
    """

    tensors: dict[str, tuple[int, ...]]
    linears: dict[str, LinearPlan]
    moes: dict[str, MoePlan]
    tied: dict[str, str]
    callbacks: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_plan(cls, plan: Plan) -> Inventory:
        tensors: dict[str, tuple[int, ...]] = {}
        linears, moes, callbacks = {}, {}, {}
        for m in plan.modules:
            prefix = f"{m.name}." if m.name else ""
            tensors.update({prefix + key: shape for key, (shape, _) in m.params.items()})
            if m.linear is not None:
                linears[m.name] = m.linear
            if m.moe is not None:
                moes[m.name] = m.moe
            if m.callback:
                callbacks[m.name] = f"{plan.rules[m.rule].where} says so" if m.rule is not None else "the plan says so"
        return cls(tensors, linears, moes, dict(plan.tied), callbacks)

    @classmethod
    def from_model(cls, model: Any) -> Inventory:
        """From a Hugging Face model: nothing is packed."""
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
        return cls(shapes, {}, {}, tied)

    def find(self, name: str) -> str | None:
        """The stored tensor behind a parameter, or None."""
        name = self.tied.get(name, name)
        return name if name in self.tensors else None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[self.tied.get(name, name)]

    def names(self) -> set[str]:
        """Every tensor that exists in a bundle made by this plan, packed ones included (biases where they may be)."""
        out = set(self.tensors)
        for module, linear in self.linears.items():
            out.add(f"{module}.tiles")
            out |= {f"{module}.scale"} if linear.layout.scale_count else set()
            out |= {f"{module}.mult"} if linear.layout.mult_bytes else set()
            out |= {f"{module}.bias"} if linear.bias else set()
        return out
