"""Costs -> what the device does around each MoE block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktc.emulate.script import block_nodes, build_script, layer_of
from ktc.errors import KtcError
from ktc.graph.build import GraphExecutor
from ktc.graph.ir import Node, Program
from ktc.plan.ir import Plan
from ktc.simulate import Costs, LayerCost, ProfileError, decode_costs, load_profile
from ktc.simulate.schedule import build
from tests.emulate.conftest import LAYERS


def program(layers: list[int], **overrides: object) -> Program:
    """Only what a script looks at: the MoE blocks of these layers."""
    nodes = []
    for i in layers:
        name = f"model.layers.{i}.mlp"
        nodes.append(Node("moe_submit", name, (0, 1, 2), params={"top_k": 6}, module=name, **overrides))  # type: ignore[arg-type]
        nodes.append(Node("moe_collect", name, outputs=(3,), params={"hidden": 64}))
    return Program("test", 64, 10, 10, (), (), tuple(nodes))


def costs(kinds: str, **overrides: object) -> Costs:
    """One layer per letter: d dense, m MoE."""
    layers = tuple(
        LayerCost(i, 1.0 + i, 0.5, 0.25, 6, (3.0,)) if kind == "m" else LayerCost(i, 10.0 + i)
        for i, kind in enumerate(kinds)
    )
    values = {"head": 7.0, "copy": 0.125, "submit": 0.0, "sync": 0.0, "shared_lane": False, **overrides}
    return Costs(tokens=1, layers=layers, **values)  # type: ignore[arg-type]


def test_dense_layers_belong_to_the_next_block_and_the_last_ones_to_the_tail() -> None:
    script = build_script(program([1, 4]), costs("dmddmd"))
    assert [b.layer for b in script.blocks] == [1, 4]
    assert [[(w.layer, w.seconds) for w in b.before] for b in script.blocks] == [
        [(0, 10.0), (1, 2.0)],
        [(2, 12.0), (3, 13.0), (4, 5.0)],
    ]
    assert [(w.kind, w.layer, w.seconds) for w in script.tail] == [("attention", 5, 15.0), ("head", 6, 7.0)]
    assert script.blocks[0].times() == (12_125_000_000, 500_000_000, 375_000_000)
    assert script.tail_ns() == 22_000_000_000
    assert script.device_seconds == pytest.approx((2.75 + 5.75) / 2)


def test_a_script_is_as_long_as_the_simulators_device_and_copies(
    stack: tuple[GraphExecutor, Plan],
) -> None:
    """Every device and link task of the simulated schedule is in the script, and nothing else."""
    graph, plan = stack
    times = decode_costs(plan, load_profile("paper-2x8452y-a100"), numa="single")
    script = build_script(graph.program, times)
    want = sum(t.seconds for t in build(times) if t.lane in ("device", "link"))
    assert (sum(sum(b.times()) for b in script.blocks) + script.tail_ns()) * 1e-9 == pytest.approx(want, abs=1e-7)


def test_blocks_are_found_in_a_real_program(stack: tuple[GraphExecutor, Plan]) -> None:
    nodes = stack[0].program.nodes
    found = block_nodes(stack[0].program)
    assert len(found) == LAYERS
    for submit, collect, x, weights, ids, y, top_k, hidden in found:
        assert nodes[submit].op == "moe_submit" and nodes[submit].inputs == (x, weights, ids)
        assert nodes[collect].op == "moe_collect" and nodes[collect].outputs == (y,)
        assert (top_k, hidden) == (6, 128)


def test_bad_profiles_and_programs() -> None:
    with pytest.raises(ProfileError, match="no device of its own"):
        build_script(program([0]), costs("m", shared_lane=True))
    with pytest.raises(KtcError, match=r"layers \[0\]"):
        build_script(program([0]), costs("dm"))
    with pytest.raises(KtcError, match="no MoE block"):
        block_nodes(program([]))
    with pytest.raises(KtcError, match=r"model\.layers\.3\.mlp has unpacked experts"):
        block_nodes(program([3], weights={"gate_up": "w"}))
    with pytest.raises(KtcError, match="no layer"):
        layer_of("model.mlp")
    assert build_script(program([0]), replace(costs("m"), head=0.0)).tail_ns() == 0
