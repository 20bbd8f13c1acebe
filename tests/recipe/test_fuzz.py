"""Whatever the file holds, a recipe parses or is refused with a RecipeError: nothing else escapes."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ktc.errors import RecipeError
from ktc.recipe import Recipe, parse_recipe, shipped_recipes

INT4 = shipped_recipes()["int4"].read_text()
JUNK = ["~", "[]", "{}", "-", ":", "'", "&a", "*a", "!!binary x", "!!set {a}", "2020-99-99", ".nan", "<<", "\t"]


def parses_or_refuses(text: str) -> None:
    try:
        assert isinstance(parse_recipe(text, "f.yaml"), Recipe)
    except RecipeError as error:
        assert error.message.startswith("f.yaml")


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=80))
@example("\x00")
@example("? [a]\n: b")
@example("--- a\n--- b")
@example("- !!timestamp 2020-99-99")
def test_any_text(text: str) -> None:
    parses_or_refuses(text)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_recipe(data: st.DataObject) -> None:
    """A shipped recipe with a piece cut out or junk put in."""
    begin = data.draw(st.integers(0, len(INT4)))
    end = data.draw(st.integers(begin, min(len(INT4), begin + 30)))
    parses_or_refuses(INT4[:begin] + data.draw(st.sampled_from(["", *JUNK])) + INT4[end:])
