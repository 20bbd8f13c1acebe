"""Rules over a real module tree: who decides what, what is protected, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ktc.errors import KtcError, RecipeError, UnsupportedModelError
from ktc.plan import Plan, build_plan
from ktc.recipe import load_recipe, parse_recipe
from tests.tiny import TINY, tiny_config

MOE = "- match: {role: moe}\n  replace: {class: ktc.FusedMoE, kwargs: {data_type: int4}}\n"
LINEAR = "- match: {role: linear}\n  replace: {class: ktc.Linear, kwargs: {data_type: int8}}\n"


def plan_of(family: str, recipe: str, nodes: int = 1, **overrides: Any) -> Plan:
    return build_plan(tiny_config(family, **overrides), parse_recipe(recipe, "r.yaml"), nodes)


def refused(family: str, recipe: str, nodes: int = 1, **overrides: Any) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        plan_of(family, recipe, nodes, **overrides)
    return caught.value


def by_name(plan: Plan) -> dict[str, Any]:
    return {m.name: m for m in plan.modules}


@pytest.mark.parametrize("recipe", ["int4", "int8", "bf16", "fp32"])
@pytest.mark.parametrize("family", sorted(TINY))
def test_shipped_recipes_fit_every_family(family: str, recipe: str) -> None:
    config = tiny_config(family)
    plan = build_plan(config, load_recipe(recipe), nodes=1)
    moes = plan.moe_modules()
    assert moes and all(m.moe.data_type == recipe for m in moes if m.moe)
    modules = by_name(plan)
    assert modules["lm_head"].operator == "linear"
    assert modules["lm_head"].linear.data_type == ("int8" if recipe == "int4" else recipe)
    assert modules["model.embed_tokens"].operator == "embedding"
    routers = [m for m in plan.modules if m.role == "router"]
    assert len(routers) == len(moes) and all(m.operator == "hf" for m in routers)
    assert not any(m.operator == "linear" for m in plan.modules if m.role == "protected_linear")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_deepseek_v3_module_by_module() -> None:
    plan = plan_of("deepseek_v3", load_recipe("int8").text)
    modules = by_name(plan)
    assert (plan.model_type, plan.architecture, plan.layers) == ("deepseek_v3", "DeepseekV3ForCausalLM", 2)
    attention = modules["model.layers.1.self_attn"]
    assert (attention.operator, attention.role, attention.nbytes, attention.params) == ("mla", "mla", 0, {})
    moe = modules["model.layers.1.mlp"].moe
    assert (moe.experts, moe.top_k, moe.hidden, moe.intermediate, moe.splits) == (8, 2, 64, 32, ((0, 64),))
    assert "model.layers.1.mlp.experts" not in modules  # swallowed by the MoE block
    gate = modules["model.layers.1.mlp.gate"]
    assert gate.params == {"weight": ((8, 64), "fp32"), "e_score_correction_bias": ((8,), "fp32")}
    assert gate.nbytes == 4 * (8 * 64 + 8)
    assert modules["model.layers.1.mlp.shared_experts.gate_proj"].operator == "linear"
    assert modules["model.layers.0.mlp.gate_proj"].linear.n == 96
    kv_b = modules["model.layers.0.self_attn.kv_b_proj"]
    assert (kv_b.operator, kv_b.role, kv_b.rule) == ("hf", "protected_linear", None)
    # int8, one scale per row: 32-row blocks of 64 columns, and 4 bytes per row
    assert modules["model.layers.0.self_attn.o_proj"].nbytes == 64 * 64 + 4 * 64


def test_first_match_wins_and_unmatched_modules_stay() -> None:
    first = "- match: {name: 'layers.0.*o_proj$'}\n  replace: {class: ktc.Linear, kwargs: {data_type: bf16}}\n"
    modules = by_name(plan_of("qwen3_moe", first + LINEAR))
    assert modules["model.layers.0.self_attn.o_proj"].linear.data_type == "bf16"
    assert modules["model.layers.1.self_attn.o_proj"].linear.data_type == "int8"
    assert (modules["lm_head"].operator, modules["lm_head"].rule) == ("hf", None)
    # no rule for the MoE block: Hugging Face's experts stay, with their weights on the device
    assert modules["model.layers.0.mlp.experts"].params["gate_up_proj"] == ((8, 64, 64), "bf16")


def test_the_walk_goes_on_unless_recursive_is_false() -> None:
    assert by_name(plan_of("deepseek_v3", MOE + LINEAR))["model.layers.1.mlp.shared_experts.up_proj"].rule == 1
    closed = MOE + "  recursive: false\n" + LINEAR
    inside = by_name(plan_of("deepseek_v3", closed))["model.layers.1.mlp.shared_experts.up_proj"]
    assert (inside.operator, inside.rule) == ("hf", 0)


def test_default_keeps_hugging_face_and_says_which_rule() -> None:
    keep = "- match: {name: 'self_attn$'}\n  replace: {class: default}\n  recursive: false\n"
    plan = plan_of("deepseek_v3", keep + LINEAR)
    modules = by_name(plan)
    assert (modules["model.layers.0.self_attn.o_proj"].operator, modules["model.layers.0.self_attn.o_proj"].rule) == (
        "hf",
        0,
    )
    assert plan.rules[0].modules == 2
    assert modules["model.layers.0.mlp.gate_proj"].operator == "linear"


def test_a_device_holds_for_the_subtree_until_another_rule() -> None:
    text = MOE.replace("kwargs", "device: cuda, kwargs") + LINEAR.replace("kwargs", "device: cpu, kwargs")
    modules = by_name(plan_of("deepseek_v3", text))
    assert modules["model.layers.1.mlp"].device == "cuda:0"
    assert modules["model.layers.1.mlp.gate"].device == "cuda:0"
    assert modules["model.layers.1.mlp.shared_experts.up_proj"].device == "cpu"
    assert modules["model.norm"].device == "cpu"


def test_tied_head() -> None:
    """granitemoe ties lm_head to the embedding: stored once, unless the head is packed."""
    kept = by_name(plan_of("granitemoe", MOE))
    assert (kept["lm_head"].params, kept["lm_head"].nbytes) == ({}, 0)
    assert kept["lm_head"].note == "tied to model.embed_tokens.weight"
    plan = plan_of("granitemoe", load_recipe("int4").text)
    assert plan.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    head = by_name(plan)["lm_head"]
    assert head.operator == "linear" and "packed copy of model.embed_tokens.weight" in head.note


def test_protected_linears_are_left_alone_and_noted() -> None:
    """The paper's third rule also matches kv_b_proj (deepseek) and shared_expert_gate (qwen2)."""
    every = LINEAR.replace("role: linear", "name: '^(?!lm_head$).*', class: torch.nn.Linear")
    for family, name in (
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate"),
    ):
        plan = plan_of(family, every)
        module = by_name(plan)[name]
        assert (module.operator, module.rule) == ("hf", None)
        assert module.note.startswith("protected: kept as it is although rule 1 (r.yaml:1) matches it")
        assert plan.rules[0].protected == 2
    error = refused("deepseek_v3", every.replace("^(?!lm_head$).*", "kv_b_proj$"))
    assert (
        "rule 1 (r.yaml:1): matches only protected modules, such as model.layers.0.self_attn.kv_b_proj" in error.message
    )


