"""`ktc doctor`: what this machine has, line by line, with what to do where something is amiss.

Works without torch: a broken torch is one of the things it is run for. Reads and prints only.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

import ktc
from ktc import host as facts
from ktc.errors import KtcError
from ktc.progress import format_bytes

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "jinja2", "click", "jsonschema")
_NEEDED = ("numpy", "click", "jinja2", "jsonschema")
_LOW_MEMORY = 8 << 30
_LOW_DISK = 10 << 30


@dataclass(frozen=True)
class Line:
    """One fact. `advice` is empty when all is well."""

    name: str
    value: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        return not self.advice


def examine() -> Iterator[Line]:
    """Every line, in printing order. A check that fails is a line, not an exception."""
    for check in (_versions, _runtime, _topology, _memory, _build, _cache, _disk):
        try:
            yield from check()
        except KtcError as error:  # a fault of the machine: its message names it
            yield Line(check.__name__.strip("_"), error.message, error.hint or "see the message")
        except Exception as error:
            yield Line(check.__name__.strip("_"), f"{type(error).__name__}: {error}", "report this as a bug in ktc")


def _versions() -> Iterator[Line]:
    yield Line("ktc", f"{ktc.__version__}, Python {platform.python_version()}, {platform.release()}")
    versions = facts.package_versions(_PACKAGES)
    for name, version in versions.items():
        if version is None:
            what = "ktc cannot work without it" if name in _NEEDED else "needed by ktc plan, compile and run"
            yield Line(name, "not installed", f"pip install {name}: {what}")
    yield Line("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version))


def _runtime() -> Iterator[Line]:
    try:
        host = facts.this_host()
    except ImportError as error:
        yield Line("cpu", facts.cpu_model())
        yield Line("runtime", f"the native runtime cannot be loaded: {error}", "reinstall ktc for this Python")
        return
    from ktc.codegen.variants import VARIANTS, runnable

    yield Line("cpu", facts.cpu_model())
    wanted = {f for v in VARIANTS.values() for f in v.required_features}
    yield Line("features", " ".join(sorted(host.features & wanted)) or "none that ktc has kernels for")
    listed = "amx_tile" in facts.proc_features()
    advice = (
        "" if "amx_tile" in host.features or not listed else "AMX kernels will not be used; update kernel or container"
    )
    yield Line("amx", host.amx if listed else "this CPU has none", advice)
    usable = runnable(host.features)
    from ktc.perf import tuning

    known = tuning.load()
    stale = "type: ktc tune" if not known.applied and tuning.tune_path().exists() else ""
    yield Line("kernel choice", str(known), stale)
    yield Line(
        "kernels",
        f"{usable[0]} is the best variant here (of {', '.join(usable)})",
        "" if len(usable) > 1 else "only the portable kernels run here: a CPU with AVX2 is many times faster",
    )


def _topology() -> Iterator[Line]:
    cpus = os.sched_getaffinity(0)
    total, cores = os.cpu_count() or len(cpus), facts.physical_cores(cpus)
    few = f"only {len(cpus)} of {total} CPUs may be used; see taskset or the container's cpuset"
    yield Line(
        "cpus",
        f"{len(cpus)} usable of {total}" + (f", {cores} core{'s' * (cores != 1)}" if cores else ""),
        few if len(cpus) < total else "",
    )
    try:
        nodes = facts.this_host().nodes
    except ImportError:
        return
    shown = "; ".join(f"node {i}: {len(cpus)} CPU{'s' * (len(cpus) != 1)}" for i, cpus in enumerate(nodes))
    yield Line("numa", f"{len(nodes)} node{'s' * (len(nodes) != 1)} ({shown})")
    from ktc.engine.placement import misplaced, trial

    if found := trial(len(nodes)):
        advice = "sockets will read each other's memory: give the container CAP_SYS_NICE, or seccomp rules with mbind"
        yield Line("numa memory", "; ".join(p.line() for p in found), advice if misplaced(found) else "")


def _memory() -> Iterator[Line]:
    total, available = facts.memory()
    advice = "" if available >= _LOW_MEMORY else "a bundle's weights must fit in what is available"
    yield Line("memory", f"{format_bytes(available)} available of {format_bytes(total)}", advice)
    mode = facts.transparent_huge_pages()
    advice = ""
    if mode not in ("always", "madvise"):
        advice = "decoding is up to 1.4x slower without: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield Line("huge pages", mode or "not in this kernel", advice)


def _build() -> Iterator[Line]:
    compiler = facts.find_compiler()
    version = facts.compiler_version(compiler) if compiler else None
    if compiler is None:
        yield Line("compiler", "none", "apt install g++: kernels for this machine are built from source")
    elif version is None:
        yield Line("compiler", f"{compiler} does not run", "apt install g++")
    else:
        yield Line("compiler", f"{version} ({compiler})")


def _cache() -> Iterator[Line]:
    from ktc.codegen.cache import cache_dir

    path = cache_dir()
    if os.access(path, os.W_OK):
        yield Line("cache", f"{path}, {format_bytes(shutil.disk_usage(path).free)} free")
    else:
        yield Line("cache", f"{path}: not writable", "set KTC_CACHE_DIR to a writable directory")


def _disk() -> Iterator[Line]:
    path = Path.cwd()
    free = shutil.disk_usage(path).free
    advice = "" if os.access(path, os.W_OK) else f"{path} cannot be written"
    if not advice and free < _LOW_DISK:
        advice = "little room for a bundle; choose another disk with -o"
    yield Line("disk", f"{path}, {format_bytes(free)} free", advice)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Show what this machine has: CPU, memory, compiler, packages, and what to do about what it lacks."""
    lines = list(examine())
    if as_json:
        fields = [{"name": n.name, "ok": n.ok, "value": n.value, "advice": n.advice} for n in lines]
        click.echo(json.dumps({"lines": fields}, indent=1))
        return
    width = max(len(line.name) for line in lines)
    for line in lines:
        click.echo(f"{'ok  ' if line.ok else 'warn'}  {line.name.ljust(width)}  {line.value}")
        if line.advice:
            click.echo(f"      {' ' * width}  -> {line.advice}")
