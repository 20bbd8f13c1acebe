"""`ktc bench emulate`, and bundles on the emulated device: same text as the plain run, traces, clear complaints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ktc.cli.main import cli
from ktc.emulate.synthetic import StackOptions, config, recipe_text
from ktc.errors import KtcError
from ktc.perf.shapes import SCHEMES, MoeShape
from ktc.plan import build_plan
from ktc.recipe import parse_recipe
from ktc.simulate import load_profile
from tests.parity.conftest import bundle, checkpoint, folder

__all__ = ["bundle", "checkpoint", "folder"]

PROFILE = "paper-2x8452y-a100"
CPU_ONLY = """version: 1
cpu: {sockets: 1, cores_per_socket: 2, dram_local_gbs: 25, peak_tflops: {avx512: 1},
      kernels: {ktc: {dram_fraction: 0.8, compute_fraction: 0.3}}}
device: {kind: cpu}
"""


def ktc(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=True)


@pytest.fixture(scope="module")
def tiny(bundle: Callable[..., Path]) -> Path:
    return bundle("deepseek_v3_yarn", "int8")


def kinds(trace: Path) -> set[str]:
    return {e["name"].partition(" ")[2] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "B"}


def test_bench_emulate(kernels: str, tmp_path: Path) -> None:
    trace, saved = tmp_path / "trace.json", tmp_path / "measured.yaml"
    small = ("--layers", 3, "--experts", 8, "--hidden", 128, "--intermediate", 64, "--top-k", 4, "--format", "int8")
    quick = ("--steps", 1, "--repeats", 1, "--shares", "74:28", "--threads", 2, "--kernel-library", kernels)
    result = ktc("bench", "emulate", *small, *quick, "--json", "--trace", trace, "--save-profile", saved)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [row["deferred"] for row in data["decode"]] == [0, 1, 2]
    assert {"submit", "immediate", "attention", "shared", "sync", "copy out", "copy back", "merge"} <= kinds(trace)
    assert load_profile(saved).host.submit == pytest.approx(data["submit_seconds"])
    assert load_profile(saved).cpu.job == pytest.approx(data["job_seconds"])


@pytest.mark.parametrize("data_type", ["int4", "int8", "bf16"])
def test_the_stack_is_planned_in_the_format_that_is_packed(data_type: str) -> None:
    """Kernels are built for the plan and fed with what `SCHEMES` packs: the two must be one scheme."""
    options = StackOptions(MoeShape("x", 8, 128, 64, 4), layers=3, data_type=data_type)
    plan = build_plan(config(options), parse_recipe(recipe_text(data_type), "<emulate>"))
    assert {m.moe.scheme for m in plan.moe_modules() if m.moe is not None} == {SCHEMES[data_type]}


def test_bench_emulate_in_its_default_format() -> None:
    small = ("--layers", 3, "--experts", 4, "--hidden", 64, "--intermediate", 64, "--top-k", 2, "--variant", "portable")
    result = ktc("bench", "emulate", *small, "--steps", 1, "--repeats", 1, "--threads", 2, "--json")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("deferred", [0, None])
def test_run_gives_the_plain_text_and_a_trace(tiny: Path, kernels: str, tmp_path: Path, deferred: int | None) -> None:
    trace = tmp_path / "trace.json"
    common = ("run", tiny, "-p", "abc", "--max-tokens", 6, "--greedy", "--kernel-library", kernels, "--threads", 2)
    if deferred is not None:
        common += ("--deferred", deferred)
    plain = ktc(*common)
    emulated = ktc(*common, "--device", f"emulate:{PROFILE}", "--trace", trace)
    assert plain.exit_code == emulated.exit_code == 0, emulated.output
    assert emulated.stdout == plain.stdout
    assert f"emulated {PROFILE}, K = 0:" in emulated.stderr and "tokens/s" in emulated.stderr
    assert {"submit", "immediate", "attention", "shared", "sync"} <= kinds(trace)


def test_bench_of_a_bundle(tiny: Path, kernels: str) -> None:
    arguments = ("--device", f"emulate:{PROFILE}", "--kernel-library", kernels, "--threads", 2)
    result = ktc("bench", tiny, *arguments, "--steps", 2, "--repeats", 1, "--json")
    assert result.exit_code == 0, result.output
    assert [row["deferred"] for row in json.loads(result.stdout)["decode"]] == [0]  # top 2: none may wait


def refused(*arguments: object) -> str:
    result = ktc(*arguments)
    assert isinstance(result.exception, KtcError | SystemExit), result.exception
    assert result.exit_code != 0
    return f"{result.exception}{result.output}"


def test_bad_devices_are_said_before_anything_is_read(tiny: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.yaml"
    alone.write_text(CPU_ONLY)
    broken = tmp_path / "broken.yaml"
    broken.write_text(CPU_ONLY.replace("dram_local_gbs: 25", "dram_local_gbs: fast"))
    for command in (("bench", tiny), ("run", tiny, "-p", "abc")):
        assert "not emulate:PROFILE" in refused(*command, "--device", "cuda:0")
        assert "shipped profiles" in refused(*command, "--device", "emulate:h200")
        assert "no device of its own" in refused(*command, "--device", f"emulate:{alone}")
        assert "broken.yaml:2:" in refused(*command, "--device", f"emulate:{broken}")
    assert "no device of its own" in refused("bench", "emulate", "--profile", alone)
    run = ("run", tiny, "-p", "abc", "--device", f"emulate:{PROFILE}")
    assert "--graph off" in refused(*run, "--graph", "off")
    assert "--skip" in refused(*run, "--skip", 1)
    assert "--trace needs" in refused("run", tiny, "-p", "abc", "--trace", tmp_path / "t.json")


def test_bad_measurements(kernels: str) -> None:
    small = ("bench", "emulate", "--layers", 3, "--experts", 8, "--hidden", 128, "--intermediate", 64, "--top-k", 4)
    small += ("--kernel-library", kernels)
    assert "not CPU:DEVICE" in refused(*small, "--shares", "74")
    assert "not a list of numbers" in refused(*small, "--deferred", "two")
    assert "unknown format" in refused(*small, "--format", "int3")
    assert "--top-k 9: a layer has 8 experts" in refused(*small, "--top-k", 9)
    assert "names no hardware profile" in refused("bench", "emulate", "--profile", "")
    assert "GB of memory are free" in refused(*small, "--layers", 100000, "--hidden", 8192, "--intermediate", 8192)
