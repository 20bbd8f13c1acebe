"""Which GPU every layer of a plan is on: one of them, or a pipeline of contiguous ranges of layers. Judges only.

A *unit* is a decoder layer, or a module outside of the layers (embedding, final norm, lm_head). A *stage* is a run of
units on one device, in the order in which they execute.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ktc.errors import KtcError, RecipeError
from ktc.plan.ir import ModulePlan, Plan

_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Stage:
    """Units that execute one after the other on `device` ("cuda:N")."""

    device: str
    units: tuple[str, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of its decoder layers; empty for an embedding or a head alone."""
        return tuple(int(found[1]) for unit in self.units if (found := _LAYER.match(unit)))

    @property
    def others(self) -> tuple[str, ...]:
        """Units that are no decoder layers."""
        return tuple(unit for unit in self.units if not _LAYER.match(unit))


@dataclass(frozen=True)
class Placement:
    """The CUDA device of every unit of a plan.

    Attributes:
        units: name -> device, in the order in which they execute.
    """

    units: Mapping[str, str]

    def of(self, name: str) -> str:
        """The device of any module. What belongs to no unit (rotary tables) is where the first unit is."""
        return self.units.get(_unit(name), next(iter(self.units.values())))

    @property
    def devices(self) -> tuple[str, ...]:
        """In the order of their first use."""
        return tuple(dict.fromkeys(self.units.values()))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Several per device only where an embedding or a head is apart from its neighbours."""
        runs = itertools.groupby(self.units.items(), key=lambda item: item[1])
        return tuple(Stage(device, tuple(name for name, _ in run)) for device, run in runs)


def place(plan: Plan, says: Mapping[str, str] | None = None) -> Placement | None:
    """Where a plan's modules are; None for a plan that stays on the CPU.

    Modules that no rule decides, and everything inside a MoE block but its experts, follow the rest of their layer.

    Args:
        says: module name -> "rule N (file:line)" that gave it its device. Without it (a plan that was read from a
            bundle) messages name the rule that decided the module.
    Raises:
        KtcError: a module that a rule puts on the CPU in a model that is on a GPU, a layer on several devices, or a
            device that takes up layers again after another one.
    """
    if not plan.uses_cuda():
        return None
    where = _Where(plan, says)
    _check_cpu(plan, where)
    owners: dict[str, ModulePlan | None] = {}
    for module in plan.modules:
        unit = _unit(module.name)
        if not unit:
            continue
        first = owners.setdefault(unit, None)
        if module.device == "cpu":
            continue
        if first is None:
            owners[unit] = module
        elif first.device != module.device:
            raise KtcError(
                f"{module.name} is on {module.device}{where(module)} and the rest of {unit} on"
                f" {first.device}{where(first)}; a layer is on one GPU",
                "give device: to a rule for whole layers (role: decoder_layer with a name), above the others",
            )
    _check_ranges(owners, where)
    devices = [owner.device for owner in owners.values() if owner is not None]
    last, units = devices[0] if devices else next(m.device for m in plan.modules if m.device != "cpu"), {}
    for unit, owner in owners.items():
        last = units[unit] = owner.device if owner is not None else last
    return Placement(units)


def check_pipeline(plan: Plan, says: Mapping[str, str]) -> None:
    """Of a plan that is being made, with more than one GPU; `says` as for `place`.

    Raises:
        RecipeError: its layers are no pipeline.
    """
    if len(plan.cuda_devices()) < 2:
        return  # a CPU module beside a single GPU is said when the bundle is loaded
    try:
        place(plan, says)
    except KtcError as error:
        raise RecipeError(error.message, error.hint) from error


def _unit(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else name


class _Where:
    """ " (rule 3 (r.yaml:7))" of a module's device, or nothing."""

    def __init__(self, plan: Plan, says: Mapping[str, str] | None) -> None:
        self.plan, self.says = plan, says

    def __call__(self, module: ModulePlan) -> str:
        if self.says is not None:
            text = self.says.get(module.name, "")
        else:
            text = "" if module.rule is None else self.plan.rules[module.rule].where
        return f" ({text})" if text else ""


def _check_cpu(plan: Plan, where: _Where) -> None:
    used = next(m.device for m in plan.modules if m.device != "cpu")
    for module in plan.modules:
        if module.device == "cpu" and _decided(plan, module):
            raise KtcError(
                f"{module.name} is on the cpu{where(module)} and the rest of the model on {used};"
                " only routed experts can stay behind",
                f"give that rule device: {used}, or leave its device out",
            )


def _decided(plan: Plan, module: ModulePlan) -> bool:
    """Whether a rule for this very module says cpu (not for a MoE block around it)."""
    if module.rule is None or module.operator == "moe":
        return False
    return not any(m.rule == module.rule and m.operator == "moe" for m in plan.modules)


def _check_ranges(owners: Mapping[str, ModulePlan | None], where: _Where) -> None:
    left: dict[str, str] = {}  # device -> the unit with which another device took over
    before: ModulePlan | None = None
    for unit, owner in owners.items():
        if owner is None or _LAYER.match(unit) is None:
            continue
        if before is not None and owner.device != before.device:
            left[before.device] = unit
        if owner.device in left:
            assert before is not None
            raise KtcError(
                f"{unit} is on {owner.device}{where(owner)} again, after {left[owner.device]} left it and"
                f" {_unit(before.name)} is on {before.device}{where(before)}; each GPU takes one range of layers",
                "split the layers into one contiguous range per GPU",
            )
        before = owner
