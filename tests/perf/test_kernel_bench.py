"""`ktc bench kernels` and `ktc tune` on tiny shapes: what they print, not how fast anything is."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ktc.cli.main import cli
from ktc.errors import KtcError, UsageError
from ktc.layout import QuantScheme
from ktc.perf import breakdown, crossover, kernel_bench, report
from ktc.perf.dense_experts import random_experts, reference, relative_error
from ktc.perf.experts import KtcExperts, KtcWeights, kernel_library, layers_for, specs_for_shape
from ktc.perf.figures import Report, Row
from ktc.perf.routing import draw, even_rows
from ktc.perf.shapes import SCHEMES, parse_shape

SHAPE = parse_shape("4x128x128:2")
QUICK = {"seconds": 0.0, "min_rounds": 1, "working_set": 1, "probe_bytes": 2 << 20}


@pytest.fixture(scope="module")
def measured() -> Report:
    options = kernel_bench.Options([SHAPE], [1, 9], peers=("grouped_mm", "int4pack", "int8pack"), threads=1, **QUICK)
    return kernel_bench.run(options)


def test_every_contestant_has_a_row_at_every_token_count(measured: Report) -> None:
    names = ["ktc int4", "ktc int8", "ktc bf16", "torch bf16 grouped_mm", "torch int4pack g128", "torch int8pack"]
    assert [(r.tokens, r.name) for r in measured.rows] == [(t, n) for t in (1, 9) for n in names]
    assert measured.skipped == []
    for row in measured.rows:
        assert row.ms_p10 <= row.ms <= row.ms_p90 and row.calls >= 1
        assert row.x_floor == pytest.approx(row.ms / row.floor_ms)
        assert row.percent == pytest.approx(100 / row.x_floor)
        assert row.active == 2 if row.tokens == 1 else 2 <= row.active <= 4
        assert row.vs_torch is not None and row.bound in ("memory", "compute")
    assert all(r.vs_torch == 1.0 for r in measured.rows if r.name == "torch bf16 grouped_mm")


def test_errors_are_those_of_the_formats(measured: Report) -> None:
    """Both ktc and the peers compute the right thing; the bounds are far from a wrong layout and from noise."""
    errors = {r.name: r.error for r in measured.rows}
    bounds = {
        "ktc int4": 0.25, "ktc int8": 0.05, "ktc bf16": 0.01, "torch bf16 grouped_mm": 0.02,
        "torch int4pack g128": 0.35, "torch int8pack": 0.05,
    }  # fmt: skip
    for name, bound in bounds.items():
        error = errors[name]
        assert error is not None and 0 < error < bound, (name, error)


def test_table_csv_and_json_have_the_schema(measured: Report) -> None:
    text = report.render(measured, "md")
    assert "### 4x128x128:2" in text and "limits in this run: dram_huge" in text and "| ktc int4 " in text
    assert report._short(368.4) == "368" and report._short(0.254) == "0.25"
    rows = list(csv.DictReader(io.StringIO(report.render(measured, "csv"))))
    assert len(rows) == 12 and set(rows[0]) == set(Row.__dataclass_fields__)
    data = json.loads(report.render(measured, "json"))
    assert data["schema"] == "ktc-bench-kernels/1" and len(data["rows"]) == 12
    assert data["limits"]["4x128x128:2"]["rates"]["dram_huge"]["1"]["high"] > 0
    own = data["about"]["contestants"]["4x128x128:2: ktc int4"]
    assert own["scheme"] == "int4-g16c" and sum(own["kernels"].values()) > 0
    assert {"cpu", "threads", "variant", "tuning", "load"} <= set(data["about"])


def test_a_plot_is_a_png(measured: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ktc.perf.plot import plot

    plot(measured, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KtcError, match="cannot be written"):
        plot(measured, tmp_path / "bench.nonsense")


def test_breakdown_has_the_papers_steps_and_the_kernel_choice() -> None:
    options = kernel_bench.Options([SHAPE], [1, 70], formats=["int4"], threads=2, **QUICK)
    found = breakdown.run(options, emulate_nodes=2)
    tables = {(r.table, r.tokens, r.loads) for r in found.rows}
    assert {("step", 1, "even"), ("step", 70, "even"), ("step", 70, "uneven")} <= tables
    steps = [r.step for r in found.rows if (r.table, r.tokens) == ("step", 1)]
    assert steps in (["v", "m", "d", "n"], ["v", "d", "n"])  # no step m without tile kernels
    first = next(r for r in found.rows if r.table == "step")
    assert (first.scheduling, first.numa, first.speedup) == ("static", "off", 1.0)
    assert any("emulated nodes" in note for note in found.notes)
    data = json.loads(report.render_breakdown(found, "json"))
    assert data["schema"] == "ktc-bench-breakdown/1" and len(data["rows"]) == len(found.rows)
    assert "### Steps of the paper" in report.render_breakdown(found, "md")


@pytest.mark.parametrize(
    ("labels", "steps", "noted"),
    [({"avx512", "amx"}, "vmdn", False), ({"avx512"}, "vdn", True), ({"scalar"}, "vdn", True)],
)
def test_steps_follow_what_the_library_has(labels: set[str], steps: str, noted: bool) -> None:
    chosen, notes = breakdown.steps_for(labels)
    assert "".join(s.step for s in chosen if s.table == "step") == steps
    assert bool(notes) == noted


def test_node_slices_and_copies_give_the_same_result() -> None:
    """Weights split over emulated nodes and replicated into other layers compute what one node computes."""
    from ktc.engine.pool import get_pool

    dense = random_experts(SHAPE)
    x = np.random.default_rng(0).standard_normal((5, SHAPE.hidden), dtype=np.float32)
    route = draw(np.random.default_rng(1), SHAPE, 5)
    expected = reference(dense, x, route)
    lib = kernel_library(specs_for_shape(SHAPE, QuantScheme("fp32"), 2), "portable")
    contestant = KtcExperts(KtcWeights(SHAPE, QuantScheme("fp32"), 2, dense, 2), lib, get_pool([[0], [0]]))
    for layer in range(2):
        contestant.prepare(layer, x, route)()
        assert relative_error(contestant.output(), expected) < 1e-5


def test_min_rows_decide_which_kernel_runs() -> None:
    """What `ktc tune` stores is obeyed by the native choice; the longest prefix wins."""
    from ktc.engine.pool import get_pool

    scheme = SCHEMES["int8"]
    lib = kernel_library(specs_for_shape(SHAPE, scheme), "emulated")
    weights = KtcWeights(SHAPE, scheme, 1, random_experts(SHAPE), 1)
    x = np.random.default_rng(0).standard_normal((8, SHAPE.hidden), dtype=np.float32)

    def used(min_rows: dict[str, int], rows: int) -> set[str]:
        contestant = KtcExperts(weights, lib, get_pool([[0]]), min_rows=min_rows)
        contestant.prepare(0, x[:rows], even_rows(SHAPE, rows))()
        return {name.partition(":")[0] for name in contestant.about()["kernels"]}

    assert used({}, 1) == {"scalar"} and used({}, 8) == {"emul"}
    assert used({"emul": 1}, 1) == {"emul"}
    assert used({"emul": 100}, 8) == {"scalar"}
    assert used({"emul": 100, "emul:int8": 1}, 1) == {"emul"}
    assert used({"emul:int4": 100}, 8) == {"emul"}  # another format's


def test_crossover_measures_each_row_count() -> None:
    found = crossover.measure(
        ["int8"], SHAPE, rows=[1, 8], seconds=0.0, threads=1, variant="emulated", working_set=1, min_rounds=1
    )
    assert len(found) == 1 and found[0].prefix == "emul:int8" and found[0].vector == "scalar"
    assert len(found[0].vector_ms) == len(found[0].tile_ms) == 2 and min(*found[0].vector_ms, *found[0].tile_ms) > 0
    assert found[0].min_rows in (1, 8, crossover.NEVER)


def test_one_kind_of_kernel_leaves_nothing_to_tune() -> None:
    assert crossover.measure(["int8"], SHAPE, rows=[1], threads=1, variant="portable", working_set=1) == []


def test_the_command_prints_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTC_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr("ktc.perf.limits.probe_bytes", lambda: 2 << 20)
    monkeypatch.setattr("ktc.perf.experts._MAX_LAYERS", 1)
    arguments = ["bench", "kernels", "--shape", "4x128x128:2", "--tokens", "1", "--format", "int8,int8"]
    arguments += ["--peers", "none", "--seconds", "0", "--threads", "1", "--save", str(tmp_path / "out.json")]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and result.output.count("| ktc int8") == 1  # named twice, measured once
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["name"] == "ktc int8"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "positive numbers"),
        (["--tokens", "many"], "positive numbers"),
        (["--shape", "nothing"], "unknown shape"),
        (["--shape", "4x128x128:2", "--format", "int3"], "unknown format 'int3'"),
        (["--shape", "4x128x128:2", "--peers", "jax"], "unknown peer 'jax'"),
        (["--shape", "4x128x128:2", "--format", "none", "--peers", "none", "--tokens", "1"], "nothing to measure"),
        (["--breakdown", "--plot", "x.png"], "not the breakdown"),
        (["--breakdown", "--peers", "none"], "--peers is not for --breakdown"),
        (["--breakdown", "--format", "int4,int8"], "one format"),
        (["--shape", "4x128x128:2", "--tokens", "1", "--format", "int8", "--kernel", "foo"], "--kernel foo: the "),
    ],
)
def test_bad_options_are_one_clear_error(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "kernels", *arguments])
    assert isinstance(result.exception, KtcError) and message in str(result.exception)


@pytest.mark.parametrize("command", [["bench", "kernels"], ["tune", "--dry-run"]])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_numbers_are_finite(command: list[str], value: str) -> None:
    result = CliRunner().invoke(cli, [*command, "--seconds", value])
    assert result.exit_code == 2 and "--seconds" in result.output


def test_peers_that_cannot_take_a_shape_are_skipped_by_name() -> None:
    """int8pack reads past its operands there and may end the process."""
    peers = ("grouped_mm", "int4pack", "int8pack")
    options = kernel_bench.Options([parse_shape("3x100x52:3")], [1], peers=peers, formats=["bf16"], threads=1, **QUICK)
    report = kernel_bench.run(options)
    assert {row.name for row in report.rows} == {"ktc bf16"} and len(report.skipped) == 3
    assert all("multiples of" in reason for reason in report.skipped)


def test_an_expert_too_small_for_the_nodes_is_one_clear_error() -> None:
    options = kernel_bench.Options([parse_shape("4x128x64:2")], [1], threads=1, **QUICK)
    with pytest.raises(UsageError, match=r"4x128x64:2: intermediate size 64 .* cannot be split over 2 nodes"):
        breakdown.run(options, emulate_nodes=2)


def test_layers_make_the_working_set_larger_than_the_cache() -> None:
    assert layers_for(100, 1000) == 10 and layers_for(1000, 100) == 1
    assert layers_for(1) == 64  # a toy shape is not worth thousands of buffers
