"""Recipes: what the user wants every module to become. YAML in, `Recipe` out; no model needed.

`load_recipe` finds and reads a file or a shipped recipe, `parse_recipe` reads text. The grammar is
`schema.json`; docs/recipes.md explains it. `ktc.plan` applies a recipe to a model.
"""

from ktc.recipe.find import load_recipe, shipped_recipes
from ktc.recipe.model import Match, Recipe, Rule, SchemeChoice
from ktc.recipe.parse import parse_recipe

__all__ = ["Match", "Recipe", "Rule", "SchemeChoice", "load_recipe", "parse_recipe", "shipped_recipes"]
