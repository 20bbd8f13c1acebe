"""Find the C++ compiler and run it; its failures become BuildError with its own last words."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ktc.errors import BuildError

_LAST_LINES = 20
_HINT = "install g++ 11 or newer (Debian: apt install g++) or set CXX"


@dataclass(frozen=True)
class Compiler:
    """Attributes: command: words to run; version: first line of --version plus the target, part of build keys."""

    command: tuple[str, ...]
    version: str

    def compile(self, source: Path, output: Path, flags: Sequence[str], include: Path) -> None:
        """Compile and link `source` into the shared library `output`.

        Raises:
            BuildError: with the compiler's last lines.
        """
        # Run where the source is, with a relative name: no directory of this machine ends up in the output.
        command = [*self.command, *flags, f"-I{include}", source.name, "-o", str(output)]
        done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.strip()]
            shown = "\n  ".join(errors[-_LAST_LINES:]) or f"exit code {done.returncode}"
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
