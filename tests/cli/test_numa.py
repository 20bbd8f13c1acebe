"""`ktc run` and `ktc doctor` on two NUMA nodes, with and without leave to bind memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forbidden
from tests.two_nodes import SYS_NODES, pretend_two_nodes

ROOT = Path(__file__).parents[2]
KTC = "from ktc.cli.main import main; import sys; main(sys.argv[1:])"
FORBIDDEN = f"from tests.forbidden import MEMORY_POLICY, forbid; forbid(*MEMORY_POLICY); {KTC}"
TEXT = ("-p", "Hello", "--max-tokens", "4", "--greedy")
BOUND = "cannot bind memory to NUMA node"

pytestmark = pytest.mark.skipif(
    SYS_NODES.joinpath("node1").exists(), reason="this machine has two nodes: nothing to pretend"
)


@pytest.fixture
def bundle(compiled: Callable[..., Path]) -> Callable[[int], Path]:
    """`bundle(nodes)`."""
    return lambda nodes: compiled("deepseek_v3", nodes=nodes, tokenizer="byte", moe_intermediate_size=192)


@pytest.fixture
def two_nodes(tmp_path: Path) -> list[str]:
    return pretend_two_nodes(tmp_path / "nodes")


def run(prefix: list[str], code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.parametrize("graph", ["auto", "off"])
def test_m4_memory_binding_is_forbidden(bundle: Callable[[int], Path], two_nodes: list[str], graph: str) -> None:
    """failures.md M4: where mbind and set_mempolicy fail, a warning, the same text, and memory wherever it falls."""
    if not forbidden.works():
        pytest.skip("seccomp is not allowed here")
    done = run(two_nodes, FORBIDDEN, "run", bundle(2), *TEXT, "-v", "--graph", graph)
    assert done.returncode == 0, done.stderr
    for node in (0, 1):
        said = f"degraded: {BOUND} {node}: Operation not permitted; it goes where the reading threads are"
        assert done.stderr.count(said) == 1, done.stderr
    free = run([], KTC, "run", bundle(2), *TEXT, "--graph", graph, "--emulate-nodes")
    assert free.returncode == 0 and done.stdout == free.stdout and done.stdout.strip()
    strict = run(two_nodes, FORBIDDEN, "run", bundle(2), *TEXT, "--strict", "--graph", graph)
    assert strict.returncode != 0 and f"strict: {BOUND} 0" in strict.stderr


@pytest.mark.parametrize("graph", ["auto", "off"])
def test_m4_experts_of_one_node_are_bound_nowhere(
    bundle: Callable[[int], Path], two_nodes: list[str], graph: str
) -> None:
    """failures.md M4: the threads of both nodes read them, and binding that nobody asked for must not be missed."""
    if not forbidden.works():
        pytest.skip("seccomp is not allowed here")
    done = run(two_nodes, FORBIDDEN, "run", bundle(1), *TEXT, "-v", "--graph", graph, "--emulate-nodes")
    assert done.returncode == 0 and BOUND not in done.stderr, done.stderr


def test_m5_weights_in_the_wrong_memory_are_reported(bundle: Callable[[int], Path], two_nodes: list[str]) -> None:
    """failures.md M5: the pages are looked up, not presumed. Here the second node has no memory at all."""
    done = run(two_nodes, KTC, "run", bundle(2), *TEXT, "-v")
    assert done.returncode == 0, done.stderr
    assert f"{BOUND} 0" not in done.stderr and f"degraded: {BOUND} 1: Invalid argument" in done.stderr
    lines = done.stderr.splitlines()
    first, second = (next(line for line in lines if f"of node {n} in its own memory" in line) for n in (0, 1))
    assert first.startswith("  100% of ") and second.startswith("  0% of "), done.stderr
    assert any(line.startswith("  degraded: only 0% of ") and "of node 1" in line for line in lines)
    assert not any("degraded: only" in line and "of node 0" in line for line in lines)


def test_m4_doctor_tries_to_bind(two_nodes: list[str]) -> None:
    """failures.md M4: said before a model is loaded, with what to do about it."""
    done = run(two_nodes, KTC, "doctor")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "numa memory" in line)
    assert line.startswith("warn") and "100% of 4.00 MiB of node 0" in line and "0% of 4.00 MiB of node 1" in line
    assert "CAP_SYS_NICE" in done.stdout


def test_one_node_has_nothing_to_place() -> None:
    done = run([], KTC, "doctor")
    assert done.returncode == 0 and "numa memory" not in done.stdout
