"""DeepSeek-V3's plans (its real config, the shipped recipes) and a small plan that is made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ktc.plan.ir import LinearPlan, ModulePlan, MoePlan, Plan

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "configs" / "DeepSeek-V3.json"


@pytest.fixture(scope="session")
def deepseek() -> Callable[[str], Plan]:
    """`deepseek(recipe) -> Plan` over two nodes."""
    from ktc.plan import build_plan
    from ktc.recipe import load_recipe

    return cache(lambda recipe: build_plan(json.loads(CONFIG.read_text()), load_recipe(recipe), 2))


def small_plan(layers: int = 5, dense: int = 1, top_k: int = 6, nodes: int = 2) -> Plan:
    """`layers` layers with an attention of one linear, of which the first `dense` have no MoE block."""

    def linear(name: str, n: int, k: int, role: str = "linear") -> ModulePlan:
        plan = LinearPlan(n, k, False, "bf16", "none", 0)
        return ModulePlan(name, "torch.nn.Linear", role, "linear", "cpu", 0, plan.layout.nbytes, linear=plan)

    half = 1024 // nodes
    moe = MoePlan(
        experts=64,
        top_k=top_k,
        hidden=2048,
        intermediate=1024,
        activation="silu_mul",
        alpha=0.0,
        limit=0.0,
        bias=False,
        data_type="bf16",
        scale="none",
        group=0,
        backend="auto",
        n_deferred_experts=0,
        splits=tuple((half * n, half * (n + 1)) for n in range(nodes)),
    )
    modules = []
    for i in range(layers):
        at = f"model.layers.{i}"
        modules.append(linear(f"{at}.self_attn.o_proj", 2048, 4096))
        if i < dense:
            modules.append(linear(f"{at}.mlp.up_proj", 8192, 2048))
            continue
        modules.append(ModulePlan(f"{at}.mlp", "some.MoE", "moe", "moe", "cpu", 0, 0, moe=moe))
        modules.append(linear(f"{at}.mlp.shared_experts.up_proj", 1024, 2048))
    modules.append(linear("lm_head", 32000, 2048, "lm_head"))
    return Plan("small", "Small", layers, nodes, tuple(modules))
