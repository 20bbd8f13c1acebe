"""`ktc repack`: move a bundle to another number of NUMA nodes. Parses and prints; see ktc/bundle/repack.py."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from ktc.cli.compile_options import chosen_variants, kernel_options, shown_path
from ktc.progress import set_verbosity


@click.command("repack")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--nodes", "-n", type=click.IntRange(min=1), required=True, help="NUMA nodes to split every expert over.")
@click.option("--out", "-o", type=click.Path(path_type=Path), required=True, help="The new bundle.")
@kernel_options("those the bundle has")
@click.option("--force", is_flag=True, help="Replace an existing bundle at --out.")
@click.option("--verbose", "-v", count=True, help="Say what is done.")
def command(
    bundle: Path,
    nodes: int,
    out: Path,
    variants: str | None,
    no_kernels: bool,
    jobs: int | None,
    force: bool,
    verbose: int,
) -> None:
    """Split the experts of BUNDLE over another number of NUMA nodes.

    Blocks are moved, nothing is quantised again: the result is what a fresh compile would give.
    """
    set_verbosity(verbose)
    chosen = chosen_variants(variants, no_kernels)
    from ktc.bundle.reader import open_bundle
    from ktc.bundle.repack import repack

    made = repack(
        open_bundle(bundle),
        nodes,
        out,
        variants=chosen,
        jobs=jobs or 0,
        force=force,
        say=lambda line: print(f"ktc: {line}", file=sys.stderr),
    )
    shown = shown_path(made)
    click.echo(f"{shown}: {nodes} node{'s' * (nodes > 1)}")
    click.echo(f"next: ktc verify {shlex.quote(shown)}")
