"""The table of `ktc plan`: grouping over layers, totals, kept and noted modules."""

from __future__ import annotations

from ktc.plan import build_plan, render
from ktc.recipe import load_recipe, parse_recipe
from tests.tiny import tiny_config


def test_groups_and_totals() -> None:
    plan = build_plan(
        tiny_config("qwen3_moe", num_hidden_layers=5, mlp_only_layers=[1, 3]), load_recipe("int8"), nodes=1
    )
    text = render(plan)
    assert "model.layers.{0-4/2}.mlp " in text and "model.layers.{1,3}.mlp.gate_proj" in text
    # 3 MoE layers x 8 experts x ([128, 64] + [64, 64] bytes, and a float per row)
    expected = 3 * 8 * (128 * 64 + 64 * 64 + 4 * (128 + 64))
    assert plan.expert_bytes(0) == expected
    assert f"experts, node 0  {expected / 1024:.0f} KiB  intermediate columns 0..64" in text
    total = expected + sum(plan.device_bytes().values())
    assert f"total            {total / 1024:.0f} KiB" in text
    assert "padded: intermediate size 32 is stored as 64" in text


def test_verbose_has_one_row_per_module() -> None:
    plan = build_plan(tiny_config("qwen3_moe"), load_recipe("int8"))
    table = render(plan, verbose=True).split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table[1:]] == [m.name for m in plan.modules]


def test_what_a_rule_keeps_is_said() -> None:
    recipe = parse_recipe("- match: {class: torch.nn.Linear}\n  replace: {class: default}\n", "keep.yaml", "keep")
    text = render(build_plan(tiny_config("qwen3_moe"), recipe))
    assert "HF Linear (kept) [64, 64] bf16" in text
    assert "rule 1 (keep.yaml:1)  class=torch.nn.Linear  -> default  9 modules, kept as Hugging Face's own" in text
    assert "no module became ktc.FusedMoE: Hugging Face's own experts run" in text


def test_bytes_count_what_the_rows_show() -> None:
    """The rows add up to the total, whatever the units: checked on the plan that the text is made from."""
    plan = build_plan(tiny_config("granitemoe"), load_recipe("int4"), nodes=1)
    assert sum(plan.device_bytes().values()) == sum(m.nbytes for m in plan.modules)
    assert "packed copy of model.embed_tokens.weight, to which it is tied (1 module, " in render(plan)
