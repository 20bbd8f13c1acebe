"""`ktc bench`: prompt and decode speed of a bundle as a table on stdout."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ktc.cli.cuda_options import attention_option, load_session, refuse_attention
from ktc.cli.engine_options import engine_options, load_model
from ktc.cli.graph_options import graph_options, load_native, wants_graph
from ktc.errors import UsageError


class BundleOrKernels(click.Command):
    """`ktc bench BUNDLE`, and `ktc bench kernels` and `ktc bench emulate` as commands of their own (bundles of these
    names: `./kernels`). A bundle on an emulated device is another measurement too."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] == "kernels":
            from ktc.cli.bench_kernels_cmd import command as kernels

            return kernels.make_context(f"{info_name} kernels", args[1:], parent, **extra)
        if args and args[0] == "emulate":
            from ktc.cli.bench_emulate_cmd import command as emulate

            return emulate.make_context(f"{info_name} emulate", args[1:], parent, **extra)
        emulated = any(arg == "--device" or arg.startswith("--device=") for arg in args)
        if not emulated and args and not args[0].startswith("-") and not Path(args[0]).exists():
            near = difflib.get_close_matches(args[0], ("kernels", "emulate"), n=1, cutoff=0.75)
            if near:
                raise UsageError(f"no bundle {args[0]}", f"did you mean `ktc bench {near[0]}`?")
        try:
            if emulated:
                return _bundle_command().make_context(info_name, args, parent, **extra)
            return super().make_context(info_name, args, parent, **extra)
        except click.NoSuchOption as error:
            other = self if emulated else _bundle_command()
            if not any(error.option_name in parameter.opts for parameter in other.params):
                raise
            why = "is not for a bundle on an emulated device" if emulated else "needs --device emulate:PROFILE"
            hint = "ktc bench BUNDLE --device emulate:PROFILE --help"
            raise UsageError(f"{error.option_name} {why}", hint) from error


def _bundle_command() -> click.Command:
    from ktc.cli.bench_emulate_cmd import bundle_command

    return bundle_command


@click.command(
    "bench",
    cls=BundleOrKernels,
    epilog="ktc bench kernels --help: the expert kernels alone. ktc bench emulate --help, and ktc bench BUNDLE --device"
    " emulate:PROFILE --help: deferral against a device that is only timed.",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", type=click.IntRange(min=0), default=512, show_default=True, help="Prompt tokens.")
@click.option("-n", "--decode", type=click.IntRange(min=0), default=128, show_default=True, help="Decoded tokens.")
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "-o", "--output", "form", type=click.Choice(["md", "csv", "json"]), default="md", show_default=True, help="Format."
)
@click.option(
    "--roofline",
    is_flag=True,
    help="Also read memory between repetitions, and say what decoding is of the tokens/s that it allows (takes a GB).",
)
@partial(graph_options, choices=("auto", "on", "off", "both"), more="; both: the two in turns")
@attention_option
@engine_options
def command(
    bundle: Path,
    prompt: int,
    decode: int,
    repetitions: int,
    form: str,
    roofline: bool,
    verbose: int,
    graph: str,
    context: int | None,
    n_deferred: int | None,
    n_skipped: int,
    attention: str,
    **options: Any,
) -> None:
    """Measure prompt and decode tokens/s of BUNDLE: mean and deviation over repetitions."""
    from ktc.cuda.device import wants_cuda

    if graph == "both":
        kinds = ["on", "off"]
    elif wants_cuda(bundle):
        kinds = ["off" if graph == "off" else "on"]
    else:
        kinds = ["on" if wants_graph(bundle, graph, context, n_deferred, n_skipped) else "off"]
    given: dict[str, Any] = {"context": context, "n_deferred": n_deferred, "n_skipped": n_skipped}
    if wants_cuda(bundle):
        given["attention"] = attention
    else:
        refuse_attention(attention)
    if "off" in kinds:  # torch reads OpenMP's environment when it is imported: before anything imports it
        from ktc.engine.lane import quiet_openmp

        quiet_openmp()
    if roofline and (wants_cuda(bundle) or "on" not in kinds):
        raise UsageError("--roofline needs the graph on the CPU device", "leave it out")
    models = {kind: _load(bundle, kind, verbose, given, options) for kind in kinds}

    from ktc.engine.bench import measure, render
    from ktc.perf.report import busy_note

    model = next(iter(models.values()))
    report = model.ktc_report
    schemes = sorted({str(m.moe.scheme) for m in model.ktc_plan.moe_modules()})
    about = {
        "bundle": Path(report.bundle).name,
        "model": model.ktc_plan.model_type,
        "experts": "+".join(schemes) or "none",
        "kernels": report.variant + (f":{options['force_kernel']}" if options["force_kernel"] else ""),
        "threads": sum(report.threads),
    }
    if hasattr(model, "attention"):
        about["attention"] = model.attention
    limit = _decode_limit(models["on"], n_skipped, sum(report.threads), about) if roofline else None
    load = os.getloadavg()[0]  # before: what is measured adds to it
    click.echo(render(measure(models, prompt, decode, repetitions, limit), about, form))
    if busy := busy_note(load, sum(report.threads)):
        click.echo(f"ktc: note: {busy}", err=True)


def _decode_limit(model: Any, n_skipped: int, threads: int, about: dict[str, Any]) -> Callable[[], float]:
    """Tokens/s at which memory could deliver a decode step's weights, measured anew at each call."""
    from ktc.native.traffic import weight_bytes_per_token
    from ktc.perf.limits import DRAM_HUGE, Sampler, default_cpus

    nbytes = weight_bytes_per_token(model.graph.weights.bundle, model.graph.program, n_skipped)
    about["MB a token"] = round(nbytes / 1e6, 1)
    sampler = Sampler.of_pool(default_cpus(threads), [DRAM_HUGE])
    return lambda: sampler.read_rate() / nbytes


def _load(bundle: Path, graph: str, verbose: int, given: dict[str, Any], options: dict[str, Any]) -> Any:
    """The model on its device: on the decode graph ("on") or in torch's modules ("off")."""
    from ktc.cuda.device import wants_cuda

    if wants_cuda(bundle):
        return load_session(bundle, verbose, graph=graph, **given, **options)
    return load_native(bundle, verbose, **given, **options) if graph == "on" else load_model(bundle, verbose, **options)
