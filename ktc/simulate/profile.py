"""Hardware profile: find the file, check it, make it a `Hardware`. What the fields mean is in docs/simulate.md.

A profile is checked like a recipe: a JSON Schema, and one error that names file, line and column.
`ktc tune` writes the same format; it may put whatever it wants to remember under `measured`.
"""

from __future__ import annotations

import difflib
import json
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.errors import RecipeError
from ktc.paths import expand
from ktc.recipe.shipped import Shipped
from ktc.recipe.yaml_marks import Document, parse
from ktc.simulate.hardware import Cpu, Device, Hardware, Host, Kernels, Link, ProfileError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

# Kernels per module of ktc's own fused device operators (docs/simulate.md); a profile may say otherwise.
DEFAULT_KERNELS = {"norm": 1, "linear": 1, "attention": 5, "router": 3, "activation": 1, "add": 1}
DEFAULT_AMX_MIN_TOKENS = 5
MAX_AMX_MIN_TOKENS = 10_000
THIS_MACHINE = "this-machine"
"""The name of the profile that `ktc tune` writes."""
_PROFILES = Shipped(
    "hardware profile",
    Path("recipes/hardware"),
    ProfileError,
    also=f"; {THIS_MACHINE} is what ktc tune writes",
)


def shipped_profiles() -> dict[str, Path]:
    """Name without suffix -> file, for every profile that comes with ktc."""
    return _PROFILES.files()


def this_machine_path() -> Path:
    """Where `ktc tune` writes the profile of this machine: beside its crossovers."""
    from ktc.perf.tuning import config_dir

    return config_dir() / f"{THIS_MACHINE}.yaml"


def known_profiles() -> str:
    """The names that `load_profile` takes, in words."""
    state = "measured here by" if this_machine_path().is_file() else "once it is measured:"
    return f"{', '.join(shipped_profiles())}, {THIS_MACHINE} ({state} ktc tune), or a file"


def load_profile(path_or_name: str | Path) -> Hardware:
    """Read a hardware profile.

    Args:
        path_or_name: a file, or the name of a shipped profile (used only when there is no such file), or
            `this-machine`, which `ktc tune` measures.
    Raises:
        ProfileError: not found (lists the shipped ones), unreadable or faulty: `file:line:column: ...`.
    """
    given = expand(path_or_name)
    if given.parent in _PROFILES.prefixes() and given.name.removesuffix(".yaml") == THIS_MACHINE and not given.exists():
        given = this_machine_path()
        if not given.is_file():
            raise ProfileError(f"{given}: there is no profile of this machine yet", "ktc tune measures it")
    return parse_profile(*_PROFILES.read(given))


def parse_profile(text: str, file: str, default_name: str = "profile") -> Hardware:
    """YAML text -> `Hardware`. Raises ProfileError, as `load_profile`."""
    if not text.strip():
        raise ProfileError(f"{file}: is empty", "docs/simulate.md lists the fields of a hardware profile")
    try:
        document = parse(text, file)
    except RecipeError as error:
        hint = error.hint.replace("recipe", "profile") if error.hint else None
        raise ProfileError(error.message.replace("a recipe", "a profile"), hint) from error
    errors = list(_validator().iter_errors(document.value))
    if errors:
        raise _explain(errors, document)
    _check_finite(document)
    return _hardware(document, default_name)


@cache
def _validator() -> Validator:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads((Path(__file__).parent / "schema.json").read_text()))


def _explain(errors: list[Any], document: Document) -> ProfileError:
    """The first error of the file (jsonschema.ValidationErrors, which that library types loosely)."""
    found = [_one(error, document) for error in errors]
    mark, message, hint = min(found, key=lambda item: item[0])
    return ProfileError(f"{document.file}:{mark[0]}:{mark[1]}: {message}", hint)


