"""YAML text -> `Recipe`: spelling, the JSON Schema, then what a schema cannot say. Shapes come later, in `ktc.plan`."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from functools import cache
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal, cast

from ktc.errors import RecipeError
from ktc.layout import DataType
from ktc.recipe.model import OPERATOR_OF_CLASS, Match, Recipe, Rule, ScaleChoice, SchemeChoice
from ktc.recipe.schema_errors import explain
from ktc.recipe.yaml_marks import Document, Path, parse

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

BACKENDS = {
    "auto": "auto",
    "hybrid": "hybrid_AMX_AVX512",
    "hybrid_amx_avx512": "hybrid_AMX_AVX512",
    "amx": "AMX",
    "avx512": "AVX512",
    "avx-512": "AVX512",
    "avx2": "AVX2",
    "portable": "portable",
}
DATA_TYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
DEFAULT_SCALE: dict[DataType, ScaleChoice] = {"int8": "float", "int4": "codebook"}
DEFAULT_GROUP: dict[tuple[DataType, ScaleChoice], int] = {
    ("int8", "float"): 0,
    ("int4", "codebook"): 16,
    ("int4", "integer"): 32,
    ("int4", "float"): 32,
}


def parse_recipe(text: str, file: str = "<recipe>", default_name: str = "recipe") -> Recipe:
    """Parse and check a recipe.

    Args:
        text: YAML.
        file: name used in messages.
    Raises:
        RecipeError: message `file:line:column: ...` and a hint.
    """
    document = parse(text, file)
    if isinstance(document.value, list):  # a bare list of rules
        document = _wrap(document)
    fixed = _normalised(document.value)
    errors = list(_validator().iter_errors(fixed))
    if errors:
        raise explain(errors, document)
    rules = tuple(_rule(document, fixed["rules"][i], ("rules", i), i) for i in range(len(fixed["rules"])))
    return Recipe(
        file=file,
        text=text,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        name=fixed.get("name", default_name),
        description=fixed.get("description", "").strip(),
        rules=rules,
    )


@cache
def _validator() -> Validator:
    from jsonschema import Draft202012Validator

    schema = json.loads((FilePath(__file__).parent / "schema.json").read_text())
    return Draft202012Validator(schema)


def _wrap(document: Document) -> Document:
    """Give a bare list the paths that it would have under `rules:`."""

    def move(table: dict[Path, Any]) -> dict[Path, Any]:
        return {("rules", *path): mark for path, mark in table.items()}

    values = {(): document.values[()], **move(document.values)}
    return Document({"rules": document.value}, values, move(document.keys), document.file)


def _normalised(value: Any) -> Any:
    """A copy with the free spellings (case of data types, backend synonyms) made canonical."""
    value = copy.deepcopy(value)
    rules = value.get("rules") if isinstance(value, dict) else None
    for rule in rules if isinstance(rules, list) else []:
        replace = rule.get("replace") if isinstance(rule, dict) else None
        kwargs = replace.get("kwargs") if isinstance(replace, dict) else None
        if isinstance(replace, dict) and kwargs is None and "kwargs" in replace:
            kwargs = replace["kwargs"] = {}  # `kwargs:` with nothing after it
        if not isinstance(kwargs, dict):
            continue
        for key in ("data_type", "scale", "group", "group_fallback", "n_deferred_experts", "kv_cache"):
            if isinstance(kwargs.get(key), str):
                kwargs[key] = kwargs[key].lower()
        if isinstance(kwargs.get("data_type"), str):
            kwargs["data_type"] = DATA_TYPE_NAMES.get(kwargs["data_type"], kwargs["data_type"])
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = BACKENDS.get(kwargs["backend"].lower(), kwargs["backend"])
    return value


def _rule(document: Document, rule: dict[str, Any], path: Path, index: int) -> Rule:
    match, replace = rule["match"], rule["replace"]
    kwargs: dict[str, Any] = replace.get("kwargs", {})
    kwargs_path = (*path, "replace", "kwargs")
    operator = OPERATOR_OF_CLASS[replace["class"]]
    device = replace.get("device")
    return Rule(
        index=index,
        line=document.line(path),
        match=Match(
            _regex(document, match.get("name"), (*path, "match", "name")), match.get("class"), match.get("role")
        ),
        operator=operator,
        replace_class=replace["class"],
        device="cuda:0" if device == "cuda" else device,
        optional=rule.get("optional", False),
        recursive=rule.get("recursive", True),
        scheme=_scheme(document, kwargs, kwargs_path) if operator in ("moe", "linear") else None,
        backend=_backend(document, kwargs, kwargs_path),
        n_deferred_experts=_deferred(kwargs.get("n_deferred_experts", 0)),
        hot_experts=int(kwargs.get("hot_experts", 0)),
        hot_profile=_hot_profile(document, kwargs, kwargs_path),
        callback=kwargs.get("callback", False),
        kv_cache="host" if kwargs.get("kv_cache") == "host" else "",
    )


def _hot_profile(document: Document, kwargs: dict[str, Any], path: Path) -> str:
    if ("hot_experts" in kwargs) != ("hot_profile" in kwargs):
        given, missing = ("hot_experts", "hot_profile") if "hot_experts" in kwargs else ("hot_profile", "hot_experts")
        raise RecipeError(
            f"{document.at((*path, given), key=True)}: {given} needs {missing} beside it",
            "hot_experts: N puts the N most used experts of each layer on the device; hot_profile: FILE says which"
            " those are (ktc profile makes it)",
        )
    return str(kwargs.get("hot_profile", ""))


def _deferred(value: Any) -> int | Literal["auto"]:
    return "auto" if value == "auto" else int(value)  # JSON Schema takes 3.0 for an integer


def _regex(document: Document, text: str | None, path: Path) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        hint = None
        if text.startswith("*"):
            hint = f"a regular expression, not a shell pattern: did you mean '.{text}'?"
        raise RecipeError(f"{document.at(path)}: bad regular expression '{text}': {error}", hint) from error


def _scheme(document: Document, kwargs: dict[str, Any], path: Path) -> SchemeChoice:
    data_type = cast(DataType, kwargs["data_type"])

    def refuse(key: str, why: str, hint: str) -> RecipeError:
        return RecipeError(f"{document.at((*path, key), key=True)}: {key}: {why}", hint)

    if data_type in ("fp32", "bf16"):
        for key in ("group", "scale", "group_fallback"):
            if key in kwargs:
                raise refuse(key, f"{data_type} has no scales", f"remove {key}, or choose int8 or int4")
        return SchemeChoice(data_type)
    scale = cast(ScaleChoice, kwargs.get("scale", DEFAULT_SCALE[data_type]))
    if data_type == "int8" and scale != "float":
        raise refuse(
            "scale", f"{scale} group scales exist for int4 only", "use scale: float with group, or group: channel"
        )
    given = kwargs.get("group", DEFAULT_GROUP[data_type, scale])
    group = 0 if given == "channel" else int(given)
    if data_type == "int4" and not group:
        raise refuse("group", "int4 needs a group: one scale per row is too coarse", "use group: 32, 64 or 128")
    if group == 16 and scale == "float":
        raise refuse("group", "16 exists for int4 with integer or codebook scales only", "use group: 32, 64 or 128")
    fallback = kwargs.get("group_fallback", "refuse")
    if "group_fallback" in kwargs and not group:
        raise refuse("group_fallback", "group: channel always fits", "remove group_fallback, or set a group")
    return SchemeChoice(data_type, group, scale, _fallback(document, fallback, group, scale, path))


def _fallback(
    document: Document, fallback: str | list[Any], group: int, scale: ScaleChoice, path: Path
) -> tuple[int | Literal["pad"], ...]:
    if fallback == "refuse":
        return ()
    if fallback == "pad":
        return ("pad",)
    path = (*path, "group_fallback")
    for i, item in enumerate(fallback):
        where = document.at((*path, i))
        if item == "pad" and i != len(fallback) - 1:
            raise RecipeError(f"{where}: group_fallback: pad always fits, so nothing after it is ever tried")
        if item != "pad" and item >= group:
            raise RecipeError(f"{where}: group_fallback: {item} is not smaller than group {group}")
        if item == 16 and scale == "float":
            raise RecipeError(f"{where}: group_fallback: 16 exists for int4 with integer or codebook scales only")
    return tuple("pad" if item == "pad" else int(item) for item in fallback)


def _backend(document: Document, kwargs: dict[str, Any], path: Path) -> str:
    backend = str(kwargs.get("backend", "auto"))
    if kwargs.get("data_type") != "fp32":
        return backend
    if backend not in ("auto", "portable"):
        raise RecipeError(
            f"{document.at((*path, 'backend'))}: backend: fp32 takes portable only, not {backend}",
            "use backend: portable, or data_type: bf16",
        )
    return "portable"
