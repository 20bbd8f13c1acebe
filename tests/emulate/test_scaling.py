"""Slower devices and measured machines as profiles."""

from __future__ import annotations

import pytest

from ktc.emulate.scaling import as_measured, parse_shares, profile_yaml, slower_device
from ktc.errors import KtcError
from ktc.graph.build import GraphExecutor
from ktc.plan.ir import Plan
from ktc.simulate import Hardware, decode_costs, simulate
from ktc.simulate.profile import parse_profile
from ktc.simulate.sweep import decode_row


def test_a_slower_device_takes_so_many_times_as_long(stack: tuple[GraphExecutor, Plan], paper: Hardware) -> None:
    plan = stack[1]
    fast, slow = (decode_costs(plan, h, numa="single") for h in (paper, slower_device(paper, 3.0)))
    for a, b in zip(fast.layers, slow.layers, strict=True):
        assert (b.attention, b.shared, b.merge) == pytest.approx((3 * a.attention, 3 * a.shared, 3 * a.merge))
        assert b.routed == a.routed
    assert (slow.copy, slow.head) == pytest.approx((3 * fast.copy, 3 * fast.head))
    assert (slow.submit, slow.sync) == (fast.submit, fast.sync)


def test_measured_experts_are_what_the_simulator_then_assumes(
    stack: tuple[GraphExecutor, Plan], paper: Hardware
) -> None:
    plan = stack[1]
    costs = decode_costs(plan, as_measured(paper, plan, 1.5e-3, 3e-5, 2e-5), numa="tp")
    assert all(c.routed == pytest.approx((1.5e-3,)) for c in costs.layers)
    assert (costs.submit, costs.sync) == (3e-5, 2e-5) and costs.job == 0


def test_the_time_of_a_layer_has_one_job_and_its_start_in_it(
    stack: tuple[GraphExecutor, Plan], paper: Hardware
) -> None:
    """So K = 0 stays as measured, whatever a job takes; a job that takes it all leaves a tenth for the experts."""
    plan = stack[1]
    for job, start in ((4e-4, 0.0), (4e-4, 2e-4), (3.0, 1e-4), (1e-4, 3.0)):
        costs = decode_costs(plan, as_measured(paper, plan, 1.5e-3, 3e-5, 2e-5, job, start))
        assert costs.job == min(job, 1.35e-3) and costs.start == pytest.approx(min(start, 1.35e-3 - costs.job))
        assert all(c.routed[0] + costs.job + costs.start == pytest.approx(1.5e-3) for c in costs.layers)


def test_the_written_profile_is_the_same_machine(stack: tuple[GraphExecutor, Plan], paper: Hardware) -> None:
    plan = stack[1]
    measured = as_measured(slower_device(paper, 1.7), plan, 1.5e-3, 3e-5, 2e-5, 4e-4, 1e-4, cores=3)
    read = parse_profile(profile_yaml(measured, ["a remark"]), "measured.yaml")
    assert (read.cpu.sockets, read.cpu.cores) == (1, 3)  # of the machine measured, not of the paper's
    for k in (0, 3):
        a, b = (decode_row(decode_costs(plan, h), k) for h in (measured, read))
        assert b.token_seconds == pytest.approx(a.token_seconds)
        assert b.layer.both == pytest.approx(a.layer.both)
    assert any("measured in decode only" in note for note in simulate(plan, read, numa="single").notes)
    assert not any("decode only" in note for note in simulate(plan, paper, numa="single").notes)


@pytest.mark.parametrize("text", ["", "74", "74:", "74:28:1", "a:b", "0:1", "1:-1", "nan:1", "inf:1"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(KtcError, match="not CPU:DEVICE"):
        parse_shares(text)


def test_shares() -> None:
    assert parse_shares("74:28") == (74.0, 28.0)
