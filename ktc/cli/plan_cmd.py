"""`ktc plan`: what every module of a model becomes under a recipe. Reads config.json only, never weights."""

from __future__ import annotations

import json

import click

from ktc.cli.compile_options import recipe_options
from ktc.progress import set_verbosity, status


@click.command("plan")
@click.argument("checkpoint")
@recipe_options
@click.option("--json", "as_json", is_flag=True, help="Print plan.json instead of the table.")
@click.option("--verbose", "-v", count=True, help="One row per module.")
def command(checkpoint: str, recipe: str, nodes: int, as_json: bool, verbose: int) -> None:
    """Show what every module of CHECKPOINT becomes, and how many bytes go where.

    CHECKPOINT is a directory, a config.json, or a Hugging Face Hub id; only its config.json is read.
    """
    from ktc.recipe import load_recipe

    set_verbosity(verbose)
    loaded = load_recipe(recipe)  # first: a typing mistake must not wait for torch
    from ktc.checkpoint import read_config

    config = read_config(checkpoint)
    with status("starting"):
        from ktc.native.engine import outlook
        from ktc.plan import build_plan, render

    with status("building the module tree"):
        plan = build_plan(config, loaded, nodes)
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=1))
    else:
        click.echo(render(plan, verbose=verbose > 0))
        click.echo(f"\n{outlook(config, plan)}")
