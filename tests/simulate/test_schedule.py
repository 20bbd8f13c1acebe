"""The schedule of Expert Deferral: what is done when, and that nothing is lost, added or done twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from ktc.errors import RecipeError, UsageError
from ktc.simulate import decode_costs, load_profile, prefill_costs, simulate
from ktc.simulate.costs import Costs, LayerCost
from ktc.simulate.events import run
from ktc.simulate.hardware import Device
from ktc.simulate.metrics import busy, intersection, total, use
from ktc.simulate.schedule import DEVICE, build
from ktc.simulate.sweep import auto_deferred, decode_row
from tests.simulate.conftest import small_plan

HARDWARE = load_profile("paper-2x8452y-a100")


def costs(
    attention: float = 5.0,
    routed: tuple[float, ...] = (8.0, 8.0),
    layers: int = 6,
    top_k: int = 8,
    job: float = 0.0,
    start: float = 0.0,
) -> Costs:
    """Whole numbers, so that times can be worked out by hand. Layer 0 is dense."""
    moe = [LayerCost(i, attention, 2.0, 1.0, top_k, routed) for i in range(1, layers)]
    dense = LayerCost(0, 10.0)
    return Costs(1, (dense, *moe), 4.0, copy=0.5, submit=0.25, sync=0.25, shared_lane=False, job=job, start=start)


def test_k0_is_the_closed_form() -> None:
    """Without deferral: attention, copy, submit, then the longer of experts and shared experts, sync, copy, merge."""
    for c in (costs(), costs(routed=(1.0, 1.5)), decode_costs(small_plan(), HARDWARE)):
        expected = c.head + sum(layer.attention for layer in c.layers)
        for layer in (layer for layer in c.layers if layer.top_k):
            expected += 2 * c.copy + c.submit + c.sync + max(layer.shared, *layer.routed) + layer.merge
        assert decode_row(c, 0).token_seconds == pytest.approx(expected, rel=1e-12)


def test_k0_layer_time_and_shares_by_hand() -> None:
    row = decode_row(costs(routed=(8.0, 8.0)), 0)
    layer = 5 + 0.5 + 0.25 + 8 + 0.25 + 0.5 + 1
    assert row.layer_seconds == pytest.approx(layer)
    assert (row.layer.cpu, row.layer.device) == (pytest.approx(8 / layer), pytest.approx(8 / layer))
    assert row.layer.both == pytest.approx(2 / layer)  # the shared experts
    assert row.layer.idle == pytest.approx(1.5 / layer)  # copies and callbacks


def test_deferral_by_hand() -> None:
    """Each of 8 experts takes 1: deferring n fills n of the 7.5 in which the CPU idles, and no more than all of it."""
    c = costs()
    base = decode_row(c, 0).layer_seconds
    for k in range(7):
        assert decode_row(c, k).layer_seconds == pytest.approx(base - k)
    more = costs(routed=(16.0, 16.0))  # two a piece: the fourth fills the gap
    assert [round(decode_row(more, k).layer_seconds, 6) for k in range(6)] == [23.5, 21.5, 19.5, 17.5, 16.0, 16.0]
    assert decode_row(more, 4).layer.cpu == pytest.approx(1.0)


def test_a_deferring_layer_is_two_jobs_moment_by_moment() -> None:
    """A job takes half a unit by itself: a layer pays it once with K = 0, twice with K = 2, the last layer once."""
    moments = {(s.task.layer, s.task.kind): (s.start, s.end) for s in run(build(costs(layers=4, job=0.5), 2))}
    assert moments == {
        (0, "attention"): (0, 10),
        (1, "attention"): (10, 15),
        (1, "copy out"): (15, 15.5),
        (1, "submit"): (15.5, 15.75),
        (1, "immediate"): (15.75, 22.25),  # six experts of 1, and the job
        (1, "deferred"): (22.25, 24.75),  # two experts, and their own job
        (1, "shared"): (15.75, 17.75),
        (1, "sync"): (17.75, 22.5),
        (1, "copy back"): (22.5, 23),
        (1, "merge"): (23, 24),
        (2, "attention"): (24, 29),
        (2, "copy out"): (29, 29.5),
        (2, "submit"): (29.5, 29.75),
        (2, "immediate"): (29.75, 36.25),
        (2, "deferred"): (36.25, 38.75),
        (2, "shared"): (29.75, 31.75),
        (2, "sync"): (31.75, 36.5),
        (2, "copy back"): (36.5, 37),
        (2, "merge"): (37, 38),
        (3, "attention"): (38, 43),
        (3, "copy out"): (43, 43.5),
        (3, "submit"): (43.5, 43.75),
        (3, "immediate"): (43.75, 52.25),  # all eight, one job
        (3, "shared"): (43.75, 45.75),
        (3, "sync"): (45.75, 52.5),
        (3, "copy back"): (52.5, 53),
        (3, "merge"): (53, 54),
        (4, "head"): (54, 58),
    }


def test_jobs_bound_what_deferral_gains() -> None:
    """A saturated layer is as long as its experts and two jobs; where jobs cost more than the gap, K = 0 is best."""
    rows = [decode_row(costs(routed=(16.0, 16.0), job=0.5), k) for k in range(6)]
    assert [row.layer_seconds for row in rows] == pytest.approx([24, 22, 20, 18, 17, 17])
    assert rows[5].layer.cpu == pytest.approx(1.0)
    dear = costs(routed=(1.0, 1.0), job=8.0)
    rows = [decode_row(dear, k) for k in range(dear.max_deferred + 1)]
    assert [row.layer_seconds for row in rows[:2]] == pytest.approx([16.5, 17])
    assert auto_deferred(tuple(rows)) == 0


def test_a_job_behind_another_need_not_start() -> None:
    """With 16 of experts and 7.5 of the rest a layer: K = 0 pays the start in every layer, two jobs of a layer pay it
    once, and a pool that is never idle not at all."""
    paid, free = (costs(routed=(16.0, 16.0), start=s) for s in (1.5, 0.0))
    paying, saturated = ([decode_row(c, k).layer_seconds for c in (paid, free)] for k in (2, 5))
    assert decode_row(paid, 0).layer_seconds == pytest.approx(decode_row(free, 0).layer_seconds + 1.5)
    assert paying[0] == pytest.approx(paying[1] + 1.5)
    assert saturated == pytest.approx([16, 16])
    assert decode_row(paid, 0).layer.cpu == pytest.approx(17.5 / (23.5 + 1.5))  # the pool is at work while it starts


def test_the_profile_says_what_a_job_takes_in_decode_and_prefill() -> None:
    slow = replace(HARDWARE, cpu=replace(HARDWARE.cpu, job=1e-3))
    plan = small_plan()  # four layers with experts, which take longer than the shared ones
    free, paid = (simulate(plan, h) for h in (HARDWARE, slow))
    assert paid.rows[0].token_seconds - free.rows[0].token_seconds == pytest.approx(4e-3)
    assert paid.prefill_seconds - free.prefill_seconds == pytest.approx(4e-3)
    assert paid.decode.layers == free.decode.layers and free.decode.job == 0
    alone = simulate(plan, replace(slow, device=Device("cpu", "the expert pool")))
    assert alone.auto == 0 and alone.rows[2].token_seconds - alone.rows[0].token_seconds == pytest.approx(3e-3)


def test_uneven_sockets_wait_for_the_slower() -> None:
    row = decode_row(costs(routed=(8.0, 4.0)), 0)
    assert row.layer_seconds == pytest.approx(decode_row(costs(), 0).layer_seconds)
    assert row.layer.cpu == pytest.approx((8 + 4) / 2 / row.layer_seconds)


@pytest.mark.parametrize("k", range(7))
def test_deferral_adds_and_loses_no_work(k: int) -> None:
    """The same work on every lane, whatever K: experts are moved, not added, skipped or done twice."""
    c = costs()
    work: dict[int, Counter[str]] = {}
    for deferred in (0, k):
        work[deferred] = Counter()
        for s in run(build(c, deferred)):
            kind = "experts" if s.task.kind in ("immediate", "deferred") else s.task.kind
            work[deferred][f"{s.task.lane} {kind} {s.task.layer}"] += s.task.seconds
    assert work[0].keys() == work[k].keys()
    assert all(work[k][key] == pytest.approx(work[0][key]) for key in work[0])


@pytest.mark.parametrize("k", range(1, 7))
def test_deferred_experts_are_added_one_layer_later_and_the_last_layer_defers_none(k: int) -> None:
    tasks = build(costs(), k)
    slices = run(tasks)
    last = max(t.layer for t in tasks if t.kind == "immediate")
    deferred = [i for i, t in enumerate(tasks) if t.kind == "deferred"]
    assert {tasks[i].layer for i in deferred} == set(range(1, last))
    collected = Counter(other for t in tasks if t.kind == "sync" for other in t.awaits)
    experts = [i for i, t in enumerate(tasks) if t.kind in ("immediate", "deferred")]
    assert collected == Counter(experts)  # each is awaited exactly once
    for sync in (t for t in tasks if t.kind == "sync"):
        assert {tasks[i].layer for i in sync.awaits if tasks[i].kind == "immediate"} == {sync.layer}
        assert {tasks[i].layer for i in sync.awaits if tasks[i].kind == "deferred"} <= {sync.layer - 1}
    end = max(s.end for s in slices)
    assert all(s.end < end for s in slices if s.task.lane.startswith("cpu"))


def test_a_dense_layer_between_moe_layers_carries_the_deferred_experts_over() -> None:
    c = costs()
    layers = (*c.layers[:3], LayerCost(3, 5.0), *c.layers[4:])
    tasks = build(replace(c, layers=layers), 2)
    sync = next(t for t in tasks if t.kind == "sync" and t.layer == 4)
    assert {tasks[i].layer for i in sync.awaits if tasks[i].kind == "deferred"} == {2}


def test_every_lane_is_busy_as_long_as_its_work_takes() -> None:
    """Conservation: the busy time of a lane is the sum of its tasks, and the shares of any window add up."""
    for k in range(7):
        slices = decode_row(costs(routed=(8.0, 6.0)), k).slices
        for lane in {s.task.lane for s in slices}:
            assert total(busy(slices, lane)) == pytest.approx(
                sum(s.task.seconds for s in slices if s.task.lane == lane)
            )
        shares = use(slices, (3.0, 47.0))
        assert shares.cpu + shares.device - shares.both + shares.idle == pytest.approx(1.0)
        assert all(-1e-12 <= x <= 1 + 1e-12 for x in (shares.cpu, shares.device, shares.both, shares.idle))
        pool = busy(slices, "cpu0")
        assert intersection(pool, pool) == pytest.approx(total(pool))
        assert 0 <= intersection(pool, busy(slices, DEVICE)) <= total(pool)


@pytest.mark.parametrize("routed", [1.0, 3.0, 8.0, 20.0, 80.0])
def test_cpu_use_grows_with_k_and_time_never_does(routed: float) -> None:
    rows = [decode_row(costs(routed=(routed, routed)), k) for k in range(7)]
    for before, after in pairwise(rows):
        assert after.layer.cpu >= before.layer.cpu - 1e-9
        assert after.token_seconds <= before.token_seconds + 1e-9


def test_auto_takes_the_fewest_that_saturate_the_cpu() -> None:
    def auto(routed: float) -> int:
        plan_costs = costs(routed=(routed, routed), layers=60)
        return auto_deferred(tuple(decode_row(plan_costs, k) for k in range(plan_costs.max_deferred + 1)))

    assert auto(16.0) == 4  # 7.5 of idle time, 2 per expert
    assert auto(60.0) == 1  # 7.5 per expert
    assert auto(6.0) == 6  # never enough: all but two
    assert auto(4.0) == 4  # four immediate ones take as long as the shared experts: the device is the limit


def test_at_least_two_experts_stay_immediate() -> None:
    c = costs(top_k=8)
    assert c.max_deferred == 6
    for k in (-1, 7, 8):
        with pytest.raises(ValueError, match="0 to 6 work"):
            build(c, k)
    assert costs(top_k=1).max_deferred == 0 and build(costs(top_k=1), 0)


def test_without_a_gpu_there_is_nothing_to_overlap_with() -> None:
    """The device is the pool itself: auto is 0, and deferral changes nothing."""
    sim = simulate(small_plan(), replace(HARDWARE, device=Device("cpu", "the expert pool")))
    assert sim.auto == 0 and len(sim.rows) == 5
    for row in sim.rows:
        assert row.token_seconds == pytest.approx(sim.rows[0].token_seconds, rel=1e-9)
        assert row.token.cpu == pytest.approx(1.0) and row.token.device == row.token.both == 0
    work = sum(c.attention + c.shared + c.merge + max(c.routed, default=0) for c in sim.decode.layers)
    assert sim.rows[0].token_seconds == pytest.approx(work + sim.decode.head)


def test_experts_read_their_bytes_at_the_sockets_rate() -> None:
    """A decode step's experts cost their packed bytes over the rate that the NUMA mode gives."""
    plan = small_plan()
    moe = plan.moe_modules()[0].moe
    assert moe is not None
    nbytes = moe.top_k * 3 * 2048 * 1024 * 2
    reached = HARDWARE.cpu.kernels["ktc"].dram_fraction
    expected = {"single": (nbytes / 220e9,), "tp": (nbytes / 440e9,) * 2, "unaware": (nbytes / 250e9,) * 2}
    for numa, seconds in expected.items():
        routed = decode_costs(plan, HARDWARE, numa=numa).layers[1].routed  # type: ignore[arg-type]
        assert routed == pytest.approx([s / reached for s in seconds])


