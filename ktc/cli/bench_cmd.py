"""`ktc bench`: prompt and decode speed of a bundle as a table on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ktc.cli.engine_options import engine_options, load_model


class BundleOrKernels(click.Command):
    """`ktc bench BUNDLE`, and `ktc bench kernels` as a command of its own (a bundle of that name: `./kernels`)."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] == "kernels":
            from ktc.cli.bench_kernels_cmd import command as kernels

            return kernels.make_context(f"{info_name} kernels", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("bench", cls=BundleOrKernels, epilog="ktc bench kernels --help: the expert kernels alone.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", type=click.IntRange(min=0), default=512, show_default=True, help="Prompt tokens.")
@click.option("-n", "--decode", type=click.IntRange(min=0), default=128, show_default=True, help="Decoded tokens.")
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "-o", "--output", "form", type=click.Choice(["md", "csv", "json"]), default="md", show_default=True, help="Format."
)
@engine_options
def command(bundle: Path, prompt: int, decode: int, repetitions: int, form: str, verbose: int, **options: Any) -> None:
    """Measure prompt and decode tokens/s of BUNDLE: mean and deviation over repetitions."""
    model = load_model(bundle, verbose, **options)
    from ktc.engine.bench import measure, render

    report = model.ktc_report
    schemes = sorted({str(m.moe.scheme) for m in model.ktc_plan.moe_modules()})
    about = {
        "bundle": Path(report.bundle).name,
        "model": model.ktc_plan.model_type,
        "experts": "+".join(schemes) or "none",
        "kernels": report.variant + (f":{report.force_kernel}" if report.force_kernel else ""),
        "threads": sum(report.threads),
    }
    click.echo(render(measure(model, prompt, decode, repetitions), about, form))
