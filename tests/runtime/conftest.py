"""The reference kernel library, compiled once from abi.h, and pools."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def compile_lib(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(source, name, *flags) -> shared library."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("libs")

    def build(source: Path, name: str, *flags: str) -> Path:
        out = folder / f"{name}.so"
        include = ROOT / "runtime" / "include"
        base = [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{include}"]
        subprocess.run([*base, *flags, str(source), "-o", str(out)], check=True)
        return out

    return build


@pytest.fixture(scope="session")
def reference_path(compile_lib: Callable[..., Path]) -> Path:
    return compile_lib(Path(__file__).with_name("reference_lib.cpp"), "reference")


@pytest.fixture(scope="session")
def reference_lib(reference_path: Path) -> Any:
    runtime = pytest.importorskip("ktc._runtime")
    return runtime.KernelLib(str(reference_path))


@pytest.fixture(scope="session")
def pool() -> Any:
    runtime = pytest.importorskip("ktc._runtime")
    return runtime.Pool([[0, 1]], pin=False)
