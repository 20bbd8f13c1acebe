"""`ktc bench kernels`: the expert kernels against PyTorch and against this machine's limits, in one run."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click.core import ParameterSource

from ktc.cli.values import FiniteRange, names
from ktc.drawing import check_picture
from ktc.errors import UsageError
from ktc.outputs import check_outputs
from ktc.progress import set_verbosity, verbosity


def _counts(text: str) -> list[int]:
    parts = names(text)
    if not parts or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise UsageError(f"--tokens {text!r} is not a list of positive numbers", "for example --tokens 1,16,1024")
    return [int(p) for p in parts]


@click.command("kernels")
@click.option("--shape", "shapes", default="v2lite,qwen3,v3", show_default=True, help="Names, or ExHxI:TOP_K.")
@click.option("--tokens", default="1,2,4,8,16,128,512,1024", show_default=True, help="Tokens of a call.")
@click.option("--format", "formats", default="int4,int8,bf16", show_default=True, help="ktc's own; `none` for none.")
@click.option("--peers", default="grouped_mm,int4pack,int8pack", show_default=True, help="PyTorch's; `none` for none.")
@click.option("--seconds", type=FiniteRange(min=0.0), default=0.5, show_default=True, help="Timed per figure.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: usable CPUs.")
@click.option("--variant", help="Kernel library variant; default: the best that runs here.")
@click.option("--kernel", default="hybrid", show_default=True, help="hybrid (by tokens per expert), amx, avx512, ...")
@click.option("--scheduling", type=click.Choice(["dynamic", "static"]), default="dynamic", show_default=True)
@click.option("--skew", type=FiniteRange(min=0.0), default=0.0, show_default=True, help="Uneven expert loads.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--breakdown", is_flag=True, help="The paper's steps (v, m, d, n) and kernel choices instead.")
@click.option("--emulate-nodes", type=click.IntRange(min=1), help="With --breakdown: deal the CPUs out to N nodes.")
@click.option("-o", "--output", "form", type=click.Choice(["md", "csv", "json"]), default="md", show_default=True)
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Write a plot (needs matplotlib).")
@click.option("--save", "save_path", type=click.Path(path_type=Path), help="Also write the JSON there.")
@click.option("-v", "--verbose", count=True)
def command(
    shapes: str,
    tokens: str,
    formats: str,
    peers: str,
    seconds: float,
    threads: int | None,
    variant: str | None,
    kernel: str,
    scheduling: str,
    skew: float,
    seed: int,
    breakdown: bool,
    emulate_nodes: int | None,
    form: str,
    plot_path: Path | None,
    save_path: Path | None,
    verbose: int,
) -> None:
    """Measure the routed experts' kernels, interleaved with PyTorch's and with the machine's limits."""
    set_verbosity(verbose)
    if breakdown:
        _check_breakdown(plot_path, formats)
    if emulate_nodes is not None and not breakdown:
        raise UsageError("--emulate-nodes is for --breakdown")
    check_picture(plot_path)
    check_outputs(save_path)
    from ktc.perf import breakdown as steps
    from ktc.perf import kernel_bench, report
    from ktc.perf.shapes import parse_shape

    def chosen(text: str) -> list[str]:
        return [] if text == "none" else names(text)

    options = kernel_bench.Options(
        shapes=[parse_shape(s) for s in names(shapes)],
        tokens=_counts(tokens),
        formats=chosen(formats),
        peers=chosen(peers),
        seconds=seconds,
        threads=threads,
        variant=variant,
        force="" if kernel == "hybrid" else kernel,
        scheduling=scheduling,
        skew=skew,
        seed=seed,
    )
    if breakdown:
        broken = steps.run(options, emulate_nodes, say=_say)
        text, record = report.render_breakdown(broken, form), report.render_breakdown(broken, "json")
    else:
        found = kernel_bench.run(options, say=_say)
        text, record = report.render(found, form), report.render(found, "json")
    click.echo(text)  # first: whatever is wrong with the files, the figures are not lost
    if plot_path is not None:
        from ktc.perf.plot import plot

        plot(found, plot_path)
    if save_path is not None:
        from ktc.codegen.cache import write_atomic

        write_atomic(save_path, record.encode())


def _check_breakdown(plot_path: Path | None, formats: str) -> None:
    """A breakdown chooses its own kernels and compares with no peers: what it would not look at is refused."""
    if plot_path is not None:
        raise UsageError("--plot draws the comparison, not the breakdown")
    source = click.get_current_context().get_parameter_source
    for name in ("kernel", "scheduling", "peers"):
        if source(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"--{name} is not for --breakdown, whose steps are fixed", "leave out one of the two")
    if source("formats") is not ParameterSource.DEFAULT and len(names(formats)) > 1:
        raise UsageError("--breakdown is of one format", f"--format {names(formats)[0]}")


def _say(text: str) -> None:
    if sys.stderr.isatty() or verbosity():
        print(text, file=sys.stderr)
