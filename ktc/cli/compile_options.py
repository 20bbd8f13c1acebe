"""Options of the commands that plan or pack. Parsing and naming only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def recipe_options(function: F) -> F:
    """--recipe, --nodes."""
    for option in reversed(
        (
            click.option(
                "--recipe",
                "-r",
                default="int4",
                show_default=True,
                help="Recipe file, or the name of a shipped recipe.",
            ),
            click.option(
                "--nodes",
                "-n",
                type=click.IntRange(min=1),
                default=1,
                show_default=True,
                help="NUMA nodes to split every expert over.",
            ),
        )
    ):
        function = option(function)
    return function


def kernel_options(default: str) -> Callable[[F], F]:
    """--variants, --no-kernels, --jobs; `chosen_variants` reads the first two.

    Args:
        default: which variants are built without --variants, for the help.
    """

    def decorate(function: F) -> F:
        for option in reversed(
            (
                click.option(
                    "--variants", metavar="LIST", help=f"Kernel variants, comma separated.  [default: {default}]"
                ),
                click.option(
                    "--no-kernels", is_flag=True, help="Leave kernels out; they are then built where the bundle runs."
                ),
                click.option("--jobs", "-j", type=click.IntRange(min=1), help="Worker threads.  [default: cores]"),
            )
        ):
            function = option(function)
        return function

    return decorate


def chosen_variants(text: str | None, none: bool) -> list[str] | None:
    """`amx,avx2` -> names; None = the default choice.

    Raises:
        click.UsageError: an unknown variant, or both options.
    """
    if none:
        if text is not None:
            raise click.UsageError("give either --variants or --no-kernels")
        return []
    if text is None:
        return None
    from ktc.codegen.variants import VARIANTS

    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or not names:
        raise click.UsageError(
            f"no kernel variant {', '.join(map(repr, unknown or [text]))}; there are {', '.join(VARIANTS)}"
        )
    return names


def shown_path(path: Path) -> str:
    """As short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
