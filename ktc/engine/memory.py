"""Memory for a bundle's weights: whether they fit, asked before anything is read; then allocated and filled. And
tables that take none.

For the eager and the native engine; no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ktc.errors import BundleError, KtcError
from ktc.host import CGROUP
from ktc.progress import format_bytes

MEMINFO = Path("/proc/meminfo")
_WHOLE = "ktc verify says whether the bundle is whole"


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


def huge_bytes(buffers: Iterable[Any]) -> int:
    """Bytes of weights that the kernel really keeps in huge pages. Whole pages are counted there, so a buffer's last
    one is more than its weights."""
    return sum(min(int(b.huge_bytes()), int(b.nbytes)) for b in buffers)


def weight_buffer(nbytes: int, node: int, file: Path) -> Any:
    """A `_runtime.HugeBuffer` for the weights of a file.

    Raises:
        KtcError: the kernel gives no memory.
    """
    from ktc import _runtime

    try:
        return _runtime.HugeBuffer(nbytes, node)
    except (MemoryError, RuntimeError) as error:
        raise KtcError(
            f"no memory for {format_bytes(nbytes)} of weights ({file.name}): {error}",
            "close other programs, or compile with fewer bits per weight",
        ) from error


def read_weights(buffer: Any, file: Path, offset: int, nbytes: int, at: int, pool: Any) -> None:
    """`buffer.read_file` by the pool's threads.

    Raises:
        BundleError: the file is too short, or cannot be read.
    """
    try:
        buffer.read_file(os.fsencode(file), offset, nbytes, at, pool)
    except RuntimeError as error:
        raise BundleError(f"cannot read weights: {error}", _WHOLE) from error


def open_table(file: Path, tensor: str, offset: int, dtype: str, rows: int, cols: int) -> Any:
    """A `_runtime.TableFile`: a table that stays in its file, open as long as the object lives.

    Raises:
        BundleError: the file is too short, or cannot be opened.
    """
    from ktc import _runtime

    try:
        return _runtime.TableFile(os.fsencode(file), tensor, offset, dtype, rows, cols)
    except RuntimeError as error:
        raise BundleError(f"cannot read weights: {error}", _WHOLE) from error


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
