"""Find a recipe by path or by the name of a shipped one. Reading only; parsing is in parse.py."""

from __future__ import annotations

from pathlib import Path

from ktc.errors import RecipeError
from ktc.recipe.model import Recipe
from ktc.recipe.parse import parse_recipe
from ktc.recipe.shipped import Shipped

_RECIPES = Shipped("recipe", Path("recipes"), RecipeError)


def shipped_recipes() -> dict[str, Path]:
    """Name without suffix -> file, for every recipe that comes with ktc."""
    return _RECIPES.files()


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read a recipe.

    Args:
        path_or_name: a file; or `int4` / `int4.yaml` / `recipes/int4.yaml` for a shipped recipe, used
            only when there is no such file.
    Raises:
        RecipeError: not found (lists the shipped ones), unreadable, or faulty.
    """
    text, file, name = _RECIPES.read(path_or_name)
    return parse_recipe(text, file, default_name=name)
