"""The sweep over K and what is reported of it: that figures are there and hang together, not how large they are."""

from __future__ import annotations

import pytest

from ktc.emulate import EmulatedLane, report
from ktc.emulate.sweep import Sweep, SweepOptions, run
from ktc.errors import KtcError
from ktc.simulate.metrics import use
from ktc.simulate.trace import chrome_trace
from tests.emulate.conftest import LAYERS, TOP_K


@pytest.fixture(scope="module")
def sweep(stack: object, paper: object) -> Sweep:
    graph, plan = stack  # type: ignore[misc]
    lane = EmulatedLane(graph, plan, paper)  # type: ignore[arg-type]
    return run(lane, SweepOptions(steps=2, repeats=3, shares=(74.0, 28.0)))


def test_every_k_is_measured_and_simulated(sweep: Sweep) -> None:
    assert [m.deferred for m in sweep.measured] == [r.deferred for r in sweep.simulated] == list(range(TOP_K - 1))
    for m in sweep.measured:
        assert len(m.samples) == 6
        assert 0 < m.layer_seconds < m.token_seconds
        assert 0 < m.layer.cpu <= 1 and 0 < m.cores <= 1
        late = [s for s in m.typical.slices if s.task.kind == "deferred"]
        assert len(late) == (LAYERS - 1 if m.deferred else 0)
        assert use(m.typical.slices, (0.0, m.typical.row.token_seconds)) == m.typical.row.token


def test_the_simulated_machine_is_the_measured_one(sweep: Sweep) -> None:
    """Same device times, the measured time of the experts; so its K = 0 has the shares that were asked for."""
    row = sweep.simulated[0]
    assert row.layer.cpu * row.layer_seconds == pytest.approx(sweep.expert_seconds, rel=1e-6)  # the start is in it
    assert sweep.factor > 0
    assert sweep.hardware.host.submit > 0
    assert 0 <= sweep.hardware.cpu.job + sweep.hardware.cpu.start <= 0.9 * sweep.expert_seconds * (1 + 1e-9)


def test_reports(sweep: Sweep) -> None:
    text = report.render(sweep, "a title")
    rows = [line for line in text.splitlines() if line.strip().lstrip("* ")[:1].isdigit()]
    assert text.startswith("a title\n") and len(rows) == TOP_K - 1
    assert "A100" in text and "2 threads" in text
    cpu = sweep.hardware.cpu
    assert (
        f"{cpu.start * 1e6:.0f} us of them for starting an idle pool; {cpu.job * 1e6:.0f} us more as two jobs" in text
    )
    data = report.to_json(sweep, "a title")
    assert [row["deferred"] for row in data["decode"]] == list(range(TOP_K - 1))
    best = min(data["decode"], key=lambda row: row["measured"]["token_seconds"])
    assert data["best"] == best["deferred"] and (data["job_seconds"], data["start_seconds"]) == (cpu.job, cpu.start)
    base = data["decode"][0]["measured"]["token_seconds"]
    assert data["gain"]["tokens"]["measured"] == pytest.approx(base / best["measured"]["token_seconds"] - 1)
    timelines = report.timelines(sweep)
    assert {f"K = {k}, {how}" for k in {0, best["deferred"]} for how in ("measured", "simulated")} == set(timelines)
    chrome_trace(timelines, report.LANES)  # raises if slices overlap


def test_some_k_only(lane: EmulatedLane) -> None:
    found = run(lane, SweepOptions(deferred=[2], steps=1, repeats=1))
    assert "only K = 0" not in report.render(found, "some")
    assert "only K = 0" in report.render(run(lane, SweepOptions(deferred=[], steps=1, repeats=1)), "none")
    assert [m.deferred for m in found.measured] == [0, 2]
    assert found.factor == 1.0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (SweepOptions(deferred=[TOP_K - 1]), "at least 2 stay immediate"),
        (SweepOptions(deferred=[-1]), "at least 2 stay immediate"),
        (SweepOptions(steps=1000), "do not fit"),
        (SweepOptions(steps=0), "at least 1"),
    ],
)
def test_impossible_sweeps(lane: EmulatedLane, options: SweepOptions, complaint: str) -> None:
    with pytest.raises(KtcError, match=complaint):
        run(lane, options)