def test_prefill_reads_every_expert_once_then_computes() -> None:
    """Few tokens are bound by the bytes of all experts, many by arithmetic, which grows with the tokens."""
    few, many, double = (
        prefill_costs(small_plan(), HARDWARE, tokens=t).layers[1].routed[0] for t in (64, 1 << 15, 1 << 16)
    )
    reached = HARDWARE.cpu.kernels["ktc"]
    touched = 64 * (1 - (1 - 6 / 64) ** 64)
    assert few == pytest.approx(touched * 3 * 2048 * 1024 * 2 / 440e9 / reached.dram_fraction)
    flops = 2 * (1 << 15) * 6 * 3 * 2048 * 1024
    assert many == pytest.approx(flops / 2 / 73.7e12 / reached.compute_fraction)
    assert double == pytest.approx(2 * many)


def test_a_plan_for_another_number_of_sockets_is_refused() -> None:
    with pytest.raises(UsageError, match="split over 4 NUMA nodes, and the hardware profile") as caught:
        decode_costs(small_plan(nodes=4), HARDWARE)
    assert caught.value.hint is not None and "ktc repack" in caught.value.hint
    decode_costs(small_plan(nodes=1), HARDWARE, numa="unaware")
    decode_costs(small_plan(nodes=1), HARDWARE, numa="single")


def test_a_plan_without_experts_is_refused() -> None:
    with pytest.raises(RecipeError, match="no MoE block"):
        decode_costs(small_plan(layers=2, dense=2), HARDWARE)


def test_a_longer_context_costs_device_time(deepseek) -> None:
    plan = deepseek("bf16")
    short, long = (decode_costs(plan, HARDWARE, context=c).layers[9] for c in (0, 32768))
    nbytes = 32768 * 576 * 2  # the latent cache of one layer
    assert long.attention - short.attention >= nbytes / HARDWARE.device.memory_rate
    assert long.routed == short.routed
