"""What a job takes by itself: the line through synthetic times, and calls that are really made with fewer experts."""

from __future__ import annotations

import numpy as np
import pytest

from ktc.perf.dense_experts import random_experts, reference
from ktc.perf.experts import KtcExperts, KtcWeights, kernel_library, specs_for_shape
from ktc.perf.jobs import fit, time_by_experts
from ktc.perf.routing import Dealer, Routing
from ktc.perf.shapes import SCHEMES, parse_shape

SHAPE = parse_shape("8x128x64:3")


def test_times_on_a_line_give_it_back() -> None:
    line = fit([35e-6 + 100e-6 * k for k in range(1, 7)])
    assert line.job == pytest.approx(35e-6) and line.expert == pytest.approx(100e-6)
    assert line.seconds(6) == pytest.approx(635e-6)


def test_least_squares_by_hand() -> None:
    """Through (1, 2), (2, 3), (3, 5): slope 3/2, intercept 1/3."""
    line = fit([2.0, 3.0, 5.0])
    assert line.expert == pytest.approx(1.5) and line.job == pytest.approx(1 / 3)


def test_a_job_takes_no_negative_time() -> None:
    """Through (1, 1), (2, 3): the line through the origin is 7/5 steep."""
    line = fit([1.0, 3.0])
    assert line.job == 0 and line.expert == pytest.approx(1.4)


def test_an_expert_is_not_read_faster_than_memory_gives_it() -> None:
    """Flat times are the job's, less what the bytes must take; the mean time stays."""
    line = fit([10.0, 10.0, 10.0], least=2.0)
    assert (line.expert, line.job) == (2.0, pytest.approx(6.0))
    falling = fit([3.0, 2.0, 1.0], least=2.0)
    assert (falling.expert, falling.job) == (2.0, 0.0)


def test_a_job_that_is_known_leaves_the_slope() -> None:
    line = fit([35.0, 65.0], job=5.0)
    assert (line.job, line.expert) == (5.0, pytest.approx(30.0))
    assert fit([7.0]).seconds(1) == 7.0 and fit([7.0]).job == 0  # one figure cannot be divided


def test_contestants_over_the_same_weights_are_dealt_one_deck() -> None:
    """Calls with 1, 2 and 3 experts in turns use every expert of a layer once before any is used again."""
    dealer = Dealer(np.random.default_rng(0), layers=2, experts=6)
    used: dict[int, list[int]] = {0: [], 1: []}
    for k in (1, 1, 2, 2, 3, 3):
        layer, routing = dealer.deal(Routing(np.arange(k)[None, :], np.ones((1, k), np.float32)))
        used[layer] += routing.ids[0].tolist()
    assert all(sorted(ids) == list(range(6)) for ids in used.values())


def test_calls_with_fewer_experts_compute_those() -> None:
    from ktc.engine.pool import get_pool
    from ktc.perf.limits import default_cpus

    scheme = SCHEMES["bf16"]
    dense = random_experts(SHAPE, distinct=1)
    pool = get_pool([default_cpus(1)])
    weights = KtcWeights(SHAPE, scheme, 1, dense, layers=2)
    made = KtcExperts(weights, kernel_library(specs_for_shape(SHAPE, scheme)), pool)
    x = np.random.default_rng(1).standard_normal((1, SHAPE.hidden), dtype=np.float32)
    for k in (1, 2, 3):
        fewer = made.with_top_k(k)
        routing = Routing(np.arange(k, dtype=np.int64)[None, :], np.full((1, k), 0.5, np.float32))
        fewer.prepare(1, x, routing)()
        assert fewer.output() == pytest.approx(reference(dense, x, routing), rel=0.05, abs=1e-3)
    [times] = time_by_experts([made], SHAPE.top_k, seconds=0.0)
    assert len(times) == 3 and all(t > 0 for t in times)
