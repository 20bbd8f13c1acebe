"""Options of the emulated device for `ktc run`, and the loading that goes with them. Parsing only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

DEVICE_HELP = "emulate:PROFILE: time decoding with the device of a hardware profile (docs/emulate.md)."


def device_options(function: F) -> F:
    """--device, --trace."""
    for option in reversed(
        (
            click.option("--device", metavar="emulate:PROFILE", help=DEVICE_HELP),
            click.option(
                "--trace",
                type=click.Path(dir_okay=False, path_type=Path),
                help="With --device: write the last decode steps as a Perfetto trace.",
            ),
        )
    ):
        function = option(function)
    return function


def load_emulated(bundle: Path, verbose: int, device: str, graph: str, n_skipped: int, **options: Any) -> Any:
    """Open on the emulated device; report on stderr as `load_native` does.

    Raises:
        click.UsageError: together with --graph off or --skip.
    """
    from ktc.emulate.model import open_emulated, parse_device
    from ktc.progress import set_verbosity, verbosity

    if graph == "off":
        raise click.UsageError("--device emulate:... needs the graph: leave out --graph off")
    if n_skipped:
        raise click.UsageError("--device emulate:... times deferred experts, not skipped ones: leave out --skip")
    set_verbosity(verbose)
    model = open_emulated(bundle, parse_device(device), **options)
    report = model.ktc_report
    assert report is not None
    for line in report.lines() if verbosity() else [f"ktc: note: {reason}" for reason in report.degraded]:
        print(line, file=sys.stderr)
    return model


def finish_emulated(model: Any, trace: Path | None) -> None:
    """Print the figures on stderr and write the trace."""
    print(model.summary(), file=sys.stderr)
    if trace is not None:
        model.write_trace(trace)
