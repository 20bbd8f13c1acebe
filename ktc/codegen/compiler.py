"""Find the C++ compiler and run it, several at a time; failures become BuildError with its own last words."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ktc.errors import BuildError

_LAST_LINES = 20
_GRACE_SECONDS = 1.0  # of a compiler that is told to end: it removes its temporary files
_HINT = "install g++ 11 or newer (Debian: apt install g++) or set CXX"


class Compilers:
    """Compilers at work, which can all be ended at once.

    Each has a process group of its own: a compiler is several processes, and a terminal's Ctrl-C, which would reach
    them in any order, does not.

    Attributes:
        ended: set once `end` was called; nothing is started afterwards.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()

    def run(self, command: Sequence[str], folder: Path) -> tuple[int, str]:
        """Run one to its end, from any thread.

        Returns:
            exit code, and what it wrote to stderr.
        Raises:
            BuildError: `end` was called before.
        """
        with self._lock:
            if self.ended.is_set():
                raise BuildError("interrupted")
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
            self._running.add(process)
        try:
            _, errors = process.communicate()
        except BaseException:
            self.end()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return process.returncode, errors

    def end(self) -> None:
        """End all of them, now. The threads in `run` see a failure."""
        self.ended.set()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and self._alive():
            time.sleep(0.01)
        self._signal(signal.SIGKILL)

    def _alive(self) -> bool:
        with self._lock:
            return any(process.poll() is None for process in self._running)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            for process in self._running:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)


@dataclass(frozen=True)
class Compiler:
    """Attributes: command: words to run; version: first line of --version plus the target, part of build keys."""

    command: tuple[str, ...]
    version: str

    def compile(
        self, source: Path, output: Path, flags: Sequence[str], include: Path, among: Compilers | None = None
    ) -> None:
        """Compile and link `source` into the shared library `output`.

        Args:
            among: those that it is to be ended with.
        Raises:
            BuildError: with the compiler's last lines.
            OSError: the disk is full, by the compiler's own words.
        """
        # Run where the source is, with a relative name: no directory of this machine ends up in the output.
        command = [*self.command, *flags, f"-I{include}", source.name, "-o", str(output)]
        code, said = (among or Compilers()).run(command, source.parent)
        if code != 0 and os.strerror(errno.ENOSPC) in said:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if code != 0:
            errors = [line for line in said.splitlines() if line.strip()]
            shown = "\n  ".join(errors[-_LAST_LINES:]) or f"exit code {code}"
            raise BuildError(
                f"{self.command[0]} could not compile {source.name}:\n  {shown}",
                f"KTC_DEBUG=1 keeps the source; the command was: {shlex.join(command)}",
            )
        if not output.is_file():
            raise BuildError(f"{shlex.join(self.command)} reported success and wrote no library", _HINT)


def find_compiler() -> Compiler:
    """`$CXX`, else g++, c++, clang++. Raises BuildError with a hint when there is none that works."""
    if given := os.environ.get("CXX", "").strip():
        try:
            return _probe(tuple(shlex.split(given)))
        except ValueError as error:
            raise BuildError(f"CXX={given!r} is no command: {error}", _HINT) from error
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return _probe((name,))
    raise BuildError("no C++ compiler was found (looked for g++, c++ and clang++)", _HINT)


@lru_cache
def _probe(command: tuple[str, ...]) -> Compiler:
    words = []
    for question in ("--version", "-dumpmachine"):
        try:
            done = subprocess.run([*command, question], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError, IndexError) as e:
            raise BuildError(f"the C++ compiler {shlex.join(command)!r} does not run: {e}", _HINT) from e
        words.append(done.stdout.splitlines()[0] if done.stdout else "")
    return Compiler(command, " / ".join(words))
