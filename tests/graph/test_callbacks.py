"""Modules that stay Hugging Face's code in the graph: same logits as the whole model there, errors that name them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ktc import _runtime
from ktc.errors import KtcError, UnsupportedModelError
from ktc.graph.build import GraphExecutor
from ktc.graph.inventory import Inventory
from ktc.graph.ir import Program
from ktc.graph.lower import lower
from ktc.graph.oracle import ModelWeights
from ktc.graph.render import callback_notes, render
from ktc.graph.verify import ProgramError, verify
from tests.graph.models import executor, hf_logits, relative, run, tokens
from tests.tiny import FAMILIES, longrope, tiny_model

TOLERANCE = 1e-5
ATTENTION, DENSE = "model.layers.1.self_attn", "model.layers.0.mlp"


def program_of(model: Any, *callbacks: str) -> Program:
    return lower(model.config, Inventory.from_model(model), callbacks)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "glm_moe_dsa"])
def test_one_attention_in_torch(family: str) -> None:
    """Chunks, decode, and again from an earlier position: what was newer is gone from that attention's cache too."""
    model, ids, other = tiny_model(family), tokens(70), tokens(30, seed=9)
    graph = executor(model, _runtime.Pool([[0, 0]], pin=False), callbacks=[ATTENTION])
    assert graph.program.callbacks() == [ATTENTION]
    assert relative(run(graph, ids, [13, 1, 40]), hf_logits(model, ids)) <= TOLERANCE
    again = torch.cat([ids[:25], other])
    rest = [graph.step(other[:17].numpy(), 25, rows=17)]
    rest += [graph.step(other[i : i + 1].numpy(), 25 + i, decode=True) for i in range(17, 30)]
    assert relative(np.concatenate(rest), hf_logits(model, again)[25:]) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("deepseek_v3", DENSE),
        ("deepseek_v3", "model.layers.1.mlp.shared_experts"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert"),
        ("qwen2_moe", "model.layers.1.mlp"),  # a whole MoE block
        ("gpt_oss", "model.layers.0.mlp"),  # one that returns its router's scores too
    ],
)
def test_one_mlp_in_torch(family: str, module: str) -> None:
    model, ids = tiny_model(family), tokens(40)
    graph = executor(model, _runtime.Pool([[0, 0]], pin=False), callbacks=[module])
    assert graph.program.callbacks() == [module]
    assert relative(run(graph, ids, [30]), hf_logits(model, ids)) <= TOLERANCE


def test_an_activation_without_an_operator() -> None:
    """The routed experts of such a model have none either: that block is refused, or asked for as a whole."""
    model, ids = tiny_model("deepseek_v3", hidden_act="gelu"), tokens(40)
    with pytest.raises(UnsupportedModelError, match="hidden_act = 'gelu'"):
        program_of(model)
    graph = executor(model, callbacks=["model.layers.1.mlp"])
    assert graph.program.callbacks() == [DENSE, "model.layers.1.mlp"]
    assert f"{DENSE} is Hugging Face's code, called in torch: activation 'gelu'" in graph.program.notes[0]
    assert relative(run(graph, ids, [30]), hf_logits(model, ids)) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_frequencies_that_change_with_the_position(family: str) -> None:
    """Another set from position 32 on: the second chunk, and decode."""
    model, ids, chunks = tiny_model(family, rope_parameters=longrope(family)), tokens(90), [30, 1, 40]
    graph = executor(model)
    assert not graph.program.constants and not [n for n in graph.program.nodes if n.op in ("rope_table", "gqa", "mla")]
    (note,) = graph.program.notes
    assert note.startswith("model.layers.{0-1}.self_attn is") and "rope type 'longrope'" in note
    assert relative(run(graph, ids, chunks), hf_logits(model, ids, chunks)) <= TOLERANCE
    assert relative(hf_logits(model, ids, chunks), hf_logits(model, ids)) > 1e-3


@pytest.mark.parametrize("types", [None, ["full", "shared", "shared", "full"]])
def test_sparse_attention(types: list[str] | None) -> None:
    """GLM-5: the indexer chooses 16 keys, on its own or for the next layers too; far beyond the 16th token."""
    layers = {"num_hidden_layers": 4, "index_topk": 16} | ({} if types is None else {"indexer_types": types})
    model, ids, other, chunks = tiny_model("glm_moe_dsa", **layers), tokens(90), tokens(20, seed=4), [49, 1, 30]
    graph = executor(model)
    assert len(graph.program.callbacks()) == 4 and "indexer" in graph.program.notes[0]
    assert graph.prefill_type == "in torch" and "caches: 4, " in render(graph.program)
    assert relative(run(graph, ids, chunks), hf_logits(model, ids, chunks)) <= TOLERANCE
    got = graph.step(other.numpy(), 50, rows=20)
    want = hf_logits(model, torch.cat([ids[:50], other]), [49, 1, 20])[50:]
    assert relative(got, want) <= TOLERANCE


