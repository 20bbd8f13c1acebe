"""The work directory of a compile that may be killed at any moment and continued.

`<out>.partial/` lies next to the output: `bundle/` is the bundle in the making, `journal.jsonl` says
for which inputs it is made and which of its shards are finished, `lock` keeps a second compile out.
A line of the journal is written after its shard has been synced and renamed, so a listed shard is
whole; it is hashed again before it is trusted. Everything that is not listed is removed and redone.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ktc.errors import KtcError, UsageError
from ktc.pack.writer import FileDigest, disk_error, fsync_dir, hash_file
from ktc.progress import Progress

JOURNAL_VERSION = 1
_ENTRY_KEYS = {"file", "size", "sha256"}


def partial_dir(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def key_of(parts: dict[str, Any]) -> str:
    """Hash of everything that the shards' bytes depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Journal:
    """Opens or starts the work directory of `out`. Use as a context manager: it holds a lock.

    Args:
        out: the bundle to be.
        key: the named parts of the inputs (see `key_of`); a journal of other inputs is refused.
        restart: throw away what an unfinished compile of *other* inputs left.
        say: where a line about a resumed or discarded work directory goes.
    Raises:
        UsageError: the directory belongs to other inputs, or another process works on it.
        DiskError: it cannot be created.
    """

    def __init__(
        self, out: Path, key: dict[str, Any], restart: bool = False, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.root = partial_dir(out)
        self.bundle = self.root / "bundle"
        self.finished: dict[str, FileDigest] = {}
        self.resumed = False
        self._path = self.root / "journal.jsonl"
        self._key, self._say = key, say
        try:
            _make_root(self.root)
            self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(error, self.root) from error
        try:
            self._take_lock()
            self._open(restart)
        except BaseException:
            os.close(self._lock)
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise KtcError(
                    f"another process is writing {self.root}", "wait for it, or choose another -o"
                ) from error
            # a file system without locks: go on unlocked

    def _open(self, restart: bool) -> None:
        lines = self._read()
        if len(lines) > 1:  # without a finished shard (killed while kernels were built) there is nothing to lose
            differs = _differences(lines[0].get("key", {}), self._key)
            if differs and not restart:
                raise UsageError(
                    f"{self.root} holds an unfinished compile with another {' and '.join(differs)}",
                    f"finish that one, choose another -o, or discard it with --force (or rm -r {self.root})",
                )
            if differs:
                self._say(f"discarding the unfinished compile in {self.root}: other {' and '.join(differs)}")
                lines = []
        self._recheck(lines[1:])
        self.resumed = bool(self.finished)
        self._sweep()
        self._rewrite()

    def _read(self) -> list[dict[str, Any]]:
        """The journal's whole lines; a last line cut short by a kill is dropped."""
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise disk_error(error, self._path) from error
        lines: list[dict[str, Any]] = []
        for line in raw.split(b"\n")[:-1]:
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not _is_line(entry):
                break
            lines.append(entry)
        if not lines or lines[0].get("journal") != JOURNAL_VERSION or any("journal" in line for line in lines[1:]):
            return []
        return lines

    def _recheck(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        with Progress("check", sum(int(entry["size"]) for entry in lines), "B") as progress:
            for entry in lines:
                name, path = str(entry["file"]), self.bundle / str(entry["file"])
                expected = FileDigest(int(entry["size"]), str(entry["sha256"]))
                if not path.is_file() or path.is_symlink() or path.stat().st_size != expected.size:
                    self._say(f"redoing {name}: it is missing or of another size")
                elif hash_file(path) != expected:
                    self._say(f"redoing {name}: its bytes have changed")
                else:
                    self.finished[name] = expected
                progress.update(expected.size, name)

    def _sweep(self) -> None:
        """Remove everything in the bundle that no journal line vouches for."""
        if self.bundle.is_symlink() or self.bundle.is_file():
            self.bundle.unlink()
        for folder, dirs, names in os.walk(self.bundle, topdown=False):
            for name in names:
                path = Path(folder, name)
                if path.relative_to(self.bundle).as_posix() not in self.finished:
                    path.unlink()
            for name in dirs:
                path = Path(folder, name)
                if path.is_symlink():
                    path.unlink()
                elif not any(path.iterdir()):
                    path.rmdir()
        self.bundle.mkdir(exist_ok=True)

    def _rewrite(self) -> None:
        tmp = self._path.with_suffix(".tmp")
        header = {"journal": JOURNAL_VERSION, "key": self._key}
        try:
            with tmp.open("w", encoding="utf-8") as file:
                for entry in [header, *(_line(name, digest) for name, digest in self.finished.items())]:
                    file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
            tmp.replace(self._path)
            fsync_dir(self.root)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise disk_error(error, self._path) from error

    def add(self, name: str, digest: FileDigest) -> None:
        """Record a finished shard (`name` relative to the bundle). Call from one thread at a time."""
        if self.finished.get(name) == digest:  # a layer of several shards, made again because one of them was missing
            return
        try:
            self._file.write(json.dumps(_line(name, digest)) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(error, self._path) from error
        self.finished[name] = digest

    def close(self) -> None:
        """Release the lock; what was finished stays for the next run."""
        if not self._file.closed:
            try:
                self._file.close()
            except OSError as error:
                raise disk_error(error, self._path) from error
            finally:
                os.close(self._lock)

    def give_up(self) -> None:
        """After an error: keep finished shards for the next run, unless there are none."""
        if not self.finished:
            self.discard()
            return
        self.close()
        self._say(f"finished shards are kept in {self.root}: the same command continues")

    def discard(self) -> None:
        """Remove the work directory (after the bundle has been moved out, or when nothing is worth keeping)."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_root(root: Path) -> None:
    """Make the work directory, or take over what an earlier compile left. Anything else of that name stays as it is."""
    try:
        root.mkdir(parents=True)
        return
    except FileExistsError:
        pass
    ours = root.is_dir() and not root.is_symlink() and ((root / "lock").is_file() or not any(root.iterdir()))
    if not ours:
        raise UsageError(
            f"{root} exists and is not the work directory of a compile", "remove it, or choose another name with -o"
        )


def _is_line(entry: Any) -> bool:
    """Whether this is what the journal writes: its header, or a finished shard in the bundle."""
    if not isinstance(entry, dict):
        return False
    if "journal" in entry:
        return isinstance(entry.get("key"), dict)
    if not entry.keys() >= _ENTRY_KEYS:
        return False
    name, size, digest = entry["file"], entry["size"], entry["sha256"]
    if not isinstance(name, str) or type(size) is not int or not isinstance(digest, str):
        return False
    return size >= 0 and not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name


def _line(name: str, digest: FileDigest) -> dict[str, Any]:
    return {"file": name, "size": digest.size, "sha256": digest.sha256}


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
