"""What this machine has: the facts that verdicts and `ktc doctor` rest on. Reads, judges nothing.

Everything is asked of the kernel, of the native runtime or of the environment, at the moment of the
call and without importing torch. A fact that cannot be had is None, never a guess.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Host:
    """What a verdict needs to know of a machine.

    Attributes:
        features: CPU features that CPU and kernel let a process use, named as in /proc/cpuinfo; the AMX ones
            only if the kernel granted tile state to this process.
        amx: why AMX can or cannot be used, in words.
        nodes: CPUs of this process on each NUMA node that has any.
        compiler: path of a C++ compiler, or None.
        cuda: whether an NVIDIA device is visible.
    """

    features: frozenset[str]
    amx: str
    nodes: tuple[tuple[int, ...], ...]
    compiler: str | None
    cuda: bool


def peak_rss() -> int | None:
    """Most bytes that this process has had resident. `getrusage` will not do: a process that a large one started
    inherits its peak."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM:")), None)


def this_host() -> Host:
    """The machine this process runs on."""
    from ktc import _runtime

    features = set(_runtime.cpu_features())
    granted, reason = _runtime.amx_permission()
    if not granted:
        features -= {f for f in features if f.startswith("amx")}
    nodes = tuple(tuple(cpus) for cpus in _runtime.numa_nodes())
    return Host(frozenset(features), reason, nodes, find_compiler(), Path("/dev/nvidiactl").exists())


def find_compiler() -> str | None:
    """The C++ compiler that kernel builds would use."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name.split()[0])):
            return path
    return None


def compiler_version(path: str) -> str | None:
    """First line of `--version`, or None if the compiler cannot be run."""
    try:
        out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.splitlines()[0].strip() if out.stdout else None


def cpu_model() -> str:
    """The marketing name, for people."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def proc_features() -> set[str]:
    """What /proc/cpuinfo lists, whether or not a process may use it."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def transparent_huge_pages() -> str | None:
    """ "always", "madvise" or "never"; None where the kernel has none."""
    text = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return text.partition("[")[2].partition("]")[0] or None


def memory() -> tuple[int, int]:
    """(total, available) bytes, a container's limit included."""
    values = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        if rest.strip().endswith("kB"):
            values[name] = int(rest.split()[0]) * 1024
    total, available = values.get("MemTotal", 0), values.get("MemAvailable", 0)
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is not None and limit < total:
        total = limit
        available = min(available, max(0, limit - (used or 0)))
    return total, available


def physical_cores(cpus: set[int]) -> int | None:
    """Distinct cores among logical CPUs, or None if the kernel does not say."""
    cores = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        core, package = _read(topology / "core_id").strip(), _read(topology / "physical_package_id").strip()
        if not core:
            return None
        cores.add((package, core))
    return len(cores)


def package_versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions, without importing the packages."""
    from importlib import metadata

    out: dict[str, str | None] = {}
    for name in names:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = None
    return out


def git_revision(root: Path = _ROOT) -> str | None:
    """The commit of the source checkout that ktc runs from, with "-dirty" if tracked files were changed.

    None where ktc is installed, and where git is not or does not answer.
    """
    if not (root / ".git").exists() or shutil.which("git") is None:  # not that of a project around a site-packages
        return None
    describe = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            [*describe, "--dirty"], capture_output=True, text=True, timeout=20, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
