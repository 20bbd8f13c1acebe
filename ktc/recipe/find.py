"""Find a recipe by path or by the name of a shipped one. Reading only; parsing is in parse.py."""

from __future__ import annotations

import difflib
from pathlib import Path

from ktc.errors import RecipeError
from ktc.paths import expand
from ktc.recipe.model import Recipe
from ktc.recipe.parse import parse_recipe
from ktc.recipe.yaml_marks import MAX_BYTES

_PACKAGE = Path(__file__).resolve().parent.parent
# Installed wheel first, then a source checkout.
_SHIPPED_DIRS = (_PACKAGE / "_data" / "recipes", _PACKAGE.parent / "recipes")


def shipped_recipes() -> dict[str, Path]:
    """Name without suffix -> file, for every recipe that comes with ktc."""
    for folder in _SHIPPED_DIRS:
        if folder.is_dir():
            return {f.stem: f for f in sorted(folder.glob("*.yaml"))}
    return {}


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read a recipe.

    Args:
        path_or_name: a file; or `int4` / `int4.yaml` / `recipes/int4.yaml` for a shipped recipe, used
            only when there is no such file.
    Raises:
        RecipeError: not found (lists the shipped ones), unreadable, or faulty.
    """
    given = expand(path_or_name)
    path = _find(given)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise RecipeError(f"{path}: larger than {MAX_BYTES >> 20} MB", "is this the right file?")
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a text file (bad UTF-8 at byte {error.start})") from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_recipe(text, str(path) if path == given else path.name, default_name=path.stem)


def _find(given: Path) -> Path:
    if given.is_file():
        return given
    if given.is_dir():
        raise RecipeError(f"{given}: is a directory, not a recipe")
    shipped = shipped_recipes()
    by_name = given.parent in (Path(), Path("recipes")) and given.suffix in ("", ".yaml")
    if by_name and given.stem in shipped:
        return shipped[given.stem]
    near = difflib.get_close_matches(given.stem, shipped, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(
        f"no recipe file '{given}' and no shipped recipe of that name",
        f"{guess}shipped recipes: {', '.join(shipped) or 'none found'}",
    )
