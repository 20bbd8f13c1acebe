"""Recipes: what the user wants every module to become. YAML in, `Recipe` out; no model needed.

`load_recipe` finds and reads a file or a shipped recipe, `parse_recipe` reads text. The grammar is
`schema.json`; docs/recipes.md explains it. `ktc.plan` applies a recipe to a model. The parser is imported
when it is first used: running a bundle needs `Recipe` only, and starts a tenth of a second earlier without YAML.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ktc.recipe.model import Match, Recipe, Rule, SchemeChoice

if TYPE_CHECKING:
    from ktc.recipe.find import load_recipe, shipped_recipes
    from ktc.recipe.parse import parse_recipe

__all__ = ["Match", "Recipe", "Rule", "SchemeChoice", "load_recipe", "parse_recipe", "shipped_recipes"]

_LATER = {"load_recipe": "find", "shipped_recipes": "find", "parse_recipe": "parse"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ktc.recipe.{_LATER[name]}"), name)
