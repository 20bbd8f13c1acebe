"""The callback protocol without CUDA: a thread as the stream, recorded work as the graph (fake_cudart.cpp)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktc.layout import QuantScheme
from tests.cuda.conftest import FakeCuda
from tests.runtime.layers import Layer

_runtime = pytest.importorskip("ktc._runtime")

SCHEME = QuantScheme("int8", "channel")
HIDDEN, TOP_K, EXPERTS = 64, 4, 8
FAIL_ON_REQUEST = -12345.0  # act_alpha that makes the reference kernels return an error


class Steps:
    """MoE layers on a lane, with host arrays as device memory: `enqueue` a step, look at `out`."""

    def __init__(self, fake: FakeCuda, lib: Any, *, layers: int = 3, rows: int = 1, alphas: Any = (), **options: Any):
        self.fake, self.rows = fake, rows
        pool = _runtime.Pool([[0, 1]], pin=False)
        self.layers = [
            Layer(EXPERTS, TOP_K, HIDDEN, 64, SCHEME, alpha=dict(alphas).get(i, 0.0), seed=i) for i in range(layers)
        ]
        self.plain = [Layer(EXPERTS, TOP_K, HIDDEN, 64, SCHEME, seed=i) for i in range(layers)]
        moes = [layer.build(lib, pool) for layer in self.layers]
        self.lane = _runtime.CudaLane(moes, fake.path, **options)
        self.stream = fake.stream()
        self.weights_at, self.ids_at, nbytes = _runtime.cuda_send_layout(HIDDEN, TOP_K, rows)
        self.send = [np.zeros(nbytes, np.uint8) for _ in range(layers)]
        self.host = np.zeros(nbytes, np.uint8), np.zeros((rows, HIDDEN), np.float32)
        self.out = [np.full((rows, HIDDEN), np.nan, np.float32) for _ in range(layers)]
        self.calls = {
            decode: [self.lane.bind(i, rows, decode, *(a.ctypes.data for a in self.host)) for i in range(layers)]
            for decode in (False, True)
        }

    def give(self, layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> None:
        send = self.send[layer]
        send[: x.nbytes] = x.reshape(-1).view(np.uint8)
        send[self.weights_at : self.weights_at + weights.nbytes] = weights.reshape(-1).view(np.uint8)
        send[self.ids_at :] = ids.reshape(-1).view(np.uint8)

    def route(self, seed: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        given = [layer.route(self.rows, seed * 17 + i) for i, layer in enumerate(self.plain)]
        for i, one in enumerate(given):
            self.give(i, *one)
        return given

    def enqueue(self, decode: bool = True) -> None:
        for i, call in enumerate(self.calls[decode]):
            self.lane.submit(self.stream, call, self.send[i].ctypes.data)
            self.lane.collect(self.stream, call, self.out[i].ctypes.data)

    def finish(self) -> None:
        self.lane.synchronize(self.stream)
        self.lane.check()

    def want(self, given: Any, deferred: int = 0, skipped: int = 0) -> list[np.ndarray]:
        """Per layer: its own immediate experts and the deferred ones of the layer before (paper, section 4)."""
        out: list[np.ndarray] = []
        late: list[np.ndarray] = []
        for i, (x, ids, weights) in enumerate(given):
            last = i == len(given) - 1
            order = np.argsort(-weights, axis=1, kind="stable")
            ids, weights = np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)
            now = TOP_K - skipped - (0 if last else deferred)
            layer = self.plain[i]
            total = layer.reference(x, ids[:, :now], weights[:, :now])
            if late:
                total = total + late.pop()
            if deferred and not last:
                late.append(layer.reference(x, ids[:, now:], weights[:, now:]))
            out.append(total)
        return out

    def agree(self, given: Any, **split: int) -> None:
        for got, want in zip(self.out, self.want(given, **split), strict=True):
            assert np.linalg.norm(got - want) < 3e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("options", [{}, {"help": True}])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_layer_gets_its_own_sum(fake: FakeCuda, reference_lib: Any, rows: int, options: Any) -> None:
    steps = Steps(fake, reference_lib, rows=rows, **options)
    for seed in range(5):
        given = steps.route(seed)
        steps.enqueue()
        steps.finish()
        steps.agree(given)
    assert steps.lane.stats()["submits"] == steps.lane.stats()["collects"] == 5 * 3


def test_1000_replays_of_one_graph_with_changing_routing(fake: FakeCuda, reference_lib: Any) -> None:
    """The graph holds addresses only: routing, weights, hidden states and the split all change between replays."""
    steps = Steps(fake, reference_lib)
    fake.begin_capture(steps.stream)
    steps.enqueue()
    graph = fake.end_capture(steps.stream)
    assert fake.nodes(graph) == 3 * 4, "a copy and a callback each way, and nothing else"
    for replay in range(1000):
        deferred = replay // 50 % (TOP_K - 1)
        if replay % 50 == 0:
            steps.lane.split([deferred, deferred, 0], [0, 0, 0])
        given = steps.route(replay)
        fake.launch(graph, steps.stream)
        steps.finish()
        if replay % 25 == 0:
            steps.agree(given, deferred=deferred)
    assert steps.lane.stats()["collects"] == 3000 and steps.lane.stats()["errors"] == 0


@pytest.mark.parametrize("deferred", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 2])
def test_r8_deferral_sorts_by_weight(fake: FakeCuda, reference_lib: Any, deferred: int, rows: int) -> None:
    # failure R8: top-k comes back unsorted, so 'the lowest k' are the wrong ones
    steps = Steps(fake, reference_lib, layers=4, rows=rows)
    steps.lane.split([deferred] * 3 + [0], [0] * 4)
    for seed in range(4):
        given = steps.route(seed)
        steps.enqueue()
        steps.finish()
        steps.agree(given, deferred=deferred)


def test_skipping_drops_the_lowest_and_prefill_keeps_all(fake: FakeCuda, reference_lib: Any) -> None:
    steps = Steps(fake, reference_lib)
    steps.lane.split([0] * 3, [2] * 3)
    given = steps.route(1)
    steps.enqueue()
    steps.finish()
    steps.agree(given, skipped=2)
    steps.lane.split([2, 2, 0], [0] * 3)
    steps.enqueue(decode=False)
    steps.finish()
    steps.agree(given)


@pytest.mark.parametrize(
    ("deferred", "skipped", "says"),
    [([1, 1, 1], [0] * 3, "last layer cannot defer"), ([4, 0, 0], [0] * 3, "4 deferred and 0 skipped of 4"),
     ([0], [0], "each of the 3 layers"), ([-1, 0, 0], [0] * 3, "-1 deferred")],
)  # fmt: skip
def test_splits_that_do_not_fit(fake: FakeCuda, reference_lib: Any, deferred: Any, skipped: Any, says: str) -> None:
    steps = Steps(fake, reference_lib)
    with pytest.raises(ValueError, match=says):
        steps.lane.split(deferred, skipped)
    given = steps.route(3)
    steps.enqueue()
    steps.finish()
    steps.agree(given)


@pytest.mark.parametrize("deferred", [0, 2])
def test_m8_a_workers_error_surfaces_after_the_replay(fake: FakeCuda, reference_lib: Any, deferred: int) -> None:
    # failure M8: a worker's fault hung the program
    steps = Steps(fake, reference_lib, alphas={1: FAIL_ON_REQUEST}.items())
    steps.lane.split([deferred, deferred, 0], [0] * 3)
    fake.begin_capture(steps.stream)
    steps.enqueue()
    graph = fake.end_capture(steps.stream)
    for seed in range(20):
        steps.route(seed)
        fake.launch(graph, steps.stream)
        with pytest.raises(RuntimeError, match=r"MoE layer 1: .*does not support"):
            steps.finish()
        assert not steps.out[1].any() and not steps.out[2].any(), "the rest of the step passes zeros on"
        steps.lane.check()  # said once


def test_m8_a_wrong_id_is_an_error_and_the_next_step_works(fake: FakeCuda, reference_lib: Any) -> None:
    # failure M8: and an error does not poison what comes after it
    steps = Steps(fake, reference_lib)
    steps.lane.split([2, 2, 0], [0] * 3)
    for seed in range(10):
        given = steps.route(seed)
        x, ids, weights = given[seed % 3]
        steps.give(seed % 3, x, np.full_like(ids, 77), weights)
        steps.enqueue()
        with pytest.raises(RuntimeError, match=rf"MoE layer {seed % 3}: .*expert 77, there are 8"):
            steps.finish()
        steps.give(seed % 3, x, ids, weights)
        steps.enqueue()
        steps.finish()
        steps.agree(given, deferred=2)


def test_an_abandoned_step_leaves_nothing_behind(fake: FakeCuda, reference_lib: Any) -> None:
    steps = Steps(fake, reference_lib)
    steps.lane.split([2, 2, 0], [0] * 3)
    steps.route(5)
    call = steps.calls[True]
    steps.lane.submit(steps.stream, call[0], steps.send[0].ctypes.data)
    steps.lane.collect(steps.stream, call[0], steps.out[0].ctypes.data)  # layer 0 has deferred; layer 1 never comes
    steps.lane.submit(steps.stream, call[1], steps.send[1].ctypes.data)
    steps.finish()
    given = steps.route(6)
    steps.enqueue()
    steps.finish()
    steps.agree(given, deferred=2)


def test_an_error_of_cuda_names_the_call(fake: FakeCuda, reference_lib: Any) -> None:
    steps = Steps(fake, reference_lib)
    fake.fail_next(700)
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync: an illegal memory access"):
        steps.lane.submit(steps.stream, steps.calls[True][0], steps.send[0].ctypes.data)
    fake.fail_next(1)
    with pytest.raises(RuntimeError, match="cudaLaunchHostFunc"):
        steps.lane.collect(steps.stream, steps.calls[True][0], steps.out[0].ctypes.data)


def test_a_nan_row_stays_in_its_row(fake: FakeCuda, reference_lib: Any) -> None:
    steps = Steps(fake, reference_lib, rows=2)
    steps.lane.split([2, 2, 0], [0] * 3)
    given = steps.route(8)
    x, ids, weights = (a.copy() for a in given[0])
    weights[1] = np.nan
    steps.give(0, x, ids, weights)
    steps.enqueue()
    steps.finish()
    assert np.isfinite(steps.out[0][0]).all() and np.isnan(steps.out[0][1]).any()


def test_no_library_or_a_wrong_one(reference_lib: Any, reference_path: Path, tmp_path: Path) -> None:
    moe = Layer(4, 2, 64, 64, SCHEME).build(reference_lib, _runtime.Pool([[0]], pin=False))
    with pytest.raises(RuntimeError, match="no CUDA runtime"):
        _runtime.CudaLane([moe], str(tmp_path / "libcudart.so.99"))
    with pytest.raises(RuntimeError, match="has no cudaMemcpyAsync"):
        _runtime.CudaLane([moe], str(reference_path))


def test_layers_that_do_not_belong_together(fake: FakeCuda, reference_lib: Any) -> None:
    pool = _runtime.Pool([[0]], pin=False)
    a, b = (Layer(4, 2, hidden, 64, SCHEME).build(reference_lib, pool) for hidden in (64, 128))
    with pytest.raises(ValueError, match="different hidden sizes"):
        _runtime.CudaLane([a, b], fake.path)
    with pytest.raises(ValueError, match="at least one MoE layer"):
        _runtime.CudaLane([], fake.path)
    lane = _runtime.CudaLane([a], fake.path)
    with pytest.raises(ValueError, match="no MoE layer 1"):
        lane.bind(1, 1, True, 8, 8)


# ---- experts that the device computes -------------------------------------------------------------------------------
@pytest.mark.parametrize(("deferred", "skipped"), [(0, 0), (2, 0), (0, 1)])
def test_experts_elsewhere_are_left_out_and_still_count_in_the_order(
    fake: FakeCuda, reference_lib: Any, deferred: int, skipped: int
) -> None:
    steps = Steps(fake, reference_lib)
    calls = [steps.lane.bind(i, 1, True, *(a.ctypes.data for a in steps.host), partial=True) for i in range(3)]
    steps.calls[True] = calls
    steps.lane.split([deferred, deferred, 0], [skipped] * 3)
    rng = np.random.default_rng(5)
    for seed in range(24):
        given = steps.route(seed)
        zeroed = []
        for i, (x, ids, weights) in enumerate(given):
            here = rng.random(ids.shape) < (seed % 4) / 3  # from none to all
            steps.give(i, x, np.where(here, ids, -1), weights)
            zeroed.append((x, ids, weights, here))
        steps.enqueue()
        steps.finish()
        late = None
        for i, (x, ids, weights, here) in enumerate(zeroed):
            order = np.argsort(-weights[0], kind="stable")
            now = TOP_K - skipped - (deferred if i < 2 else 0)
            parts = [order[:now], order[now : TOP_K - skipped]]
            sums = [
                steps.plain[i].reference(x, ids[:, p], np.where(here[:, p], weights[:, p], 0)) if len(p) else 0.0
                for p in parts
            ]
            want = sums[0] + (late if late is not None else 0.0)
            late = sums[1]
            assert np.linalg.norm(steps.out[i] - want) <= 3e-3 * np.linalg.norm(want)


def test_experts_elsewhere_are_for_single_rows(fake: FakeCuda, reference_lib: Any) -> None:
    steps = Steps(fake, reference_lib, rows=2)
    with pytest.raises(ValueError, match="one row"):
        steps.lane.bind(0, 2, True, *(a.ctypes.data for a in steps.host), partial=True)
    given = steps.route(1)
    x, ids, weights = given[0]
    steps.give(0, x, np.full_like(ids, -1), weights)  # not partial: an id like any other wrong one
    steps.enqueue()
    with pytest.raises(RuntimeError, match="expert -1"):
        steps.finish()
