"""One readable sentence out of JSON Schema errors: where, what, and what was probably meant."""

from __future__ import annotations

import difflib
from typing import Any

from ktc.errors import RecipeError
from ktc.recipe.yaml_marks import Document, Mark, Path

# What people write from memory of the paper, of KTransformers, or of other tools.
_HABITS = {
    "dtype": "data_type",
    "type": "data_type",
    "group_size": "group",
    "n_deferred": "n_deferred_experts",
    "generate_device": "device",
    "prefill_device": "device",
    "regex": "name",
    "args": "kwargs",
}


def explain(errors: list[Any], document: Document) -> RecipeError:
    """The first error of the file as a RecipeError.

    Args:
        errors: `jsonschema.ValidationError`s (that library types them loosely).
        document: as written; the validated copy has the same paths.
    """
    found = [_explain(e, document) for e in errors]
    mark, message, hint = min(found, key=lambda item: (item[0].line, item[0].column))
    return RecipeError(f"{document.file}:{mark.line}:{mark.column}: {message}", hint)


def _explain(error: Any, document: Document) -> tuple[Mark, str, str | None]:
    path: Path = tuple(error.absolute_path)
    mark = document.values[path]
    label = _label(path)
    original = _original(document.value, path)
    expect = error.schema.get("x-expect") if isinstance(error.schema, dict) else None
    if error.validator == "additionalProperties":
        allowed = list(error.schema.get("properties", {}))
        key = next(k for k in error.instance if k not in allowed)
        return (
            document.keys[(*path, key)],
            f"{_in(label)}unknown key '{key}'",
            _did_you_mean(key, allowed) or _known(allowed),
        )
    if error.validator == "required":
        missing = next(k for k in error.validator_value if k not in error.instance)
        return mark, f"{_in(label)}'{missing}' is missing", _required_hint(missing, error)
    if error.validator in ("enum", "const"):
        allowed = [str(v) for v in (error.validator_value if error.validator == "enum" else [error.validator_value])]
        if isinstance(original, str) and original in allowed and original not in error.schema.get(error.validator, ()):
            return mark, f"{label}: '{original}' is a string where a number belongs", f"write {original} without quotes"
        return mark, f"{label}: '{original}' is not one of {', '.join(allowed)}", _did_you_mean(str(original), allowed)
    if error.validator == "type":
        return mark, f"{label or 'the recipe'}: {_kind(original)} where {_KINDS[error.validator_value]} belongs", None
    if error.validator == "minProperties":
        return mark, f"{label}: is empty", "give at least one of name, class, role"
    if error.validator == "minItems":
        return mark, f"{label}: is empty", None
    if expect:
        return mark, f"{label}: {_shown(original)} is not {expect}", None
    if error.validator == "pattern" and path[-1] == "device":
        return mark, f"device: '{original}' is neither cpu nor cuda:N", None
    if error.validator == "pattern" and path[-1] == "class":
        return mark, f"class: '{original}' is not a dotted class name", "patterns belong in name:"
    return mark, f"{label}: {error.message}", None


_KINDS = {
    "object": "a mapping",
    "array": "a list",
    "string": "a string",
    "boolean": "true or false",
    "integer": "a whole number",
}


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value)


def _shown(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _original(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _label(path: Path) -> str:
    """("rules", 2, "replace", "kwargs", "group") -> "replace.kwargs.group"."""
    names = [str(p) for p in path if not isinstance(p, int)]
    if len(path) > 1 and path[0] == "rules":
        names = names[1:]
    return ".".join(names)


def _in(label: str) -> str:
    return f"{label}: " if label else ""


def _did_you_mean(word: str, allowed: list[str]) -> str | None:
    by_lower = {a.lower(): a for a in allowed}
    habit = _HABITS.get(word.lower())
    if habit in allowed:
        return f"did you mean {habit}?"
    near = difflib.get_close_matches(word.lower(), by_lower, n=max(1, len(allowed)), cutoff=0.6)
    likeness = {low: difflib.SequenceMatcher(None, low, word.lower()).ratio() for low in near}
    near.sort(key=lambda low: (-likeness[low], abs(_number(low) - _number(word))))  # int3: int4 rather than int8
    if not near:  # "operators.experts.FusedMoE" for "ktc.FusedMoE"
        near = [low for low in by_lower if "." in low and low.endswith("." + word.lower().rpartition(".")[2])]
    if near:
        return f"did you mean {by_lower[near[0]]}?"
    return None


def _number(word: str) -> int:
    """The digits of a name as one number."""
    return int("".join(c for c in word if c in "0123456789") or 0)


def _known(allowed: list[str]) -> str:
    return f"known here: {', '.join(allowed)}" if allowed else "nothing may be set here"


def _required_hint(missing: str, error: Any) -> str | None:
    near = difflib.get_close_matches(missing, [str(k) for k in error.instance], n=1, cutoff=0.6)
    if near:
        return f"is '{near[0]}' meant to be {missing}?"
    return {
        "kwargs": "add kwargs: {data_type: int4}",
        "data_type": "add data_type: int4 (or int8, bf16, fp32)",
        "match": "each rule is match: {...} and replace: {...}",
        "replace": "each rule is match: {...} and replace: {...}",
        "class": "e.g. class: ktc.Linear, or class: default to keep Hugging Face's module",
        "rules": "a recipe is a list of rules, or a mapping with rules:",
    }.get(missing)
