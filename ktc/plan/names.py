"""Module paths that differ in their layer number only, as one name: `model.layers.{1-26}.mlp`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def pattern(name: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`: equal for modules that a group may hold."""
    return _NUMBER.sub("*", name)


def group_name(names: Sequence[str]) -> str:
    """One name for module paths of one pattern."""
    if len(names) == 1:
        return names[0] or "(model)"
    numbers = [_NUMBER.findall(n) for n in names]
    out = _NUMBER.sub("\0", names[0])
    for place in range(len(numbers[0])):
        out = out.replace("\0", ranges(sorted({int(n[place]) for n in numbers})), 1)
    return out


def ranges(numbers: Sequence[int]) -> str:
    """[3, 4, 5, 9] -> "{3-5,9}"; a single number stays bare."""
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    if step == 2 and len(numbers) > 2 and all(b - a == 2 for a, b in itertools.pairwise(numbers)):
        return f"{{{numbers[0]}-{numbers[-1]}/2}}"  # every other layer
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return "{" + ",".join("-".join(map(str, run)) for run in runs) + "}"
