"""Traces: valid JSON that Perfetto opens, matched begin and end, one thing at a time per lane."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from ktc.errors import DiskError
from ktc.simulate import load_profile, simulate
from ktc.simulate.report import lanes, spans
from ktc.simulate.trace import Span, chrome_trace, write_trace
from tests.simulate.conftest import small_plan


def test_a_step_as_a_trace(tmp_path: Path) -> None:
    sim = simulate(small_plan(), load_profile("h200-spr"))
    path = tmp_path / "trace.json"
    write_trace(path, chrome_trace({f"K = {k}": spans(sim.rows[k]) for k in (0, 3)}, lanes(sim)))
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[1, t] for t in range(1, 6)] == ["device", "link", "host", "cpu0", "cpu1"]
    by_lane = defaultdict(list)
    for e in events:
        if e["ph"] in "BE":
            by_lane[e["pid"], e["tid"]].append(e)
    assert set(by_lane) == set(names)
    for own in by_lane.values():
        times = [e["ts"] for e in own]
        assert times == sorted(times)
        assert [e["ph"] for e in own] == ["B", "E"] * (len(own) // 2)  # never two at once
        assert all(b["name"] == e["name"] for b, e in zip(own[::2], own[1::2], strict=True))
    kinds = defaultdict(set)
    for e in events:
        if e["ph"] == "B":
            kinds[e["pid"], e["args"]["layer"]].add(e["cat"])
    every = {"attention", "copy out", "submit", "immediate", "shared", "sync", "copy back"}
    assert all(every <= kinds[pid, layer] for pid in (1, 2) for layer in (1, 2, 3, 4))
    assert [("deferred" in kinds[2, layer]) for layer in (1, 2, 3, 4)] == [True, True, True, False]
    assert not any("deferred" in kinds[1, layer] for layer in range(5))
    assert max(e["ts"] for e in events if e.get("pid") == 2 and "ts" in e) == pytest.approx(
        sim.rows[3].token_seconds * 1e6
    )


def test_overlapping_spans_are_refused() -> None:
    one, two = Span("x", "one", "k", 0.0, 2.0), Span("x", "two", "k", 1.0, 3.0)
    with pytest.raises(ValueError, match="two begins before"):
        chrome_trace({"p": [one, two]}, ["x"])


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="cannot be written"):
        write_trace(tmp_path / "no" / "trace.json", {})
