"""`ktc simulate`: how fast a plan would be on a machine that a hardware profile describes. Runs no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktc.drawing import check_picture
from ktc.errors import UsageError
from ktc.outputs import check_outputs
from ktc.progress import set_verbosity, status

if TYPE_CHECKING:
    from ktc.plan import Plan
    from ktc.simulate import Hardware


@click.command("simulate")
@click.argument("model")
@click.option("--recipe", "-r", help="Recipe file, or the name of a shipped recipe.  [default: int4; not for a bundle]")
@click.option(
    "--hardware",
    "--profile",
    "-H",
    "hardware",
    help="Hardware profile: a file, the name of a shipped one, or this-machine (ktc tune).",
)
@click.option(
    "--numa",
    type=click.Choice(["tp", "unaware", "single"]),
    default="tp",
    show_default=True,
    help="Experts split over the sockets, placed without regard to them, or on one socket.",
)
@click.option("--kernels", help="Entry of the profile's cpu.kernels.  [default: the first]")
@click.option("--context", type=click.IntRange(min=0), default=1024, show_default=True, help="Tokens in the cache.")
@click.option("--prompt", type=click.IntRange(min=1), default=1024, show_default=True, help="Tokens of the prefill.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the timelines of K = 0 and of auto as a Perfetto trace.",
)
@click.option("--deferred", "-K", type=click.IntRange(min=0), help="Trace this K instead.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a few layers (.svg, .png, .pdf; matplotlib)."
)
@click.option("--verbose", "-v", count=True, help="More about what is done.")
def command(
    model: str,
    recipe: str | None,
    hardware: str | None,
    numa: str,
    kernels: str | None,
    context: int,
    prompt: int,
    as_json: bool,
    trace: Path | None,
    deferred: int | None,
    plot: Path | None,
    verbose: int,
) -> None:
    """Predict decode and prefill of MODEL on another machine, for every number of deferred experts.

    MODEL is a directory with a config.json, a config.json, a Hugging Face Hub id, or a bundle. Everything but
    the routed experts runs on the device of the hardware profile, whatever device the recipe names.
    """
    from ktc.simulate import load_profile, simulate
    from ktc.simulate import report as report_
    from ktc.simulate.profile import known_profiles

    set_verbosity(verbose)
    if deferred is not None and trace is None:
        raise click.UsageError("--deferred needs --trace FILE")
    check_picture(plot)
    check_outputs(trace)
    if hardware is None:
        raise UsageError("--hardware is missing: the machine to predict for", f"profiles: {known_profiles()}")
    profile = load_profile(hardware)  # first: a typing mistake must not wait for torch
    profile.kernels(kernels)
    plan = _plan(model, recipe, profile, numa)
    sim = simulate(plan, profile, numa=numa, kernels=kernels, context=context, prompt=prompt)  # type: ignore[arg-type]
    if deferred is not None and deferred >= len(sim.rows):
        raise click.UsageError(f"--deferred {deferred}: 0 to {len(sim.rows) - 1} leave two immediate experts")
    if trace is not None:
        from ktc.simulate.trace import chrome_trace, write_trace

        traced = sorted({0, sim.auto}) if deferred is None else [deferred]
        timelines = {f"K = {k}": report_.spans(sim.rows[k]) for k in traced}
        write_trace(trace, chrome_trace(timelines, report_.lanes(sim)))
    if plot is not None:
        from ktc.simulate.plot import write_plot

        write_plot(sim, plot)
    click.echo(json.dumps(report_.to_json(sim), indent=1) if as_json else report_.render(sim))


def _plan(model: str, recipe: str | None, profile: Hardware, numa: str) -> Plan:
    if (Path(model) / "manifest.json").is_file():
        if recipe is not None:
            raise click.UsageError("a bundle has its recipe inside; leave out --recipe")
        from ktc.bundle import open_bundle

        return open_bundle(model).plan
    from ktc.recipe import load_recipe

    loaded = load_recipe(recipe or "int4")
    from ktc.checkpoint import read_config

    config = read_config(model)
    with status("starting"):
        from ktc.plan import build_plan
    with status("building the module tree"):
        return build_plan(config, loaded, profile.cpu.sockets if numa == "tp" else 1)
