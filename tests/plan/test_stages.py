"""Layers on several GPUs: which splits are a pipeline, what `ktc plan` shows of it, and errors that name the rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktc.errors import KtcError, RecipeError
from ktc.plan import Plan, build_plan, render
from ktc.plan.stages import place
from ktc.recipe import parse_recipe
from tests.tiny import TINY, tiny_config

MODEL = '- match: {name: "^$"}\n  replace: {class: default, device: cuda:0}\n'
MOE = "- match: {role: moe}\n  replace: {class: ktc.FusedMoE, kwargs: {data_type: bf16}}\n"


def on(name: str, device: str) -> str:
    return f"- match: {{name: '{name}'}}\n  replace: {{class: default, device: {device}}}\n"


def plan_of(text: str, layers: int = 5, family: str = "qwen3_moe") -> Plan:
    return build_plan(tiny_config(family, num_hidden_layers=layers), parse_recipe(text, "r.yaml"))


def stages(plan: Plan) -> list[tuple[Any, ...]]:
    placed = place(plan)
    assert placed is not None
    return [(s.device, s.layers, *(u for u in s.units if ".layers." not in u)) for s in placed.stages]


@pytest.mark.parametrize("family", list(TINY))
def test_two_ranges_of_layers_for_every_family(family: str) -> None:
    text = on(r"^(model\.layers\.1|model\.norm|lm_head)$", "cuda:1") + MODEL + MOE
    plan = plan_of(text, 2, family)
    assert stages(plan) == [("cuda:0", (0,), "model.embed_tokens"), ("cuda:1", (1,), "model.norm", "lm_head")]
    assert {m.device for m in plan.modules if m.name.startswith("model.layers.1.")} == {"cuda:1"}
    placed = place(plan)
    assert placed is not None and placed.of("model.rotary_emb") == "cuda:0"
    assert placed.of("model.layers.1.self_attn.rotary_emb") == "cuda:1"


def test_embedding_and_head_are_where_their_rule_says() -> None:
    last = on(r"^model\.layers\.[34]$", "cuda:1")
    assert stages(plan_of(last + MODEL + MOE)) == [
        ("cuda:0", (0, 1, 2), "model.embed_tokens"), ("cuda:1", (3, 4)), ("cuda:0", (), "model.norm", "lm_head"),
    ]  # fmt: skip
    apart = on("embed_tokens", "cuda:2") + on("lm_head", "cuda:0") + on(r"^model\.norm$", "cuda:1")
    assert stages(plan_of(apart + last + MODEL + MOE)) == [
        ("cuda:2", (), "model.embed_tokens"), ("cuda:0", (0, 1, 2)), ("cuda:1", (3, 4), "model.norm"),
        ("cuda:0", (), "lm_head"),
    ]  # fmt: skip
    backwards = on(r"^model\.layers\.[34]$", "cuda:0") + MODEL.replace("cuda:0", "cuda:1") + MOE
    assert [s[:2] for s in stages(plan_of(backwards))][:2] == [("cuda:1", (0, 1, 2)), ("cuda:0", (3, 4))]


def test_what_no_rule_decides_follows_its_layer() -> None:
    attention = [on(rf"^model\.layers\.{layer}\.self_attn$", device) for layer, device in
                 ((0, "cuda:0"), (1, "cuda:0"), (3, "cuda:1"), (4, "cuda:1"))]  # fmt: skip
    plan = plan_of("".join(attention) + MOE)
    assert stages(plan) == [("cuda:0", (0, 1, 2), "model.embed_tokens"), ("cuda:1", (3, 4), "model.norm", "lm_head")]


def test_a_layer_on_two_gpus_names_both_rules() -> None:
    text = MODEL + on("none", "cuda:1").replace("replace", "optional: true\n  replace") + MOE
    text = MOE.replace("{class", "{device: cuda:1, class") + text.removesuffix(MOE)
    with pytest.raises(RecipeError) as caught:
        plan_of(text)
    assert caught.value.message == (
        "model.layers.0.mlp is on cuda:1 (rule 1 (r.yaml:1)) and the rest of model.layers.0 on cuda:0"
        " (rule 2 (r.yaml:3)); a layer is on one GPU"
    )


def test_a_gpu_that_takes_up_layers_again_names_both_rules() -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of(on(r"^model\.layers\.[12]$", "cuda:1") + MODEL + MOE)
    assert caught.value.message == (
        "model.layers.3 is on cuda:0 (rule 2 (r.yaml:3)) again, after model.layers.1 left it and model.layers.2 is on"
        " cuda:1 (rule 1 (r.yaml:1)); each GPU takes one range of layers"
    )
    assert "one contiguous range per GPU" in str(caught.value.hint)


def test_the_cpu_in_between_is_refused_at_once() -> None:
    text = on(r"^model\.layers\.[34]$", "cuda:1") + on(r"\.1\.input_layernorm$", "cpu") + MODEL + MOE
    with pytest.raises(RecipeError, match=r"layers\.1\.input_layernorm is on the cpu \(rule 2 \(r\.yaml:3\)\)"):
        plan_of(text)


def test_a_plan_from_a_bundle_is_judged_again() -> None:
    plan = plan_of(on(r"^model\.layers\.[34]$", "cuda:1") + MODEL + MOE)
    data = json.loads(json.dumps(plan.to_json()))
    for module in data["modules"]:
        if ".layers.1." in module["name"]:
            module["device"] = "cuda:1"
    with pytest.raises(KtcError, match=r"model\.layers\.2 is on cuda:0 again, after model\.layers\.1 left it"):
        place(Plan.from_json(data))


def test_what_ktc_plan_shows(tmp_path: Path) -> None:
    plan = plan_of(on(r"^(model\.layers\.[34]|model\.norm|lm_head)$", "cuda:1") + MODEL + MOE)
    lines = {line.split("  ")[1]: line for line in render(plan).splitlines() if line.startswith("  device ")}
    assert lines["device cuda:0"].endswith(": layers 0-2, model.embed_tokens")
    assert lines["device cuda:1"].endswith(": layers 3-4, model.norm, lm_head")
    totals = plan.device_bytes()
    assert sum(totals.values()) == sum(m.nbytes for m in plan.modules) and min(totals.values()) > 0
    one = plan_of(MODEL + MOE)
    assert sum(one.device_bytes().values()) == sum(totals.values())
    assert ": layers" not in render(one)
