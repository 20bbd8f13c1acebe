"""`ktc eval`: perplexity of a bundle on a text, and KL from a reference; the table goes to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktc.cli.engine_options import engine_options
from ktc.drawing import check_picture
from ktc.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from ktc.eval.sources import Source
    from ktc.plan.ir import Plan


@click.command("eval")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--text", "text_file", type=click.Path(path_type=Path), required=True, help="UTF-8 text; - is stdin.")
@click.option("--limit", type=click.IntRange(min=1), metavar="CHARS", help="Use only the first CHARS characters.")
@click.option("--window", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of a window.")
@click.option("--deferred", "n_deferred", type=click.IntRange(min=0), help="Defer K experts of each MoE layer.")
@click.option("--skip", "n_skipped", type=click.IntRange(min=0), default=0, help="Drop the K lowest experts.")
@click.option("--table", is_flag=True, help="Every number of deferred and of skipped experts that the model allows.")
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Report KL from this bundle (bf16 or fp32), or from this checkpoint computed in fp32.",
)
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw --table into this file (matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of Markdown.")
@engine_options
def command(
    bundle: Path,
    text_file: Path,
    limit: int | None,
    window: int,
    n_deferred: int | None,
    n_skipped: int,
    table: bool,
    reference: Path | None,
    plot_file: Path | None,
    as_json: bool,
    verbose: int,
    **options: Any,
) -> None:
    """Perplexity of BUNDLE on a text: as a prompt (prefill), and token by token (decode).

    Prefill never defers or skips experts; --deferred and --skip show in decode only.
    """
    if table and (n_deferred is not None or n_skipped):
        raise click.UsageError("--table runs every number: leave out --deferred and --skip")
    if plot_file is not None and not table:
        raise click.UsageError("--plot draws --table")
    check_picture(plot_file)
    text = read_text(text_file, limit)

    from ktc.cli.graph_options import load_native
    from ktc.eval import report
    from ktc.eval.run import Setting, evaluate, settings_of_table, text_ids, windows_of
    from ktc.native.tokenizer import load_tokenizer

    with _graph_needed():
        model = load_native(bundle, verbose, context=window, **options)
    tokenizer = load_tokenizer(Path(model.ktc_report.bundle) / "model")
    windows = windows_of(text_ids(tokenizer, text), window, tokenizer.bos_token_id)
    settings = [Setting("prefill"), Setting("decode", n_deferred, n_skipped)]
    if table:
        settings = settings_of_table(model.graph.program)
    source = None if reference is None else _reference(reference, window, options)
    scores = evaluate(model, windows, settings, source)
    label = source.label if source else None
    if as_json:
        about = {"bundle": str(bundle), "text": str(text_file), "window": window, "kernels": model.ktc_report.variant}
        click.echo(json.dumps({**about, "reference": label, "results": report.rows(scores)}, indent=2))
    else:
        click.echo(report.markdown(scores, label))
    if plot_file is not None:
        report.plot({bundle.name.removesuffix(".ktc"): scores}, plot_file)


def read_text(file: Path, limit: int | None) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")[:limit]
    except OSError as error:
        raise unreadable("text", file, error) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: byte {error.start}", "convert it with iconv") from error


def unreadable(what: str, file: Path | str, error: OSError) -> UsageError:
    """For a text of the user's ("text", "prompt") that cannot be read; `-` is stdin."""
    name = "stdin" if str(file) == "-" else file
    return UsageError(f"cannot read the {what}: {name}: {error.strerror}")


@contextmanager
def _graph_needed() -> Iterator[None]:
    """The way out that an unsupported model names elsewhere, --graph off, is no option of this command."""
    try:
        yield
    except UnsupportedModelError as error:
        hint = "`ktc eval` reads the decode graph; a bundle without one can only be run: `ktc run --graph off`"
        raise UnsupportedModelError(error.message, hint) from error


def _quantised(plan: Plan) -> list[str]:
    """The schemes of a plan that round weights to integers."""
    schemes = {part.scheme for m in plan.modules for part in (m.moe, m.linear) if part is not None}
    return sorted(str(scheme) for scheme in schemes if scheme.data_type in ("int8", "int4"))


def _reference(path: Path, window: int, options: dict[str, Any]) -> Source:
    """A bundle on the native graph, its own kernels and nothing deferred; else a checkpoint in Hugging Face."""
    from ktc.eval.sources import CheckpointSource, NativeSource, is_bundle
    from ktc.native import open_native

    if not is_bundle(path):
        return CheckpointSource(path)
    shared = {k: options[k] for k in ("threads", "variant", "emulate_nodes", "trust_sha256")}
    with _graph_needed():
        model = open_native(path, context=window, fp32_attention=True, **shared)
    assert model.ktc_plan is not None
    quantised = _quantised(model.ktc_plan)
    if quantised:
        told = f"the reference is itself quantised ({', '.join(quantised)}): KL from it is no KL from the model"
        print(f"ktc: note: {told}; compile one with --recipe bf16 or fp32", file=sys.stderr)
    schemes = sorted({str(m.moe.scheme) for m in model.ktc_plan.moe_modules() if m.moe is not None})
    return NativeSource(model, f"{path.name} ({'+'.join(schemes) or 'no packed experts'}), prefill")
