"""The private kernel cache and the list of libraries that were built on this machine.

Layout: `<cache>/<key>/{libktc_experts.so, build.json, kernels.cpp}` and `<cache>/trust.json`. Everything is written to
a temporary name and renamed; directories are private to the user. A library is trusted here only because its sha256
is in trust.json, which nothing but a build on this machine writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ktc.errors import BuildError, DiskError
from ktc.paths import home


def cache_dir() -> Path:
    """`$KTC_CACHE_DIR/kernels`, else `$XDG_CACHE_HOME/ktc/kernels`, else `~/.cache/ktc/kernels`; created, mode 0700.

    Raises:
        DiskError: it cannot be created, or somebody else could put libraries into it.
    """
    if root := os.environ.get("KTC_CACHE_DIR"):
        base = Path(root)
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "ktc"
    path = base.absolute() / "kernels"  # compilers run elsewhere
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.stat()
    except OSError as e:
        raise DiskError(
            f"the kernel cache {path} cannot be created: {e.strerror}", "set KTC_CACHE_DIR to a writable directory"
        ) from e
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise DiskError(
            f"the kernel cache {path} is not private: another user could put a library into it",
            f"chmod go-w {path}, or set KTC_CACHE_DIR to a directory of your own",
        )
    return path


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write `path` so that a reader sees the old bytes or the new ones, never a part. Raises DiskError."""
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
            temporary = Path(f.name)
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        if temporary:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise DiskError(f"writing {path} failed: {e.strerror}") from e


@contextlib.contextmanager
def lock(path: Path, given_up: threading.Event | None = None) -> Iterator[None]:
    """An exclusive advisory lock on `path` (created if missing), held across processes and threads.

    Args:
        given_up: once set, nobody waits any longer.
    Raises:
        DiskError: it cannot be opened. BuildError: given up.
    """
    try:
        f = path.open("a")
    except OSError as e:
        raise DiskError(f"the lock {path} cannot be opened: {e.strerror}") from e
    with f:
        if given_up is None:
            fcntl.flock(f, fcntl.LOCK_EX)
        else:
            _poll(f, given_up)
        yield


def _poll(file: IO[str], given_up: threading.Event) -> None:
    """Lock as soon as it is free: a thread that sleeps in flock cannot be told to stop."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if given_up.wait(0.05):
                raise BuildError("interrupted") from None


def record_trust(sha256: str, note: dict[str, Any]) -> None:
    """Remember that the library with this hash was built here. `note` says what it is; it is not checked."""
    path = cache_dir() / "trust.json"
    with lock(path.with_suffix(".lock")):
        entries = _read_trust(path)
        if entries.get(sha256) != note:
            entries[sha256] = note
            write_atomic(path, json.dumps(entries, indent=1, sort_keys=True).encode())


def built_here(sha256: str) -> bool:
    """Was the library with this hash built on this machine by this user?"""
    return sha256 in _read_trust(cache_dir() / "trust.json")


def _read_trust(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise BuildError(f"the trust store {path} is unreadable: {e}", "delete it; kernels are then built again") from e
    if not isinstance(entries, dict):
        raise BuildError(f"the trust store {path} is not a JSON object", "delete it; kernels are then built again")
    return entries
