"""What `ktc tune` found on this machine, and whether it still holds: `tune.json` in ktc's configuration directory.

Reading never fails: a missing, damaged or foreign file means the kernels' own defaults, with the reason in words.
Not here: measuring (crossover.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ktc
from ktc.errors import DiskError
from ktc.layout import ABI_VERSION, LAYOUT_VERSION
from ktc.paths import home

FILE = "tune.json"
VERSION = 1
MAX_ROWS = 1 << 20


@dataclass(frozen=True)
class Tuning:
    """Crossovers of one machine.

    Attributes:
        min_rows: prefix of kernel names -> tokens of an expert from which those kernels are preferred
            ("amx:int4" -> 5); what `_runtime.Moe` and `_runtime.Linear` take as `min_rows`.
        source: where it comes from, in words, for reports.
        applied: False when the kernels' own defaults are in use.
        measured: details for people: per format the times that the crossover was read from.
    """

    min_rows: dict[str, int]
    source: str
    applied: bool
    measured: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.applied:
            return f"built-in defaults ({self.source})"
        rows = ", ".join(f"{name} from {n}" for name, n in sorted(self.min_rows.items()))
        return f"{rows} tokens per expert ({self.source})"


def config_dir() -> Path:
    """`$KTC_CONFIG_DIR`, else `$XDG_CONFIG_HOME/ktc`, else `~/.config/ktc`; not created."""
    if given := os.environ.get("KTC_CONFIG_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "ktc"


def tune_path() -> Path:
    return config_dir() / FILE


def fingerprint(threads: int | None = None) -> dict[str, Any]:
    """What a crossover depends on: the CPU and its features, how many of it, and which ktc measured."""
    from ktc import host
    from ktc.codegen.variants import VARIANTS

    this = host.this_host()
    wanted = {f for v in VARIANTS.values() for f in v.required_features}
    return {
        "cpu": host.cpu_model(),
        "features": sorted(this.features & wanted),
        "cpus": sum(len(node) for node in this.nodes),
        "nodes": len(this.nodes),
        "ktc": ktc.__version__,
        "abi": ABI_VERSION,
        "layout": LAYOUT_VERSION,
    }


def fingerprint_id(fields: dict[str, Any]) -> str:
    """A short name of a fingerprint."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def load(path: Path | None = None) -> Tuning:
    """What is stored for this machine, or the defaults with the reason why."""
    try:
        path = tune_path() if path is None else path
    except DiskError as error:
        return _default(error.message)
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return _default(_untuned())
    except (OSError, ValueError) as error:
        return _default(f"{path} is unreadable: {type(error).__name__}; `ktc tune` writes it anew")
    if not isinstance(data, dict) or data.get("version") != VERSION or not _valid(data.get("min_rows")):
        return _default(f"{path} is not what this version of ktc writes; `ktc tune` writes it anew")
    here, there = fingerprint(), data.get("fingerprint")
    if there != here:
        changed = [k for k in here if not isinstance(there, dict) or there.get(k) != here[k]]
        return _default(f"{path} was measured under another {', '.join(changed)}; run `ktc tune` again")
    measured = data.get("measured")
    return Tuning(data["min_rows"], str(path), True, measured if isinstance(measured, dict) else {})


def store(min_rows: dict[str, int], measured: dict[str, Any], path: Path | None = None) -> Path:
    """Write the crossovers of this machine, replacing the file whole.

    Raises:
        DiskError: it cannot be written; the old file is then untouched.
    """
    from ktc.codegen.cache import write_atomic

    path = tune_path() if path is None else path
    here = fingerprint()
    record = {
        "version": VERSION,
        "fingerprint": here,
        "id": fingerprint_id(here),
        "min_rows": dict(sorted(min_rows.items())),
        "measured": measured,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{path.parent} cannot be created: {error.strerror}", "set KTC_CONFIG_DIR") from error
    write_atomic(path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
    return path


def _valid(min_rows: Any) -> bool:
    return isinstance(min_rows, dict) and all(
        isinstance(k, str) and k and type(v) is int and 0 <= v <= MAX_ROWS for k, v in min_rows.items()
    )


def _untuned() -> str:
    from ktc import host
    from ktc.codegen.variants import VARIANTS, runnable

    if any(VARIANTS[name].tile_type for name in runnable(host.this_host().features)):
        return "not tuned: `ktc tune` measures this machine in a minute or two"
    return "nothing to tune: this CPU has no tile kernels that vector kernels could give way to"


def _default(source: str) -> Tuning:
    return Tuning({}, source, False)
