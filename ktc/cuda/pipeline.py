"""A model whose layers are on several devices: hidden states, and what goes with them, are copied between stages.

Hooks on Hugging Face's modules do it, so the model's own code stays as it is: the first unit of a stage copies its
inputs to the stage's device, and every other unit of the stage is given the same copies of what all layers share (mask,
positions, rotary tables). A model on one device has no hooks. How something is copied may be replaced, for a step that
is captured (graphs.py). What this file is not: deciding which layer is where (ktc/plan/stages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ktc.plan.stages import Placement


class Pipeline:
    """
    Args:
        placement: the stages; devices: of each name in it.

    Attributes:
        carried: tensors that the layers of every stage need, beside what the first of them is given.
        cross: (stage, tensors) -> their copies on that stage's device.
    """

    def __init__(self, model: nn.Module, placement: Placement, devices: Mapping[str, torch.device]) -> None:
        self.stages = placement.stages
        self.devices = [devices[stage.device] for stage in self.stages]
        self.carried: Sequence[Tensor] = ()
        self.cross: Callable[[int, list[Tensor]], list[Tensor]] = self.copy
        self._stage = 0
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (what was copied, its copy in this stage)
        if len(self.stages) > 1:
            model.register_forward_pre_hook(self._begin)
            for number, stage in enumerate(self.stages):
                for unit in stage.units:
                    hook = partial(self._enter, number)
                    model.get_submodule(unit).register_forward_pre_hook(hook, with_kwargs=True)

    def copy(self, stage: int, tensors: list[Tensor]) -> list[Tensor]:
        """Asynchronous copies, after what made the tensors and before what uses the copies."""
        return [t.to(self.devices[stage], non_blocking=True) for t in tensors]

    def here(self, tensor: Tensor) -> Tensor:
        """A carried tensor, or any other that a unit is given, on the device of the stage that runs now."""
        found = self._copies.get(id(tensor))
        return tensor if found is None else found[1]

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._stage, self._copies = 0, {}

    def _enter(self, stage: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if stage != self._stage:
            given = [*_tensors((args, kwargs)), *(self.carried if self.stages[stage].layers else ())]
            sources = list({id(t): t for t in given}.values())
            copies = self.cross(stage, sources)
            self._stage = stage
            self._copies = {id(a): (a, b) for a, b in zip(sources, copies, strict=True)}
        return _map(self._local, args), _map(self._local, kwargs)

    def _local(self, tensor: Tensor) -> Tensor:
        device = self.devices[self._stage]
        if id(tensor) not in self._copies and tensor.device != device:  # of some layers only, and not carried
            self._copies[id(tensor)] = (tensor, tensor.to(device, non_blocking=True))
        return self.here(tensor)


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor in its tuples, lists and dicts changed; anything else (a cache) as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_map(change, item) for item in value)
    if type(value) is dict:
        return {key: _map(change, item) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _tensors(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _tensors(item)
