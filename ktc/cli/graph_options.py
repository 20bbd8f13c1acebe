"""Options of the native decode graph, and the choice between it and the eager modules. Parsing only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def graph_options(function: F, choices: Sequence[str] = ("auto", "on", "off"), more: str = "") -> F:
    """--graph, --context, --deferred, --skip.

    Args:
        choices: of --graph; `more` says what further ones do.
    """
    for option in reversed(
        (
            click.option(
                "--graph",
                type=click.Choice(choices),
                default="auto",
                help=f"Replay the bundle's decode graph, or run its modules in torch (off); auto: if it has one{more}.",
            ),
            click.option(
                "--context", type=click.IntRange(min=1), help="Positions of the caches; default: at most 8192."
            ),
            click.option(
                "--deferred",
                "n_deferred",
                type=click.IntRange(min=0),
                help="Experts of each MoE layer deferred by a layer while decoding; default: the recipe's.",
            ),
            click.option(
                "--skip",
                "n_skipped",
                type=click.IntRange(min=0),
                default=0,
                help="Drop the lowest experts of each MoE layer while decoding (to compare with --deferred).",
            ),
        )
    ):
        function = option(function)
    return function


def wants_graph(bundle: Path, graph: str, context: int | None, n_deferred: int | None, n_skipped: int) -> bool:
    """Whether to run the native graph.

    Raises:
        click.UsageError: --graph off together with an option that only the graph has.
    """
    needs = [
        name
        for name, given in (("--context", context), ("--deferred", n_deferred is not None), ("--skip", n_skipped))
        if given
    ]
    if graph == "off" and needs:
        raise click.UsageError(f"{needs[0]} needs the graph: leave out --graph off")
    return graph == "on" or bool(needs) or (graph == "auto" and (bundle / "graph" / "program.json").is_file())


def load_native(bundle: Path, verbose: int, **options: Any) -> Any:
    """Open for native replay; report on stderr, complaints about slower-than-possible always."""
    from ktc.native import open_native
    from ktc.progress import set_verbosity, verbosity

    set_verbosity(verbose)
    model = open_native(bundle, **options)
    report = model.ktc_report
    assert report is not None
    for line in report.lines() if verbosity() else [f"ktc: note: {reason}" for reason in report.degraded]:
        print(line, file=sys.stderr)
    return model