def test_other_layers_keep_their_operators_and_notes_say_which() -> None:
    program = program_of(tiny_model("mixtral", num_hidden_layers=4), ATTENTION, "model.layers.2.self_attn")
    assert [n.op for n in program.nodes if n.name.endswith("self_attn")] == ["gqa", "callback", "callback", "gqa"]
    assert program.notes == ("model.layers.{1-2}.self_attn is Hugging Face's code, called in torch: as asked for",)
    assert len(callback_notes({ATTENTION: "one", "model.layers.2.self_attn": "two"})) == 2
    with pytest.raises(UnsupportedModelError, match=r"no module model\.layers\.9\.mlp to call"):
        program_of(tiny_model("mixtral"), "model.layers.9.mlp")


def test_caches_of_callbacks_are_counted() -> None:
    shared = {"indexer_types": ["full", "shared"]}
    for family, overrides in [*((f, {}) for f in FAMILIES), ("glm_moe_dsa", shared)]:
        model = tiny_model(family, **overrides)
        program = program_of(model, ATTENTION)
        if family != "glm_moe_dsa":
            assert program.state_bytes(10) == program_of(model).state_bytes(10), family
        graph = GraphExecutor(program, weights := ModelWeights(model), chunk=16)
        graph.step(tokens(5).numpy(), 0)
        held = sum(4 * t.numel() for t in weights.callbacks.cache._stored.values())
        assert held + graph.state_bytes == program.state_bytes(256), family


@pytest.mark.parametrize("missing", ["window", "cache"])
def test_a_malformed_callback_is_refused(missing: str) -> None:
    data = program_of(tiny_model("mixtral"), ATTENTION).to_json()
    node = next(n for n in data["nodes"] if n["op"] == "callback")
    node["params"][missing] = float("inf")
    with pytest.raises(ValueError, match="inf where a count"):
        Program.from_json(data)
    del node["params"][missing]
    with pytest.raises(ProgramError, match="lacks window or cache"):
        verify(Program.from_json(data))


class Broken(Exception):
    pass


@pytest.mark.parametrize("module", [ATTENTION, DENSE])
@pytest.mark.parametrize("how", ["raises", "nan", "interrupt"])
def test_a_failing_module_is_named_and_the_engine_goes_on(module: str, how: str) -> None:
    model, ids = tiny_model("deepseek_v3"), tokens(40).numpy()
    graph = executor(model, _runtime.Pool([[0, 0]], pin=False), callbacks=[module])
    want = graph.step(ids[:30], 0)

    def fail(_: Any, __: Any, out: Any) -> Any:
        if how == "raises":
            raise Broken("no such\nluck")
        if how == "interrupt":
            raise KeyboardInterrupt
        first = out[0] if isinstance(out, tuple) else out
        return (first * float("nan"), *out[1:]) if isinstance(out, tuple) else first * float("nan")

    for position in (0, 30):
        hook = model.get_submodule(module).register_forward_hook(fail)
        if how == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                graph.step(ids[position : position + 5], position)
        else:
            with pytest.raises(KtcError) as raised:
                graph.step(ids[position : position + 5], position)
            assert f"{module}: Hugging Face's code" in raised.value.message
            said = "Broken: no such luck" if how == "raises" else "NaN"
            assert said in raised.value.message and f"position {position}" in raised.value.message
        hook.remove()
        assert np.array_equal(graph.step(ids[:30], 0), want)


def test_a_nan_that_came_in_is_not_the_modules_fault() -> None:
    """As everywhere in the graph it stays in its row, and is an error where a token is drawn."""
    model = tiny_model("deepseek_v3")
    model.model.embed_tokens.weight.data[77] = float("nan")
    graph, ids = executor(model, callbacks=[DENSE]), tokens(8, vocab=70).numpy()
    clean = graph.step(ids, 0, rows=8)
    ids[5] = 77
    got = graph.step(ids, 0, rows=8)
    assert np.array_equal(got[:5], clean[:5]) and np.isnan(got[5:]).any(axis=1).all()


def test_a_module_may_keep_what_it_was_given() -> None:
    """The executor's memory is lent for the call only."""
    model, ids = tiny_model("deepseek_v3"), tokens(20).numpy()
    graph, kept = executor(model, callbacks=[DENSE]), []
    model.get_submodule(DENSE).register_forward_hook(lambda _, given, out: kept.append((given[0], given[0].clone())))
    graph.step(ids, 0)
    graph.step(ids[::-1].copy(), 0)
    assert torch.equal(*kept[0]) and torch.equal(*kept[1]) and not torch.equal(kept[0][0], kept[1][0])
