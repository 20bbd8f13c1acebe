"""`ktc tune`: measure the crossover between vector and tile kernels here, and store it for every later run."""

from __future__ import annotations

import json

import click

from ktc.errors import KtcError
from ktc.progress import Progress, set_verbosity


@click.command("tune")
@click.option("--format", "formats", default="int4,int8,bf16", show_default=True, help="Formats to measure.")
@click.option("--seconds", type=click.FloatRange(min=0.0), default=0.15, show_default=True, help="Per measured figure.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: usable CPUs.")
@click.option("--show", is_flag=True, help="Print what is stored; measure nothing.")
@click.option("--dry-run", is_flag=True, help="Measure and print; store nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-v", "--verbose", count=True)
def command(
    formats: str, seconds: float, threads: int | None, show: bool, dry_run: bool, as_json: bool, verbose: int
) -> None:
    """Find the tokens per expert from which AMX kernels beat AVX-512 ones on this machine (about a minute).

    The result is stored with a fingerprint of the machine in ~/.config/ktc/tune.json (KTC_CONFIG_DIR) and used by
    every later run; without it, kernels choose by built-in defaults.
    """
    set_verbosity(verbose)
    from ktc.perf import tuning

    if show:
        known = tuning.load()
        record = {"applied": known.applied, "min_rows": known.min_rows, "source": known.source}
        click.echo(json.dumps(record, indent=1) if as_json else str(known))
        return
    from ktc.perf import crossover
    from ktc.perf.report import table

    wanted = [f for f in formats.replace(",", " ").split() if f]
    with Progress("tune", len(wanted) * len(crossover.ROWS), "figures") as progress:
        found = crossover.measure(wanted, seconds=seconds, threads=threads, tick=lambda what: progress.update(1, what))
    if not found:
        raise KtcError(
            "this machine has one kind of kernel only: there is nothing to choose between",
            "ktc doctor shows which kernels run here",
        )
    min_rows = {c.prefix: c.min_rows for c in found}
    path = None if dry_run else tuning.store(min_rows, {c.format: c.to_json() for c in found})
    if as_json:
        click.echo(json.dumps({"min_rows": min_rows, "measured": [c.to_json() for c in found]}, indent=1))
        return
    for c in found:
        body = [[str(r), f"{v:.3g}", f"{t:.3g}"] for r, v, t in zip(c.rows, c.vector_ms, c.tile_ms, strict=True)]
        click.echo(table([f"{c.format}: tokens per expert", f"{c.vector} ms", f"{c.tile} ms"], body))
        where = "never here" if c.min_rows == crossover.NEVER else f"from {c.min_rows} tokens per expert"
        click.echo(f"{c.tile} {where}\n")
    click.echo(f"stored in {path}" if path else "not stored (--dry-run)")
