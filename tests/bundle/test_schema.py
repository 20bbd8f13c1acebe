"""The small validator against a general one: both accept and refuse the same manifests and plans."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktc.bundle import manifest
from ktc.bundle.schema import compile_schema
from ktc.errors import BundleError

# Not 1.0: an integer to the general validator, not to ours, and nothing that a writer of ours ever makes.
ODD = [None, True, False, -1, 0, 1, 0.5, 1 << 40, "", "x", "a b", "0" * 64, "../x", "auto", "cpu", [], [1], {}, "\n"]


class Document(NamedTuple):
    definition: str | None
    value: dict
    places: list[tuple]
    general: Any

    def __repr__(self) -> str:
        return f"Document({self.definition})"


def places(value: Any, path: tuple = ()) -> list[tuple]:
    out = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        out += places(item, (*path, key))
    return out


@pytest.fixture(scope="module", params=["manifest.json", "plan.json"])
def document(request: pytest.FixtureRequest, compiled) -> Document:
    path: Path = compiled("deepseek_v3") / request.param
    value = json.loads(path.read_bytes())
    schema, definition = manifest.load_schema(), None
    if request.param == "plan.json":
        definition = "plan"
        schema = {"$defs": schema["$defs"], **schema["$defs"]["plan"]}
    for section in ("tensors", "files", "modules"):  # a few of each kind are enough
        if section in value:
            value[section] = value[section][:4] + [m for m in value[section] if m.get("moe")][:1]
    return Document(definition, value, places(value), jsonschema.Draft202012Validator(schema))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_both_validators_agree(document: Document, data: st.DataObject) -> None:
    definition, original, where, general = document
    value = copy.deepcopy(original)
    for path in data.draw(st.lists(st.sampled_from(where), min_size=1, max_size=2)):
        holder = value
        try:
            for key in path[:-1]:
                holder = holder[key]
            if data.draw(st.booleans()):
                del holder[path[-1]]
            else:
                holder[path[-1]] = data.draw(st.sampled_from(ODD))
        except (KeyError, IndexError, TypeError):
            continue  # the first change took this place away
    try:
        manifest.validate(value, "x", definition)
        accepted = True
    except BundleError:
        accepted = False
    assert accepted == general.is_valid(value), list(general.iter_errors(value))[:1]


def test_the_schema_itself_is_valid_and_wholly_understood() -> None:
    schema = manifest.load_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in schema["$defs"].values():
        compile_schema(part, schema["$defs"])


def test_an_unsupported_keyword_is_an_error() -> None:
    with pytest.raises(ValueError, match="'uniqueItems' is not supported"):
        compile_schema({"type": "array", "uniqueItems": True}, {})


def test_a_fault_says_where() -> None:
    check = compile_schema({"properties": {"a": {"items": {"type": "integer"}}}}, {})
    assert check({"a": [1, 2]}) is None
    assert check({"a": [1, "x"]}) == (("a", 1), "'x' is not of type 'integer'")
