"""Fixtures that every test may use. Kept small: checkpoints are built by tests/tiny.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub: no test needs a network
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a plain shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(family, fmt=..., ...) -> Path`: see tests.tiny.make_tiny. Built once a session; read only."""
    from tests.tiny import make_tiny

    built: dict[str, Path] = {}

    def get(family: str, **options: object) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in built:
            built[key] = make_tiny(family, tmp_path_factory.mktemp(family) / family, **options)  # type: ignore[arg-type]
        return built[key]

    return get


@pytest.fixture(scope="session")
def compile_lib(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(source, name, *flags) -> shared library."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("libs")

    def build(source: Path, name: str, *flags: str) -> Path:
        out = folder / f"{name}.so"
        include = Path(__file__).parents[1] / "runtime" / "include"
        base = [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{include}"]
        subprocess.run([*base, *flags, str(source), "-o", str(out)], check=True)
        return out

    return build
