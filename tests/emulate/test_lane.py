"""What an emulated step does, and in which order. How long things take on this machine is nobody's business here."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ktc import _runtime
from ktc.emulate import EmulatedLane, Replay
from ktc.emulate.report import LANES
from ktc.emulate.synthetic import StackOptions, StackWeights
from ktc.errors import KtcError
from ktc.graph.build import GraphExecutor
from ktc.plan.ir import Plan
from ktc.simulate.report import spans
from ktc.simulate.schedule import DEVICE
from ktc.simulate.trace import chrome_trace
from tests.emulate.conftest import LAYERS, SHAPE, TOP_K

PROMPT = np.array([5, 9, 300, 77], np.int64)
Interval = tuple[float, float]


def plain(graph: GraphExecutor, tokens: list[int], deferred: int) -> NDArray[np.float32]:
    """Logits of decoding `tokens` after the prompt, without a lane."""
    graph.set_deferral(deferred)
    graph.step(PROMPT, 0)
    return np.concatenate([graph.step(np.array([t]), len(PROMPT) + i, decode=True) for i, t in enumerate(tokens)])


def replayed(lane: EmulatedLane, deferred: int, token: int = 11) -> Replay:
    lane.graph.step(PROMPT, 0)
    number, _ = lane.record(token, len(PROMPT), deferred)
    return lane.replay(number)


def intervals(replay: Replay, kind: str) -> dict[int, Interval]:
    """Layer -> when a slice of this kind ran."""
    return {s.task.layer: (s.start, s.end) for s in replay.slices if s.task.kind == kind}


@pytest.mark.parametrize("deferred", range(TOP_K - 1))
def test_results_are_those_of_the_plain_run(lane: EmulatedLane, deferred: int) -> None:
    """Bit for bit; a replay in between touches neither caches nor logits, and finds the same experts' outputs."""
    tokens = [11, 4000, 23]
    want = plain(lane.graph, tokens, deferred)
    lane.graph.step(PROMPT, 0)
    for i, token in enumerate(tokens):
        number, logits = lane.record(token, len(PROMPT) + i, deferred)
        kept = logits.copy()
        lane.replay(number)  # raises if an output differs
        lane.replay(0)
        assert np.array_equal(logits, kept)
        assert np.array_equal(logits, want[i])
    assert len({row.tobytes() for row in want}) == 3


def test_deferral_changes_the_result(lane: EmulatedLane) -> None:
    """So that the equalities above mean something."""
    assert not np.array_equal(plain(lane.graph, [11], 0), plain(lane.graph, [11], 3))


@pytest.mark.parametrize("deferred", [0, 1, TOP_K - 2])
def test_deferred_experts_are_collected_one_layer_later(lane: EmulatedLane, deferred: int) -> None:
    replay = replayed(lane, deferred)
    submit, immediate, late, sync = (intervals(replay, k) for k in ("submit", "immediate", "deferred", "sync"))
    layers = list(range(LAYERS))
    assert list(submit) == list(immediate) == list(sync) == layers
    assert list(late) == (layers[:-1] if deferred else []), "the last layer defers none"
    for layer in layers:
        # A job that idle workers ended while the one before it ran its last task has no time of its own.
        assert submit[layer][0] <= immediate[layer][0] <= immediate[layer][1] <= sync[layer][1]
        if layer in late:
            assert immediate[layer][1] <= late[layer][0] <= late[layer][1] <= sync[layer + 1][1]
            assert late[layer][1] <= immediate[layer + 1][0], "the pool works in order of submission"
        if layer:
            assert sync[layer - 1][1] < submit[layer][0]


def test_every_layer_has_its_slices_and_the_device_takes_what_it_was_told(lane: EmulatedLane) -> None:
    replay = replayed(lane, 2)
    want = {
        "attention": [b.before[-1].seconds for b in lane.script.blocks],
        "shared": [b.shared for b in lane.script.blocks],
        "copy out": [b.copy for b in lane.script.blocks],
        "copy back": [b.copy for b in lane.script.blocks],
        "merge": [b.merge for b in lane.script.blocks],
        "head": [lane.script.tail[-1].seconds],
    }
    for kind, seconds in want.items():
        got = [end - start for start, end in intervals(replay, kind).values()]
        assert got == pytest.approx(seconds, abs=3e-9), kind
    assert all(s > 0 for s in want["attention"] + want["shared"])
    trace = chrome_trace({"measured": spans(replay.row)}, LANES)  # raises if slices of a lane overlap
    names = {e["name"] for e in trace["traceEvents"] if e["ph"] == "B"}
    kinds = ("attention", "copy out", "submit", "immediate", "deferred", "shared", "sync", "copy back", "merge")
    missing = {f"L{layer} {kind}" for layer in range(LAYERS) for kind in kinds} - names
    assert missing == {f"L{LAYERS - 1} deferred"}


