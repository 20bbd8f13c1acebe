"""The manifest: constants of the format, canonical JSON, and its one schema.

Canonical JSON is UTF-8, keys sorted, no blanks, a newline at the end, no NaN: equal content gives
equal bytes. `parse` refuses what a careless parser would let through (two keys of one name, NaN,
an absurd size). What the fields mean is in docs/bundle-format.md; who fills them is writer.py.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from ktc.bundle.schema import Check, compile_schema
from ktc.errors import BundleError

FORMAT_MAJOR, FORMAT_MINOR = 1, 0
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"  # optional, detached; reserved: this version neither writes nor checks it
MAX_MANIFEST_BYTES = 256 << 20
ALGORITHM_VERSION = 1  # of the quantiser; part of what makes packed bytes reproducible
# Features a bundle may require of its reader. A reader that meets another one refuses the bundle.
KNOWN_FEATURES = frozenset({"experts.tiles", "linear.tiles", "int4.codebook"})
BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}


def canonical(value: Any) -> bytes:
    """`value` as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("the same key twice in one object")
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse(data: bytes, what: str) -> Any:
    """Parse strictly.

    Raises:
        BundleError: not UTF-8 JSON, a repeated key, NaN; `what` names the file.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{what}: {len(data)} bytes, more than a bundle's JSON may have")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{what}: not valid JSON: {error}", "copy or compile the bundle again") from error


@functools.cache
def load_schema() -> dict[str, Any]:
    """schema.json."""
    schema: dict[str, Any] = json.loads(resources.files("ktc.bundle").joinpath("schema.json").read_text("utf-8"))
    return schema


@functools.cache
def _check(definition: str | None) -> Check:
    schema = load_schema()
    return compile_schema(schema["$defs"][definition] if definition else schema, schema["$defs"])


def validate(value: Any, what: str, definition: str | None = None) -> None:
    """Check a manifest (or, with `definition="plan"`, a plan) against the schema.

    Raises:
        BundleError: names the file and the place in it.
    """
    fault = _check(definition)(value)
    if fault is not None:
        where = "/".join(map(str, fault[0])) or "top level"
        raise BundleError(f"{what}: {where}: {fault[1][:300]}")
