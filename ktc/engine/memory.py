"""Whether a bundle fits in memory, asked before anything is read. For the eager and the native engine; no torch."""

from __future__ import annotations

from pathlib import Path

from ktc.errors import KtcError
from ktc.host import CGROUP
from ktc.progress import format_bytes

MEMINFO = Path("/proc/meminfo")


def check_memory(
    needed: int,
    what: str = "the weights need",
    hint: str = "close other programs, or compile with fewer bits per weight",
) -> None:
    """Refuse to start loading what cannot fit, before the kernel kills the process half way.

    Raises:
        KtcError: `needed` bytes are more than the machine can give.
    """
    available = available_memory()
    if available is not None and needed > available:
        raise KtcError(f"{what} {format_bytes(needed)} of memory, {format_bytes(available)} are available", hint)


def available_memory() -> int | None:
    """MemAvailable, or what a container's limit leaves; None where the kernel says neither.

    Of what a container uses only anonymous memory counts: its cached files go when memory is wanted.
    """
    found = [value for value in (_field(MEMINFO, "MemAvailable:", 1024), _container()) if value is not None]
    return min(found) if found else None


def _container() -> int | None:
    try:
        limit = int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no container, or "max"
        return None
    return max(0, limit - (_field(CGROUP / "memory.stat", "anon", 1) or 0))


def _field(file: Path, name: str, unit: int) -> int | None:
    try:
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1]) * unit
    except (OSError, ValueError, IndexError):
        pass
    return None
