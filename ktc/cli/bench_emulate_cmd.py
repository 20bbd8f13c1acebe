"""`ktc bench emulate` and `ktc bench BUNDLE --device emulate:PROFILE`: decode against a device that sleeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ktc.cli.emulate_options import DEVICE_HELP
from ktc.cli.engine_options import engine_options
from ktc.drawing import check_picture
from ktc.errors import UsageError
from ktc.outputs import check_outputs
from ktc.progress import set_verbosity

if TYPE_CHECKING:
    from ktc.emulate.lane import EmulatedLane

F = TypeVar("F", bound=Callable[..., Any])


def sweep_options(function: F, steps: int) -> F:
    """What both commands measure and write."""
    path = click.Path(dir_okay=False, path_type=Path)
    for option in reversed(
        (
            click.option("--deferred", "-K", help="Measure these K only (0 always), such as 2,3.  [default: all]"),
            click.option("--steps", type=click.IntRange(min=1), default=steps, show_default=True, help="Decode steps."),
            click.option(
                "--repeats",
                type=click.IntRange(min=1),
                help="Replays of each step.  [default: 7 to 15, as many as take 40 s]",
            ),
            click.option(
                "--shares",
                metavar="CPU:DEVICE",
                help="Slow the device down so that expert and device time are so at K = 0; the paper's: 74:28.",
            ),
            click.option(
                "--cached",
                type=click.IntRange(min=0),
                default=1024,
                show_default=True,
                help="Tokens in the cache that the device's attention is timed for.",
            ),
            click.option(
                "--trace", type=path, help="Write a Perfetto trace: K = 0 and the fastest, and the simulator's."
            ),
            click.option("--plot", type=path, help="Draw a few layers as measured (.svg, .png, .pdf; matplotlib)."),
            click.option(
                "--save-profile", type=path, help="Write the machine as measured, for ktc simulate --hardware."
            ),
            click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON."),
        )
    ):
        function = option(function)
    return function


@click.command("emulate")
@click.option("--profile", "-H", default="paper-2x8452y-a100", show_default=True, help="Hardware profile.")
@click.option("--layers", type=click.IntRange(min=3), default=12, show_default=True)
@click.option("--experts", type=click.IntRange(min=1), default=64, show_default=True, help="Routed experts of a layer.")
@click.option("--hidden", type=click.IntRange(min=64), default=2048, show_default=True)
@click.option("--intermediate", type=click.IntRange(min=1), default=1408, show_default=True, help="Of an expert.")
@click.option("--top-k", type=click.IntRange(min=2), default=6, show_default=True, help="Routed experts per token.")
@click.option("--shared", type=click.IntRange(min=1), default=2, show_default=True, help="Shared experts of a layer.")
@click.option("--format", "data_type", default="int4", show_default=True, help="Of the experts: int4, int8 or bf16.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: the CPUs of this process.")
@click.option("--variant", help="Kernel variant; default: the best for this CPU.")
@click.option("--kernel-library", type=click.Path(exists=True, dir_okay=False), help="Use this kernel library.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("-v", "verbose", count=True)
@partial(sweep_options, steps=6)
def command(
    profile: str,
    layers: int,
    experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    shared: int,
    data_type: str,
    threads: int | None,
    variant: str | None,
    kernel_library: str | None,
    seed: int,
    verbose: int,
    **sweep: Any,
) -> None:
    """Measure decode for every number of deferred experts, with real experts and an emulated device.

    The model exists in memory only: DeepSeek-V2's graph with random weights, of DeepSeek-V2-Lite's expert shape
    unless told otherwise. Compares with `ktc simulate` of the machine as it was measured.
    """
    from ktc.emulate.model import PREFIX, parse_device
    from ktc.emulate.synthetic import StackOptions, build_stack
    from ktc.perf.shapes import MoeShape

    set_verbosity(verbose)
    check_picture(sweep["plot"])
    check_outputs(sweep["trace"], sweep["save_profile"])
    options = _options(sweep, seed)
    hardware = parse_device(f"{PREFIX}{profile}")
    if top_k > experts:
        raise UsageError(
            f"--top-k {top_k}: a layer has {experts} experts", f"--top-k {experts} at most, or more --experts"
        )
    shape = MoeShape("stack", experts, hidden, intermediate, top_k)
    graph, plan = build_stack(
        StackOptions(
            shape,
            layers=layers,
            shared=shared,
            data_type=data_type,
            context=options.prompt + options.steps,
            threads=threads,
            variant=variant,
            library=kernel_library,
            seed=seed,
        )
    )
    from ktc.emulate.lane import EmulatedLane

    title = (
        f"{layers} MoE layers of {experts} experts, hidden {hidden}, intermediate {intermediate}, top {top_k},"
        f" {shared} shared; experts {plan.moe_modules()[0].moe.scheme}"  # type: ignore[union-attr]
    )
    _measure(EmulatedLane(graph, plan, hardware, sweep["cached"]), title, options, sweep)


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--device", metavar="emulate:PROFILE", required=True, help=DEVICE_HELP)
@click.option("--prompt", "-p", type=click.IntRange(min=1), default=8, show_default=True, help="Prompt tokens.")
@partial(sweep_options, steps=4)
@engine_options
def bundle_command(bundle: Path, device: str, prompt: int, verbose: int, **options: Any) -> None:
    """Measure decode of BUNDLE for every number of deferred experts, with an emulated device."""
    from ktc.emulate.model import open_emulated, parse_device

    names = ("deferred", "steps", "repeats", "shares", "cached", "trace", "plot", "save_profile", "as_json")
    sweep = {name: options.pop(name) for name in names}
    set_verbosity(verbose)
    check_picture(sweep["plot"])
    check_outputs(sweep["trace"], sweep["save_profile"])
    asked = _options(sweep, 0, prompt)
    model = open_emulated(bundle, parse_device(device), context=prompt + asked.steps, **options)
    model.lane.retime(model.hardware, sweep["cached"])
    plan = model.lane.plan
    moes = plan.moe_modules()
    title = f"{bundle.name}: {plan.model_type}, {plan.layers} layers, {len(moes)} with experts ({moes[0].moe.scheme})"  # type: ignore[union-attr]
    _measure(model.lane, title, asked, sweep)


def _options(sweep: dict[str, Any], seed: int, prompt: int = 8) -> Any:
    from ktc.emulate.scaling import parse_shares
    from ktc.emulate.sweep import SweepOptions

    text = sweep["deferred"]
    parts = None if text is None else text.replace(",", " ").split()
    if parts is not None and not (parts and all(p.isdecimal() for p in parts)):
        raise UsageError(f"--deferred {text!r} is not a list of numbers from 0 up", "for example --deferred 2,3")
    return SweepOptions(
        deferred=None if parts is None else [int(p) for p in parts],
        steps=sweep["steps"],
        repeats=sweep["repeats"],
        shares=None if sweep["shares"] is None else parse_shares(sweep["shares"]),
        prompt=prompt,
        seed=seed,
    )


def _measure(lane: EmulatedLane, title: str, options: Any, sweep: dict[str, Any]) -> None:
    from ktc.emulate import report
    from ktc.emulate.scaling import write_profile
    from ktc.emulate.sweep import run
    from ktc.simulate.trace import chrome_trace, write_trace

    found = run(lane, options)
    click.echo(json.dumps(report.to_json(found, title), indent=1) if sweep["as_json"] else report.render(found, title))
    if sweep["trace"] is not None:
        write_trace(sweep["trace"], chrome_trace(report.timelines(found), report.LANES))
    if sweep["plot"] is not None:
        from ktc.simulate.plot import draw_rows

        rows = [found.measured[i].typical.row for i in sorted({0, found.best})]
        draw_rows(rows, report.LANES, f"{title}\n{report.device_line(found)}", sweep["plot"])
    if sweep["save_profile"] is not None:
        write_profile(sweep["save_profile"], found.hardware, [title])
