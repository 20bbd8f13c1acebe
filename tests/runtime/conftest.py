"""The reference kernel library, compiled once from abi.h, and pools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


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
