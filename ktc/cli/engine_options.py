"""Options and loading shared by the commands that run a bundle. Parsing only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ktc.codegen.variants import VARIANTS

F = TypeVar("F", bound=Callable[..., Any])


def engine_options(function: F) -> F:
    """--threads, --variant, --kernel, --kernel-library, --emulate-nodes, --trust-kernel, --strict, -v."""
    for option in reversed(
        (
            click.option("--threads", type=click.IntRange(min=1), help="Threads; default: the CPUs of this process."),
            click.option(
                "--variant", type=click.Choice(list(VARIANTS)), help="Kernel variant; default: the best for this CPU."
            ),
            click.option(
                "--kernel", "force_kernel", default="", metavar="TEXT", help="Force kernels whose name holds TEXT."
            ),
            click.option(
                "--kernel-library",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="Use this kernel library instead of the bundle's.",
            ),
            click.option(
                "--emulate-nodes", is_flag=True, help="Run a bundle made for another number of NUMA nodes, slower."
            ),
            click.option(
                "--trust-kernel",
                "trust_sha256",
                multiple=True,
                metavar="SHA256",
                help="Load the bundle's kernel library with this hash.",
            ),
            click.option(
                "--strict",
                is_flag=True,
                help="Fail where a note would say: slower than this machine could, or not as asked.",
            ),
            click.option("-v", "verbose", count=True, help="Say what every layer runs on; more: more."),
        )
    ):
        function = option(function)
    return function


def load_model(bundle: Path, verbose: int, **options: Any) -> Any:
    """Load for the command line: report on stderr, complaints about slower-than-possible always."""
    from ktc.engine import load
    from ktc.engine.lane import quiet_openmp
    from ktc.progress import set_verbosity, verbosity

    set_verbosity(verbose)
    quiet_openmp()  # before torch is imported
    model = load(bundle, **options)
    report = model.ktc_report
    if verbosity():
        print("\n".join(report.lines()), file=sys.stderr)
    else:
        for reason in report.degraded:
            print(f"ktc: note: {reason}", file=sys.stderr)
    return model
