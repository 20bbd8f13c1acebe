"""`ktc bench`: prompt and decode speed of a bundle as a table on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ktc.cli.engine_options import engine_options, load_model


@click.command("bench")
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
