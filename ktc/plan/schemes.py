"""From the data type that a recipe asks for to one that fits the matrices: groups that divide, fallbacks, padding.

A group that does not divide K is never changed silently: it is refused, or the recipe names what to
do instead, and the choice is reported as a note.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktc.errors import RecipeError
from ktc.layout import DataType, QuantScheme, ScaleMode
from ktc.recipe.model import SchemeChoice

LEGAL_GROUPS: dict[tuple[DataType, ScaleMode], tuple[int, ...]] = {
    ("fp32", "none"): (0,),
    ("bf16", "none"): (0,),
    ("int8", "channel"): (0,),
    ("int8", "group"): (32, 64, 128),
    ("int4", "integer"): (16, 32, 64, 128),
    ("int4", "codebook"): (16, 32, 64, 128),
    ("int4", "group"): (32, 64, 128),
}


def is_legal(scheme: QuantScheme) -> bool:
    """Whether the kernels and the packer know this combination."""
    return scheme.group in LEGAL_GROUPS.get((scheme.data_type, scheme.scale), ())


def resolve(
    choice: SchemeChoice, columns: Sequence[tuple[str, int]], where: str, module: str
) -> tuple[QuantScheme, str]:
    """Fit a scheme to the K of every matrix that shares it.

    Args:
        columns: (what it is, K) of each matrix, e.g. ("hidden size", 2880).
        where: the rule, for messages.
        module: module path, for messages.
    Returns:
        The scheme, and a note that is empty when the recipe's own group divides every K.
    Raises:
        RecipeError: it does not divide and the rule allows no fallback that does.
    """
    scheme = _scheme(choice, choice.group)
    bad = _undivided(choice.group, columns)
    if not bad:
        return scheme, ""
    why = f"group {choice.group} does not divide {bad}"
    for fallback in choice.fallback:
        if fallback == "pad":
            return scheme, f"padded: {why}; the last group of each row is partly zeros"
        if not _undivided(fallback, columns):
            return _scheme(choice, fallback), f"fallback: group {fallback} instead of {choice.group} ({why})"
    works = [g for g in LEGAL_GROUPS[choice.data_type, scheme.scale] if not _undivided(g, columns)]
    if works:
        better = works[-1]
        hint = f"groups that work here: {', '.join(map(str, works))}; set group: {better} or group_fallback: [{better}]"
    else:
        hint = "no group divides it; set group_fallback: pad, or use data_type: int8 with group: channel"
    raise RecipeError(f"{where}: {module}: {why}", hint)


def padding_note(what: str, size: int, stored: int) -> str:
    """A note where whole tiles make a matrix noticeably larger than its weights (failure S1), else an empty string."""
    if stored - size < stored / 64:
        return ""
    return f"padded: {what} {size} is stored as {stored}"


def _scheme(choice: SchemeChoice, group: int) -> QuantScheme:
    mode: ScaleMode
    if choice.data_type in ("fp32", "bf16"):
        mode = "none"
    elif choice.scale == "float":
        mode = "group" if group else "channel"
    else:
        mode = choice.scale
    return QuantScheme(choice.data_type, mode, group)


def _undivided(group: int, columns: Sequence[tuple[str, int]]) -> str:
    return " and ".join(f"{what} {k}" for what, k in columns if group and k % group)
