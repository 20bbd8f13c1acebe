"""The program as data: verification, arena, JSON, rendering, refusals."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from ktc import _runtime
from ktc.errors import UnsupportedModelError
from ktc.graph import families
from ktc.graph.arena import lifetimes, plan_arena
from ktc.graph.build import GraphExecutor
from ktc.graph.inventory import Inventory
from ktc.graph.ir import Node, Program
from ktc.graph.lower import lower
from ktc.graph.oracle import ModelWeights
from ktc.graph.render import render
from ktc.graph.verify import ProgramError, verify
from tests.graph.models import deep_model, executor
from tests.tiny import FAMILIES, tiny_config, tiny_model


def program_of(family: str, **overrides: Any) -> Program:
    model = tiny_model(family, **overrides)
    return lower(model.config, Inventory.from_model(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_json_round_trip(family: str) -> None:
    program = program_of(family)
    text = json.dumps(program.to_json(), allow_nan=False)
    assert Program.from_json(json.loads(text)) == program
    with pytest.raises(ValueError, match="format 2"):
        Program.from_json({**json.loads(text), "format_version": 2})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("context",), "long", "'long' where a count"),
        (("hidden",), -1, "-1 where a count"),
        (("buffers", 0, "rows"), -1, "has rows -1"),
        (("buffers", 0, "dtype"), {}, "of {}"),
        (("buffers", 0, "cols"), True, "True where a count"),
        (("states", 0, "floats_per_position"), 1 << 62, "where a count"),
        (("nodes", 0, "op"), [], "where a name"),
        (("nodes", 0, "params"), {"scale": "1"}, "'1' where a number"),
        (("nodes", 2, "inputs"), [1.5], "1.5 where a count"),
        (("notes",), [3], "3 where a name"),
    ],
)
def test_a_stored_graph_with_odd_types_is_refused(path: tuple, value: object, message: str) -> None:
    data = json.loads(json.dumps(program_of("deepseek_v3").to_json()))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        Program.from_json(data)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 17])
def test_arena_never_overlaps_what_is_alive(family: str, rows: int) -> None:
    program = program_of(family, num_hidden_layers=4)
    layout = plan_arena(program, rows, 3, _runtime.graph_scratch)
    lives = lifetimes(program)
    spans = []
    for buffer in program.buffers:
        at = layout.offsets[buffer.id]
        if buffer.name == "logits":
            assert at == -1
            continue
        assert at >= 0 and at % 64 == 0
        size = rows * buffer.row_bytes
        if buffer.rows == "scratch":
            node = program.nodes[lives[buffer.id][0]]
            size = _runtime.graph_scratch(node.op, node.params, 3, rows)
        assert at + size <= layout.nbytes
        spans.append((at, at + size, *lives[buffer.id]))
    for i, (a0, a1, first, last) in enumerate(spans):
        for b0, b1, other_first, other_last in spans[:i]:
            alive_together = first <= other_last and other_first <= last
            assert not (alive_together and a0 < b1 and b0 < a1)
    assert layout.nbytes < sum(end - begin for begin, end, _, _ in spans), "nothing shares its place"


def test_scratch_does_not_grow_with_depth_or_prompt() -> None:
    """failure M2: scratch has a static budget."""
    shallow, deep = (
        plan_arena(program_of("qwen2_moe", num_hidden_layers=n), 64, 2, _runtime.graph_scratch).nbytes for n in (3, 9)
    )
    assert deep == shallow


def change(program: Program, index: int, **fields: Any) -> Program:
    nodes = list(program.nodes)
    nodes[index] = dataclasses.replace(nodes[index], **fields)
    return dataclasses.replace(program, nodes=tuple(nodes))


def find(program: Program, op: str, nth: int = 0) -> int:
    return [i for i, n in enumerate(program.nodes) if n.op == op][nth]


def test_verifier_names_what_is_wrong() -> None:
    p = program_of("deepseek_v3", num_hidden_layers=3)
    norm, linear, mla = find(p, "rms_norm"), find(p, "linear"), find(p, "mla")
    submit, collect = find(p, "moe_submit"), find(p, "moe_collect")
    last = p.nodes[find(p, "moe_submit", 1)]
    nodes = list(p.nodes)
    cases: list[tuple[Program, str]] = [
        (change(p, norm, op="layer_norm"), "unknown operator"),
        (change(p, norm, inputs=(len(p.buffers) - 1,)), "before it is written"),
        (change(p, norm, inputs=(len(p.buffers),)), "does not exist"),
        (change(p, norm, outputs=p.nodes[find(p, "embed")].outputs), "a second time"),
        (change(p, norm, params={"cols": 64}), "lacks eps"),
        (change(p, norm, weights={}), "lacks weight"),
        (change(p, norm, weights={"weight": "model.nothing"}), "model.nothing does not exist"),
        (change(p, linear, weights={"weight": "lm_head.weight", "colour": "x"}), "unknown weights colour"),
        (change(p, linear, weights={"bias": "lm_head.weight"}), "lacks a weight"),
        (change(p, linear, params={"n": 24, "k": 65}), "not 65"),
        (change(p, mla, states=()), "wrong states"),
        (change(p, mla, outputs=p.nodes[mla].outputs[::-1]), "scratch where it should not be"),
        (change(p, submit, module="model.layers.9.mlp", weights={}), "has no experts"),
        (change(p, submit, params={**last.params}), "follows the layer that is marked last"),
        (change(p, find(p, "moe_submit", 1), params={**last.params, "last": 0}), "no MoE layer is marked last"),
        (dataclasses.replace(p, nodes=(*nodes[:collect], *nodes[collect + 1 :])), r"before it is written|is collected"),
        (dataclasses.replace(p, nodes=tuple(nodes[:submit] + nodes[submit + 1 :])), "was not submitted"),
        (dataclasses.replace(p, nodes=tuple(nodes[:-1])), "does not write logits"),
        (dataclasses.replace(p, buffers=p.buffers[::-1]), "has id"),
    ]  # fmt: skip
    tensors = {name for node in p.nodes for name in node.weights.values()} - set(p.constants)
    moes = set(p.moe_modules())
    verify(p, tensors, moes)
    for broken, message in cases:
        with pytest.raises(ProgramError, match=message):
            verify(broken, tensors, moes)


def test_render_folds_equal_layers() -> None:
    model = deep_model(layers=6)
    program = lower(model.config, Inventory.from_model(model))
    text = render(program, context=128, arena={"decode": 1 << 20})
    assert "layer 0:" in text and "layers 2-4:" in text and "layer 5:" in text
    assert "arena, decode: 1.00 MB" in text and "128 positions" in text
    assert text.count("= mla(") < 6
    assert "moe_submit(" in text and "n_deferred=0" in text


def test_executor_refuses_what_it_cannot_run() -> None:
    model = tiny_model("qwen3_moe")
    program = lower(model.config, Inventory.from_model(model))
    for broken, message in (
        (change(program, 2, op="layer_norm"), "unknown operator"),
        (change(program, 2, params={"cols": 64}), "lacks eps"),
        (change(program, 2, inputs=(999,)), "does not exist"),
    ):
        with pytest.raises(ProgramError, match=message):
            GraphExecutor(broken, ModelWeights(model), chunk=8)
    graph = executor(model, chunk=8)
    with pytest.raises(IndexError, match="1 to 8 tokens"):
        graph.step(np.arange(9), 0)
    # The native side does not rely on the verifier.
    add = graph.native.add
    with pytest.raises(ValueError, match="unknown operator 'layer_norm' in node 'n'"):
        add("layer_norm", "n", [0], [1], [], {}, {})
    with pytest.raises(ValueError, match="node 'n' lacks weight 'weight'"):
        add("rms_norm", "n", [0], [1], [], {"cols": 64, "eps": 1e-6}, {})
    with pytest.raises(ValueError, match="does not exist"):
        add("silu_mul", "n", [0, 999], [1], [], {"cols": 64}, {})
    with pytest.raises(ValueError, match="too few inputs"):
        add("silu_mul", "n", [0], [1], [], {"cols": 64}, {})
    with pytest.raises(ValueError, match="unknown data type"):
        add("rms_norm", "n", [0], [1], [], {"cols": 64, "eps": 1e-6}, {"weight": (0, "fp8", 1, 64)})


def test_unsupported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match=r"needs model\.embed_tokens\.weight"):
        lower(tiny_config("mixtral"), Inventory({}, {}, {}, {}))
    monkeypatch.delitem(families.SKELETONS, "mixtral")  # as a family that is added without one
    with pytest.raises(UnsupportedModelError, match="no native decode graph") as raised:
        lower(tiny_config("mixtral"), Inventory({}, {}, {}, {}))
    assert "`ktc run --graph off`" in str(raised.value)


def test_profile_counts_every_operator() -> None:
    model = tiny_model("deepseek_v3")
    graph = executor(model)
    graph.native.profile(True)
    graph.step(np.array([5]), 0, decode=True)
    times = graph.native.times()
    counts: dict[str, int] = {}
    for node in graph.program.nodes:
        counts[node.op] = counts.get(node.op, 0) + 1
    assert {op: calls for op, (_, calls) in times.items()} == counts
    assert isinstance(graph.program.nodes[0], Node)