def test_the_figures_hang_together(lane: EmulatedLane) -> None:
    replay = replayed(lane, 1)
    use = replay.row.layer
    assert use.cpu + use.device - use.both + use.idle == pytest.approx(1)
    assert 0 < replay.cores <= use.cpu + 1e-9
    assert replay.blocks.sum() == pytest.approx(replay.row.token_seconds)
    device = sum(s.task.seconds for s in replay.slices if s.task.lane == DEVICE)
    assert replay.row.token_seconds >= device
    assert (replay.late >= 0).all() and (replay.sync >= 0).all()


def test_a_replay_that_comes_to_other_results_is_an_error(lane: EmulatedLane) -> None:
    number, _ = lane.record(11, 0, 0)
    lane._deferred[number] = 3  # replays another deferral than was recorded
    with pytest.raises(RuntimeError, match=r"layers \[0, 1, 2, 3, 4\] differ"):
        lane.replay(number)


def test_jobs_without_a_timeline_leave_nothing_behind(lane: EmulatedLane) -> None:
    """Whatever is deferred, every block's experts take their time, and steps and replays come to what they did."""
    want = plain(lane.graph, [11], 2)
    lane.graph.step(PROMPT, 0)
    number, _ = lane.record(11, len(PROMPT), 0)
    for deferred in (0, 1, TOP_K - 2, 0):
        times = lane.time_jobs(number, deferred)
        assert times.shape == (LAYERS,) and (times > 0).all()
        lane.replay(number)  # raises if an output differs
    with pytest.raises(KtcError, match="fewer than 2"):
        lane.time_jobs(number, TOP_K - 1)
    with pytest.raises(IndexError, match="not recorded"):
        lane.time_jobs(number + 1, 0)
    assert np.array_equal(plain(lane.graph, [11], 2), want)


def test_refused_steps_leave_the_lane_usable(lane: EmulatedLane) -> None:
    with pytest.raises(IndexError, match="vocabulary"):
        lane.record(1 << 30, 0, 0)
    with pytest.raises(IndexError, match="context full"):
        lane.record(1, lane.graph.context, 0)
    with pytest.raises(KtcError, match="fewer than 2"):
        lane.record(1, 0, TOP_K - 1)
    with pytest.raises(IndexError):
        lane.replay(0)
    assert np.array_equal(plain(lane.graph, [7], 2), plain(lane.graph, [7], 2))
    assert replayed(lane, 2).row.deferred == 2


def test_every_cpu_has_a_worker_and_the_lane_is_none_of_them(stack: tuple[GraphExecutor, Plan]) -> None:
    """The pool of a lane starts as many workers as it has threads; the caller's thread is one more."""
    pool = stack[0].pool
    assert pool.threads == 2 and not pool.caller_works
    names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
    assert {"ktc-0.0", "ktc-0.1"} <= set(names)
    before = len(threading.enumerate()), len(names)
    other = _runtime.Pool([[0, 0, 0]], pin=False)
    assert other.caller_works and len(list(Path("/proc/self/task").iterdir())) == before[1] + 2


def test_a_pool_whose_callers_work_is_refused_and_computes_the_same(
    stack: tuple[GraphExecutor, Plan], lane: EmulatedLane, kernels: str
) -> None:
    graph, plan = stack
    options = StackOptions(SHAPE, layers=LAYERS, data_type="int8", threads=2, library=kernels)
    pool = _runtime.Pool([[0, 0]], pin=False)
    weights = StackWeights(plan, options, _runtime.KernelLib(kernels), pool)
    other = GraphExecutor(graph.program, weights, pool, context=64, chunk=16)
    with pytest.raises(ValueError, match="callers work"):
        EmulatedLane(other, plan, lane.hardware)
    assert np.array_equal(plain(other, [3, 4], 2), plain(graph, [3, 4], 2))
