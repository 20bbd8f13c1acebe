"""`ktc tune`: measure this machine once: which kernels win when, and a hardware profile for `ktc simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktc.cli.values import FiniteRange, names
from ktc.progress import Progress, set_verbosity, status

if TYPE_CHECKING:
    from ktc.perf.crossover import Crossover


@click.command("tune")
@click.option("--format", "formats", default="int4,int8,bf16", show_default=True, help="Formats to measure.")
@click.option("--seconds", type=FiniteRange(min=0.0), default=0.15, show_default=True, help="Per measured figure.")
@click.option("--threads", type=click.IntRange(min=1), help="Of the crossover.  [default: usable CPUs]")
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the hardware profile here.  [default: this-machine.yaml beside tune.json]",
)
@click.option("--no-profile", is_flag=True, help="Measure the crossovers only.")
@click.option("--show", is_flag=True, help="Print what is stored; measure nothing.")
@click.option("--dry-run", is_flag=True, help="Measure and print; store nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-v", "--verbose", count=True)
def command(
    formats: str,
    seconds: float,
    threads: int | None,
    profile_path: Path | None,
    no_profile: bool,
    show: bool,
    dry_run: bool,
    as_json: bool,
    verbose: int,
) -> None:
    """Find the tokens per expert from which AMX kernels beat AVX-512 ones on this machine, and measure a hardware
    profile of it (a minute or two).

    The crossovers are stored with a fingerprint of the machine in ~/.config/ktc/tune.json (KTC_CONFIG_DIR) and used by
    every later run; without them, kernels choose by built-in defaults. The profile is written beside them:
    `ktc simulate MODEL --hardware this-machine`.
    """
    set_verbosity(verbose)
    from ktc.perf import tuning

    if show:
        known = tuning.load()
        record = {"applied": known.applied, "min_rows": known.min_rows, "source": known.source}
        click.echo(json.dumps(record, indent=1) if as_json else str(known))
        return
    if profile_path is not None and no_profile:
        raise click.UsageError("--profile and --no-profile exclude each other")
    from ktc.perf import crossover

    wanted = names(formats)
    with Progress("tune", len(wanted) * len(crossover.ROWS), "figures") as progress:
        found = crossover.measure(wanted, seconds=seconds, threads=threads, tick=lambda what: progress.update(1, what))
    stored = None if dry_run or not found else _store(found)
    profile = None
    if not no_profile:
        from ktc.perf.machine_profile import measure_machine

        with status("hardware profile"):
            int8_tiles = [c.min_rows for c in found if c.format in ("int4", "int8")]
            profile = measure_machine(wanted, min(int8_tiles, default=None), seconds=2 * seconds)
    written = None if dry_run or profile is None else profile.write(profile_path)
    if as_json:
        record = {c.prefix: c.min_rows for c in found}
        data: dict[str, Any] = {"min_rows": record, "measured": [c.to_json() for c in found]}
        click.echo(json.dumps(data | ({"profile": profile.fields} if profile else {}), indent=1))
        return
    _print_crossovers(found)
    click.echo("not stored (--dry-run)" if dry_run else f"stored in {stored}" if stored else "no crossover to store")
    if profile is not None:
        click.echo("\n" + profile.yaml())
        click.echo("not written (--dry-run)" if dry_run else f"written to {written}")


def _store(found: list[Crossover]) -> Path:
    from ktc.perf import tuning

    return tuning.store({c.prefix: c.min_rows for c in found}, {c.format: c.to_json() for c in found})


def _print_crossovers(found: list[Crossover]) -> None:
    from ktc.perf.crossover import NEVER
    from ktc.perf.report import table

    if not found:
        click.echo("this machine has one kind of kernel only: there is nothing to choose between")
    for c in found:
        body = [[str(r), f"{v:.3g}", f"{t:.3g}"] for r, v, t in zip(c.rows, c.vector_ms, c.tile_ms, strict=True)]
        click.echo(table([f"{c.format}: tokens per expert", f"{c.vector} ms", f"{c.tile} ms"], body))
        where = "never here" if c.min_rows == NEVER else f"from {c.min_rows} tokens per expert"
        click.echo(f"{c.tile} {where}\n")
