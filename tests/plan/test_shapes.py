"""Shapes that do not fit: groups that do not divide, nodes that do not split. Never silently something else."""

from __future__ import annotations

from typing import Any

import pytest

from ktc.errors import KtcError, RecipeError, UsageError
from ktc.layout import MatrixLayout, QuantScheme
from ktc.plan import Plan, build_plan, render
from ktc.plan.schemes import LEGAL_GROUPS, is_legal
from ktc.recipe import parse_recipe
from tests.tiny import tiny_config


def plan_of(moe_kwargs: str, hidden: int, intermediate: int, nodes: int = 1, **overrides: Any) -> Plan:
    text = f"- match: {{role: moe}}\n  replace: {{class: ktc.FusedMoE, kwargs: {{{moe_kwargs}}}}}\n"
    config = tiny_config("qwen3_moe", hidden_size=hidden, moe_intermediate_size=intermediate, **overrides)
    return build_plan(config, parse_recipe(text, "r.yaml"), nodes)


def refused(*args: Any, kind: type[KtcError] = RecipeError, **kwargs: Any) -> KtcError:
    with pytest.raises(kind) as caught:
        plan_of(*args, **kwargs)
    return caught.value


def moe_of(plan: Plan) -> Any:
    return plan.moe_modules()[0].moe


# ---- failure S2: gpt-oss has H = I = 2880 = 45 * 64, which no group of 128 divides ---------------------------------


def test_s2_group_that_does_not_divide_is_refused_with_those_that_do() -> None:
    error = refused("data_type: int4, group: 128", 2880, 2880)
    assert error.message == (
        "rule 1 (r.yaml:1): model.layers.0.mlp: group 128 does not divide hidden size 2880 and intermediate size 2880"
    )
    assert error.hint == "groups that work here: 16, 32, 64; set group: 64 or group_fallback: [64]"
    assert "groups that work here: 32, 64;" in str(refused("data_type: int8, group: 128", 2880, 2880).hint)


def test_s2_padding_when_the_recipe_says_so() -> None:
    plan = plan_of("data_type: int4, group: 128, group_fallback: pad", 2880, 2880)
    moe = moe_of(plan)
    assert (moe.group, moe.gate_up_layout(0).scheme.groups(2880)) == (128, 23)
    assert plan.moe_modules()[0].note.startswith("padded: group 128 does not divide hidden size 2880")


def test_s2_one_matrix_that_does_not_divide_moves_both() -> None:
    """Failure S10 too: gate, up and down of one operator always share one scheme."""
    moe = moe_of(plan_of("data_type: int4, group: 128, group_fallback: [64, 32]", 2048, 1440))
    assert (moe.gate_up_layout(0).scheme, moe.down_layout(0).scheme) == (QuantScheme("int4", "codebook", 32),) * 2


# ---- failure S3: Nemotron (H 2688, I 1856): a peer stored 97% of the bytes in a wider type and said nothing --------


def test_s3_fallback_is_an_error_unless_allowed() -> None:
    error = refused("data_type: int4, group: 128, scale: float", 2688, 1856)
    assert "group 128 does not divide intermediate size 1856" in error.message
    assert "group_fallback: [64]" in str(error.hint)


def test_s3_every_fallback_is_reported_with_its_bytes() -> None:
    plan = plan_of("data_type: int4, group: 128, scale: float, group_fallback: [64]", 2688, 1856)
    assert moe_of(plan).group == 64
    note = "fallback: group 64 instead of 128 (group 128 does not divide intermediate size 1856)"
    assert [m.note for m in plan.moe_modules()] == [note] * 2
    text = render(plan)
    assert f"* model.layers.{{0-1}}.mlp: {note} (2 modules, " in text
    assert f"{plan.expert_bytes(0) / 2**20:.0f} MiB" in text.split(note)[1]


def test_s3_no_group_divides() -> None:
    error = refused("data_type: int4, group: 32, group_fallback: [16]", 64, 40)
    assert error.hint == "no group divides it; set group_fallback: pad, or use data_type: int8 with group: channel"


# ---- failure S4: I = 704 over 4 nodes is 176 a node; I = 320 over 8 nodes is less than a tile ----------------------


def test_s4_uneven_split_in_whole_blocks() -> None:
    moe = moe_of(plan_of("data_type: int4", 64, 704, nodes=4))
    assert moe.splits == ((0, 128), (128, 320), (320, 512), (512, 704))
    halves = moe_of(plan_of("data_type: int4, group: 128", 128, 1408, nodes=2)).splits
    assert halves == ((0, 640), (640, 1408))  # 11 groups: 5 and 6


def test_s4_too_many_nodes_names_those_that_work() -> None:
    error = refused("data_type: int4", 64, 320, nodes=8, kind=UsageError)
    assert "model.layers.0.mlp: intermediate size 320 has 5 blocks of 64 columns" in error.message
    assert "1 to 5 nodes work" in error.message and "--nodes" in str(error.hint)
    error = refused("data_type: int4, group: 128", 128, 384, nodes=5, kind=UsageError)
    assert "1 to 3 nodes work" in error.message and "a smaller group than 128" in str(error.hint)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_bytes_do_not_depend_on_the_node_count(nodes: int) -> None:
    plan = plan_of("data_type: int8, group: 64", 128, 704, nodes=nodes)
    whole = [
        MatrixLayout(2 * 704, 128, QuantScheme("int8", "group", 64)),
        MatrixLayout(128, 704, QuantScheme("int8", "group", 64)),
    ]
    assert sum(plan.expert_bytes(n) for n in range(nodes)) == 2 * 8 * sum(layout.nbytes for layout in whole)


# ---- failure S1: I = 1408 is no multiple of 256, I = 96 none of 64: exact, and storage overhead is said -------------


def test_s1_tails() -> None:
    plan = plan_of("data_type: int4", 64, 1408)
    assert (moe_of(plan).i_pad, plan.moe_modules()[0].note) == (1408, "")
    plan = plan_of("data_type: int4", 64, 96)
    assert moe_of(plan).i_pad == 128
    assert plan.moe_modules()[0].note == "padded: intermediate size 96 is stored as 128"


def test_legal_schemes() -> None:
    for (data_type, scale), groups in LEGAL_GROUPS.items():
        assert all(is_legal(QuantScheme(data_type, scale, g)) for g in groups)
    assert not is_legal(QuantScheme("int8", "integer", 32))
    assert not is_legal(QuantScheme("int4", "channel", 0))
    assert not is_legal(QuantScheme("bf16", "none", 32))
