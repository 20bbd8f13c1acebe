"""The verifier must notice a broken plan: each test breaks one invariant of a good one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ktc.models.registry import meta_model
from ktc.plan import Plan, PlanError, build_plan, verify
from ktc.recipe import load_recipe
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def plan() -> Plan:
    return build_plan(tiny_config("deepseek_v3"), load_recipe("int4"), nodes=1)


@pytest.fixture(scope="module")
def parameters() -> dict[str, tuple[int, ...]]:
    model = meta_model(tiny_config("deepseek_v3"))
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def change(plan: Plan, name: str, **changes: Any) -> Plan:
    return replace(plan, modules=tuple(replace(m, **changes) if m.name == name else m for m in plan.modules))


def change_moe(plan: Plan, **changes: Any) -> Plan:
    moe = plan.moe_modules()[0].moe
    assert moe is not None
    return change(plan, "model.layers.1.mlp", moe=replace(moe, **changes))


def test_a_good_plan(plan: Plan, parameters: dict[str, tuple[int, ...]]) -> None:
    verify(plan)
    verify(plan, parameters)


Break = Callable[[Plan], Plan]
NORM, HEAD, O_PROJ = "model.norm", "lm_head", "model.layers.0.self_attn.o_proj"
BROKEN: list[tuple[Break, str]] = [
    (lambda p: replace(p, modules=p.modules[:-1]), "lm_head.weight is covered by no module"),
    (lambda p: replace(p, modules=(*p.modules, p.modules[-1])), "lm_head is listed twice"),
    (lambda p: change(p, NORM, params={"weight": ((63,), "fp32")}), "model.norm.weight is [64] in the model and [63]"),
    (lambda p: change(p, NORM, params={"gain": ((64,), "fp32")}), "model.norm.gain of model.norm is not in the model"),
    (lambda p: change(p, HEAD, params={"weight": ((128, 64), "fp32")}, linear=None), "operator linear without its own"),
    (lambda p: change(p, HEAD, operator="mla", linear=None), "lm_head: operator mla on a module of role lm_head"),
    (lambda p: change(p, HEAD, device="tpu"), "lm_head: device tpu"),
    (lambda p: change(p, HEAD, rule=17), "lm_head: rule 17 does not exist"),
    (lambda p: change(p, HEAD, nbytes=1), "lm_head: 1 bytes do not match its layout"),
    (lambda p: change(p, O_PROJ, linear=replace(p.modules[-1].linear, scale="integer")), "int8-g0 does not exist"),  # type: ignore[type-var]
    (lambda p: change_moe(p, splits=((0, 32), (32, 64))), "2 slices for 1 nodes"),
    (lambda p: change_moe(p, splits=((0, 32),)), "do not cover 0..64 in blocks of 64"),
    (lambda p: change_moe(p, n_deferred_experts=1), "1 deferred experts of 2"),
    (lambda p: change_moe(p, data_type="fp32", scale="none", group=0), "fp32 on backend hybrid_AMX_AVX512"),
    (lambda p: change_moe(p, group=48), "int4-g48c does not exist"),
    (lambda p: change_moe(p, top_k=9), "8 experts of [64, 32], top 9"),
    (lambda p: change_moe(p, hidden=96), "model.layers.1.mlp.experts.gate_up_proj is [8, 64, 64] in the model"),
    (lambda p: change_moe(p, activation="relu2"), "activation relu2"),
    (lambda p: replace(p, tied={"lm_head.weight": "model.nowhere"}), "tied to model.nowhere, which no module owns"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_broken_plans(plan: Plan, parameters: dict[str, tuple[int, ...]], broken: Break, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        verify(broken(plan), parameters)
    assert message in caught.value.message


def test_split_plans_must_cover_on_block_edges() -> None:
    config = tiny_config("deepseek_v3", moe_intermediate_size=192)
    two = build_plan(config, load_recipe("int4"), nodes=2)
    assert two.moe_modules()[0].moe.splits == ((0, 64), (64, 192))  # type: ignore[union-attr]
    for splits in (((0, 96), (96, 192)), ((0, 64), (128, 192)), ((0, 0), (0, 192)), ((64, 192), (0, 64))):
        with pytest.raises(PlanError, match="do not cover"):
            verify(change_moe(two, splits=splits))