def _one(error: Any, document: Document) -> tuple[tuple[int, int], str, str | None]:
    path = tuple(error.absolute_path)
    mark = document.values[path]
    at = (mark.line, mark.column)
    label = ".".join(str(p) for p in path)
    prefix = f"{label}: " if label else ""
    if error.validator == "additionalProperties":
        allowed = list(error.schema.get("properties", {}))
        key = next(k for k in error.instance if k not in allowed)
        mark = document.keys[(*path, key)]
        near = difflib.get_close_matches(key, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(allowed)}"
        return (mark.line, mark.column), f"{prefix}unknown key '{key}'", hint
    if error.validator == "required":
        missing = next(k for k in error.validator_value if k not in error.instance)
        return at, f"{prefix}'{missing}' is missing", "docs/simulate.md says what each field is and where to find it"
    shown = "nothing" if error.instance is None else f"'{error.instance}'"
    if isinstance(error.instance, dict | list):
        shown = "a mapping" if isinstance(error.instance, dict) else "a list"
    if error.validator in ("enum", "const"):
        allowed = error.validator_value if error.validator == "enum" else [error.validator_value]
        return at, f"{prefix}{shown} is not one of {', '.join(map(str, allowed))}", None
    expect = error.schema.get("x-expect") if isinstance(error.schema, dict) else None
    if expect is None and error.validator == "type":
        expect = {"object": "a mapping", "string": "a text"}.get(error.validator_value, error.validator_value)
    if expect:
        return at, f"{label or 'the profile'}: {shown} is not {expect}", None
    return at, f"{prefix}{error.message}", None


def _check_finite(document: Document) -> None:
    """YAML can spell .nan, and NaN passes every bound of a JSON Schema."""

    def visit(value: Any, path: tuple[str | int, ...]) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise ProfileError(f"{document.at(path)}: {'.'.join(map(str, path))}: {value} is not a finite number")
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            visit(item, (*path, key))

    visit(document.value, ())


def _hardware(document: Document, default_name: str) -> Hardware:
    top = document.value
    cpu, device = top["cpu"], top["device"]
    if cpu["sockets"] > 1 and "dram_remote_gbs" not in cpu:
        raise ProfileError(
            f"{document.at(('cpu',))}: cpu: 'dram_remote_gbs' is missing, and there are {cpu['sockets']} sockets",
            "give the rate at which one socket reads another socket's memory",
        )
    if cpu.get("dram_remote_gbs", 0) > cpu["dram_local_gbs"]:
        raise ProfileError(
            f"{document.at(('cpu', 'dram_remote_gbs'))}: cpu.dram_remote_gbs: {cpu['dram_remote_gbs']} is more than"
            f" dram_local_gbs {cpu['dram_local_gbs']}",
            "are the two exchanged?",
        )
    for section in ("link", "host"):
        if device["kind"] == "cuda" and section not in top:
            raise ProfileError(
                f"{document.at(('device',))}: '{section}' is missing, and the device is a GPU",
                "docs/simulate.md says what each field is and where to find it",
            )
    link, host = top.get("link"), top.get("host")
    return Hardware(
        name=top.get("name", default_name),
        description=" ".join(top.get("description", "").split()),
        cpu=Cpu(
            sockets=cpu["sockets"],
            cores=cpu["cores_per_socket"],
            dram_local=cpu["dram_local_gbs"] * 1e9,
            dram_remote=cpu.get("dram_remote_gbs", cpu["dram_local_gbs"]) * 1e9,
            peak={unit: value * 1e12 for unit, value in cpu["peak_tflops"].items()},
            amx_min_tokens=cpu.get("amx_min_tokens", DEFAULT_AMX_MIN_TOKENS),
            kernels={name: Kernels(**values) for name, values in cpu["kernels"].items()},
            memory=cpu["memory_gb"] * 1e9 if "memory_gb" in cpu else None,
            job=cpu.get("job_us", 0.0) * 1e-6,
            start=cpu.get("start_us", 0.0) * 1e-6,
        ),
        device=_device(device),
        link=Link(link["gbs"] * 1e9, link["latency_us"] * 1e-6) if link else Link(math.inf, 0.0),
        host=Host(host["submit_us"] * 1e-6, host["sync_us"] * 1e-6) if host else Host(0.0, 0.0),
        file=document.file,
    )


def _device(device: dict[str, Any]) -> Device:
    if device["kind"] == "cpu":
        return Device("cpu", device.get("name", "the expert pool"))
    return Device(
        kind="cuda",
        name=device.get("name", "GPU"),
        memory_rate=device["hbm_gbs"] * 1e9,
        memory_fraction=device["hbm_fraction"],
        peak=device["peak_tflops"] * 1e12,
        compute_fraction=device["compute_fraction"],
        kernel_time=device["kernel_us"] * 1e-6,
        kernels={**DEFAULT_KERNELS, **device.get("kernels", {})},
        memory=device["memory_gb"] * 1e9 if "memory_gb" in device else None,
    )
