"""Where `--recipe` looks: a file first, then the shipped recipes."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from ktc.errors import RecipeError
from ktc.recipe import load_recipe, parse_recipe, shipped, shipped_recipes

ONE_RULE = "- match: {role: moe}\n  replace: {class: default}\n"


def test_shipped_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"bf16", "fp32", "int4", "int8", "paper-deepseek-v2", "paper-deepseek-v3"} <= set(shipped_recipes())
    for name in ("int4", "int4.yaml", "recipes/int4.yaml"):
        recipe = load_recipe(name)
        assert (recipe.name, recipe.file) == ("int4", "int4.yaml")


def test_a_file_of_the_same_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "int4.yaml").write_text(ONE_RULE)
    assert len(load_recipe("int4.yaml").rules) == 1
    assert load_recipe("int4.yaml").text == ONE_RULE


def test_installed_recipes_win_over_a_source_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "recipes").mkdir(parents=True)
    (tmp_path / "data" / "recipes" / "mine.yaml").write_text(ONE_RULE)
    monkeypatch.setattr(shipped, "ROOTS", (tmp_path / "absent", tmp_path / "data"))
    assert list(shipped_recipes()) == ["mine"]
    assert load_recipe("mine").name == "mine"


def test_unknown_name_lists_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe("int5")
    assert "no recipe file 'int5'" in caught.value.message
    assert "did you mean int" in str(caught.value.hint)
    assert "bf16, fp32, int4-cuda, int4, int8" in str(caught.value.hint)
    with pytest.raises(RecipeError, match="no recipe file"):
        load_recipe("elsewhere/int4.yaml")  # another folder was asked for: no guessing


def test_not_a_recipe_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is a directory"):
        load_recipe(tmp_path)
    binary = tmp_path / "r.yaml"
    binary.write_bytes(b"- match\xff")
    with pytest.raises(RecipeError, match="bad UTF-8 at byte 7"):
        load_recipe(binary)
    binary.write_bytes(b"#" * ((1 << 20) + 10))
    with pytest.raises(RecipeError, match="larger than 1 MB"):
        load_recipe(binary)


def test_errors_name_the_path_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("- match: {rol: moe}\n  replace: {class: default}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.message.startswith(f"{path}:1:11: ")


def test_recipes_in_the_documentation_parse() -> None:
    """docs/recipes.md: every YAML block is a recipe, and the paper's is the one that is shipped."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
    blocks = [textwrap.dedent(b.split("```")[0]) for b in text.split("```yaml\n")[1:]]
    example, callback, hot, paper = (parse_recipe(block, "docs/recipes.md") for block in blocks)
    assert [r.operator for r in example.rules] == ["moe", "linear"]
    assert callback.rules[0].callback and callback.rules[0].operator == "hf"
    assert (hot.rules[0].hot_experts, hot.rules[0].hot_profile) == (8, "use.json")
    shipped = load_recipe("paper-deepseek-v3")
    assert [replace(r, line=0) for r in paper.rules] == [replace(r, line=0) for r in shipped.rules]


def test_paper_recipes_differ_in_one_line() -> None:
    """The paper's claim: porting the recipe to DeepSeek-V2 changes one line."""
    three, two = (shipped_recipes()[f"paper-deepseek-{v}"].read_text().splitlines() for v in ("v3", "v2"))
    different = [(a, b) for a, b in zip(three, two, strict=True) if a != b]
    assert len(different) == 1
    assert "modeling_deepseek_v3.DeepseekV3MoE" in different[0][0]
    assert "modeling_deepseek_v2.DeepseekV2Moe" in different[0][1]
