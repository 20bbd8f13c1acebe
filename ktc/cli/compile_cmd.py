"""`ktc compile`: a checkpoint and a recipe become a bundle. Parses and prints; the passes are in ktc/compile.py."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktc.cli.compile_options import chosen_variants, kernel_options, recipe_options, shown_path
from ktc.host import this_host
from ktc.progress import counted, format_bytes, format_seconds, set_verbosity

if TYPE_CHECKING:
    from ktc.plan.ir import Plan


@click.command("compile")
@click.argument("checkpoint")
@recipe_options
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    help="The bundle.  [default: MODEL-RECIPE.ktc, RECIPE being the recipe's name:]",
)
@kernel_options("all that a host may choose")
@click.option("--allow-nonfinite", is_flag=True, help="Pack NaN and infinite weights instead of refusing them.")
@click.option("--no-logits", is_flag=True, help="Do not run the model to record logits for ktc verify.")
@click.option("--force", is_flag=True, help="Replace an existing bundle, or an unfinished one of other inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--verbose", "-v", count=True, help="Say what each pass does and how long it took.")
def command(
    checkpoint: str,
    recipe: str,
    out: Path | None,
    nodes: int,
    variants: str | None,
    no_kernels: bool,
    jobs: int | None,
    allow_nonfinite: bool,
    no_logits: bool,
    force: bool,
    as_json: bool,
    verbose: int,
) -> None:
    """Quantise and pack CHECKPOINT under a recipe, and build its kernels.

    CHECKPOINT is a directory, a Hugging Face Hub id or a short name. Interrupted, the same command continues.
    """
    set_verbosity(verbose)
    chosen = chosen_variants(variants, no_kernels)
    from ktc.compile import compile_checkpoint

    began = time.monotonic()
    made = compile_checkpoint(
        checkpoint,
        recipe,
        out,
        nodes=nodes,
        variants=chosen,
        jobs=jobs or 0,
        allow_nonfinite=allow_nonfinite,
        force=force,
        logits=not no_logits,
        say=lambda line: print(f"ktc: {line}", file=sys.stderr),
    )
    shown = shown_path(made.path)
    if as_json:
        fields = {
            "bundle": str(made.path),
            "bytes": made.size,
            "variants": list(made.variants),
            "source_bytes": made.source_bytes,
            "seconds": made.seconds,
            "seconds_in_all": round(time.monotonic() - began, 3),
            "peak_rss": made.peak_rss,
            "resumed": made.resumed,
        }
        click.echo(json.dumps(fields, indent=1))
        return
    moes = made.plan.moe_modules()
    scheme = moes[0].moe.scheme if moes[0].moe else ""
    speed = ""
    if made.source_bytes and made.seconds > 0:
        speed = (
            f", packed {format_bytes(made.source_bytes)} in {format_seconds(made.seconds)}"
            f" ({made.source_bytes / made.seconds / 1e9:.2f} GB/s)"
        )
    click.echo(
        f"{shown}: {format_bytes(made.size)}, {counted(len(moes), 'MoE layer')} in {scheme}, {counted(nodes, 'node')}"
    )
    click.echo(f"  kernels: {', '.join(made.variants) or 'none (built where it runs)'}")
    click.echo(f"  peak memory {format_bytes(made.peak_rss)}{speed}, {format_seconds(time.monotonic() - began)} in all")
    click.echo(f'next{_where(made.plan)}: ktc run {shlex.quote(shown)} -p "Once upon a time"')


def _where(plan: Plan) -> str:
    """On which machine the bundle runs, if it is not this one: the command shown would fail here."""
    host = this_host()
    if plan.uses_cuda() and not host.cuda:
        return " on a machine with a CUDA device, which this one is not"
    here = max(1, len(host.nodes))
    if plan.nodes == here:
        return ""
    nodes = f"{plan.nodes} NUMA node{'s' * (plan.nodes > 1)}"
    return f" on a machine with {nodes} (this one has {here}: add --emulate-nodes to try it here, slower)"
