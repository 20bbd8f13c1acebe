"""A tiny stack of real packed experts on an emulated lane, and profiles for it. Nothing here is timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ktc.emulate import EmulatedLane
from ktc.emulate.synthetic import StackOptions, build_stack
from ktc.graph.build import GraphExecutor
from ktc.perf.shapes import parse_shape
from ktc.plan.ir import Plan
from ktc.simulate import Hardware, load_profile
from tests.parity.conftest import best_variant, library

__all__ = ["best_variant", "library"]

LAYERS, TOP_K = 5, 6
SHAPE = parse_shape(f"16x128x64:{TOP_K}")


@pytest.fixture(scope="session")
def kernels(library: Callable[[str], Path], best_variant: str) -> str:
    return str(library(best_variant))


@pytest.fixture(scope="session")
def stack(kernels: str) -> tuple[GraphExecutor, Plan]:
    return build_stack(StackOptions(SHAPE, layers=LAYERS, data_type="int8", threads=2, library=kernels))


@pytest.fixture(scope="session")
def paper() -> Hardware:
    return load_profile("paper-2x8452y-a100")


@pytest.fixture
def lane(stack: tuple[GraphExecutor, Plan], paper: Hardware) -> EmulatedLane:
    graph, plan = stack
    return EmulatedLane(graph, plan, paper)
