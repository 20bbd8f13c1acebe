"""Compiles the subset of JSON Schema that schema.json uses into closures.

A manifest of a large model has tens of thousands of values and is checked at every start of `ktc run`; a
general validator takes seconds for that. A keyword this file does not know is an error when the schema is
compiled, so the schema cannot promise what is not checked; tests hold it against a general validator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

# A check returns None, or (path of the fault within the value, what is wrong).
Fault = tuple[tuple[str | int, ...], str]
Check = Callable[[Any], Fault | None]

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: type(v) is dict,
    "array": lambda v: type(v) is list,
    "string": lambda v: type(v) is str,
    "integer": lambda v: type(v) is int,
    "number": lambda v: type(v) in (int, float),
    "boolean": lambda v: type(v) is bool,
    "null": lambda v: v is None,
}
_IGNORED = frozenset({"$schema", "$id", "$defs", "title", "description"})


def compile_schema(schema: dict[str, Any], definitions: dict[str, Any]) -> Check:
    """A check for `schema`; `$ref` looks in `definitions`.

    Raises:
        ValueError: a keyword that is not supported.
    """
    return _compile(schema, definitions, {})


def _compile(schema: dict[str, Any], definitions: dict[str, Any], known: dict[str, Check]) -> Check:
    if (reference := schema.get("$ref")) is not None:
        name = str(reference).removeprefix("#/$defs/")
        if name not in known:
            known[name] = _compile(definitions[name], definitions, known)
        return known[name]
    checks: list[Check] = []
    for keyword, value in schema.items():
        if keyword in _IGNORED:
            continue
        if keyword not in _KEYWORDS:
            raise ValueError(f"schema keyword {keyword!r} is not supported")
        checks += _KEYWORDS[keyword](value, schema, lambda part: _compile(part, definitions, known))
    if len(checks) == 1:
        return checks[0]

    def check(value: Any) -> Fault | None:
        for one in checks:
            if (fault := one(value)) is not None:
                return fault
        return None

    return check


Compile = Callable[[dict[str, Any]], Check]


def _test(accepts: Callable[[Any], bool], message: Callable[[Any], str]) -> list[Check]:
    return [lambda value: None if accepts(value) else ((), message(value))]


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _type(wanted: Any, _: Any, __: Compile) -> list[Check]:
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    tests = [_TYPES[name] for name in names]
    if len(tests) == 1:
        accepts = tests[0]
    else:
        accepts = lambda value: any(test(value) for test in tests)  # noqa: E731
    return _test(accepts, lambda value: f"{_show(value)} is not of type {' or '.join(map(repr, names))}")


def _enum(values: Any, _: Any, __: Compile) -> list[Check]:
    # 1 == True in Python, not in JSON
    accepts = {(type(v), v) for v in values}
    return _test(
        lambda v: isinstance(v, str | int | float | None) and (type(v), v) in accepts,
        lambda v: f"{_show(v)} is not one of {values}",
    )


def _bounds(accepts: Callable[[Any, Any], bool], words: str) -> Callable[..., list[Check]]:
    def make(bound: Any, _: Any, __: Compile) -> list[Check]:
        return _test(
            lambda v: type(v) not in (int, float) or accepts(v, bound),
            lambda v: f"{_show(v)} is {words} {bound}",
        )

    return make


def _sized(kind: type[Any], accepts: Callable[[int, int], bool], words: str) -> Callable[..., list[Check]]:
    def make(bound: int, _: Any, __: Compile) -> list[Check]:
        return _test(
            lambda v: type(v) is not kind or accepts(len(v), bound),
            lambda v: f"{_show(v)} is {words} {bound}",
        )

    return make


def _pattern(text: str, _: Any, __: Compile) -> list[Check]:
    matches = re.compile(text).search
    return _test(
        lambda v: type(v) is not str or matches(v) is not None, lambda v: f"{_show(v)} does not match {text!r}"
    )


def _required(names: list[str], _: Any, __: Compile) -> list[Check]:
    def check(value: Any) -> Fault | None:
        if type(value) is dict:
            for name in names:
                if name not in value:
                    return (), f"{name!r} is a required property"
        return None

    return [check]


def _at(where: str | int, fault: Fault) -> Fault:
    return (where, *fault[0]), fault[1]


def _properties(properties: dict[str, Any], _: Any, make: Compile) -> list[Check]:
    checks = [(name, make(part)) for name, part in properties.items()]

    def check(value: Any) -> Fault | None:
        if type(value) is dict:
            for name, one in checks:
                if name in value and (fault := one(value[name])) is not None:
                    return _at(name, fault)
        return None

    return [check]


def _additional(part: dict[str, Any], schema: dict[str, Any], make: Compile) -> list[Check]:
    named, one = schema.get("properties", {}), make(part)

    def check(value: Any) -> Fault | None:
        if type(value) is dict:
            for name, item in value.items():
                if name not in named and (fault := one(item)) is not None:
                    return _at(name, fault)
        return None

    return [check]


def _items(part: dict[str, Any], schema: dict[str, Any], make: Compile) -> list[Check]:
    one, skip = make(part), len(schema.get("prefixItems", []))

    def check(value: Any) -> Fault | None:
        if type(value) is list:
            for index in range(skip, len(value)):
                if (fault := one(value[index])) is not None:
                    return _at(index, fault)
        return None

    return [check]


def _prefix_items(parts: list[dict[str, Any]], _: Any, make: Compile) -> list[Check]:
    checks = [make(part) for part in parts]

    def check(value: Any) -> Fault | None:
        if type(value) is list:
            for index, (item, one) in enumerate(zip(value, checks, strict=False)):
                if (fault := one(item)) is not None:
                    return _at(index, fault)
        return None

    return [check]


def _one_of(parts: list[dict[str, Any]], _: Any, make: Compile) -> list[Check]:
    checks = [make(part) for part in parts]

    def check(value: Any) -> Fault | None:
        faults = [one(value) for one in checks]
        if faults.count(None) == 1:
            return None
        said: Iterator[str] = (fault[1] for fault in faults if fault is not None)
        return (), "; ".join(said) or f"{_show(value)} is ambiguous"

    return [check]


_KEYWORDS: dict[str, Callable[..., list[Check]]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda value, schema, make: _enum([value], schema, make),
    "minimum": _bounds(lambda v, b: v >= b, "less than the minimum of"),
    "maximum": _bounds(lambda v, b: v <= b, "greater than the maximum of"),
    "exclusiveMinimum": _bounds(lambda v, b: v > b, "not greater than"),
    "minItems": _sized(list, lambda n, b: n >= b, "shorter than"),
    "maxItems": _sized(list, lambda n, b: n <= b, "longer than"),
    "maxLength": _sized(str, lambda n, b: n <= b, "longer than"),
    "pattern": _pattern,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional,
    "items": _items,
    "prefixItems": _prefix_items,
    "oneOf": _one_of,
}