# ---- failure C7: a MoE config silently built as something else -- a rule that does nothing is an error ----------


def test_c7_a_rule_that_matches_nothing() -> None:
    wrong = MOE.replace("role: moe", "class: modeling_deepseek_v2.DeepseekV2MoE")
    error = refused("deepseek_v3", LINEAR + wrong)
    assert error.message.startswith("rule 2 (r.yaml:3): matches no module of this deepseek_v3 model: class=")
    assert "DeepseekV3MoE" in str(error.hint) and "optional: true" in str(error.hint)
    optional = plan_of("deepseek_v3", LINEAR + wrong + "  optional: true\n")
    assert [r.modules for r in optional.rules] == [14, 0]
    error = refused("deepseek_v3", "- match: {role: attention, name: layers.0.}\n  replace: {class: default}\n")
    assert "layers.0.self_attn is of role mla here" in str(error.hint)


def test_c7_a_rule_that_is_always_too_late() -> None:
    error = refused("qwen3_moe", LINEAR + LINEAR.replace("role: linear", "name: o_proj$"))
    assert "rule 2 (r.yaml:3): decides no module: rule 1 (r.yaml:1) already took everything" in error.message


def test_c7_dense_and_unknown_models() -> None:
    recipe = parse_recipe(MOE)
    with pytest.raises(UnsupportedModelError, match="dense"):
        build_plan({"model_type": "llama", "hidden_size": 64}, recipe)
    with pytest.raises(UnsupportedModelError, match="does not know"):
        build_plan({"model_type": "newmoe", "num_experts": 8}, recipe)
    with pytest.raises(UnsupportedModelError, match="without a single DeepseekV3MoE"):
        plan_of("deepseek_v3", MOE, first_k_dense_replace=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "wide"),
        ("hidden_size", -5),
        ("num_attention_heads", 0),
        ("vocab_size", 0),
        ("moe_intermediate_size", 0),
        ("moe_intermediate_size", 2.5),
        ("rope_scaling", {"type": "spiral"}),
        ("qk_rope_head_dim", -1),
        ("kv_lora_rank", None),
    ],
)
def test_a_nonsensical_config_is_no_bug_of_ktc(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        build_plan({"model_type": "deepseek_v3", **TINY["deepseek_v3"], key: value}, load_recipe("int4"))


@pytest.mark.parametrize(
    ("rule", "message", "hint"),
    [
        (
            LINEAR.replace("role: linear", "name: self_attn"),
            "also matches model.layers.0.self_attn (",
            "class: torch.nn",
        ),
        (LINEAR.replace("role: linear", "role: moe"), "also matches model.layers.0.mlp (", "class: torch.nn.Linear"),
        (MOE.replace("role: moe", "name: 'layers.0$'"), "ktc.FusedMoE cannot replace model.layers.0 (", "role: moe"),
        ("- match: {role: attention}\n  replace: {class: ktc.MLAAttention}\n", "cannot replace", "no latent attention"),
        (
            "- match: {role: lm_head}\n  replace: {class: ktc.Embedding}\n",
            "cannot replace lm_head (Linear",
            "embedding",
        ),
    ],
)
def test_operators_only_where_they_compute_the_same(rule: str, message: str, hint: str) -> None:
    error = refused("qwen3_moe", rule)
    assert message in error.message and hint in str(error.hint)


@pytest.mark.parametrize("n", [0, 1, 2, "auto"])
def test_deferral_keeps_two_immediate(n: object) -> None:
    deferral = MOE.replace("int4}", f"int4, n_deferred_experts: {n}}}")
    moe = plan_of("qwen3_moe", deferral, num_experts_per_tok=4).moe_modules()[0].moe
    assert moe is not None and moe.n_deferred_experts == n


def test_too_much_deferral() -> None:
    error = refused("qwen3_moe", MOE.replace("int4}", "int4, n_deferred_experts: 3}"), num_experts_per_tok=4)
    assert "3 of 4 experts per token would leave 1 immediate" in error.message
    assert "n_deferred_experts: 2 or fewer" in str(error.hint)
    error = refused("qwen3_moe", MOE.replace("int4}", "int4, n_deferred_experts: 9}"), num_experts_per_tok=1)
    assert "would leave 0 immediate" in error.message and "n_deferred_experts: 0 or" in str(error.hint)
    assert plan_of("qwen3_moe", MOE, num_experts_per_tok=1).moe_modules()  # deferring nothing is always fine


def test_nodes_must_be_positive() -> None:
    with pytest.raises(KtcError, match="0 NUMA nodes"):
        plan_of("qwen3_moe", MOE, nodes=0)
