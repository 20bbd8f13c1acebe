"""`ktc profile`: how often each expert of a bundle is used on a text; the table goes to stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ktc.cli.engine_options import engine_options
from ktc.cli.eval_cmd import read_text
from ktc.drawing import check_picture
from ktc.errors import UsageError
from ktc.outputs import check_outputs


@click.command("profile")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--text", "text_file", type=click.Path(path_type=Path), required=True, help="UTF-8 text; - is stdin.")
@click.option("--limit", type=click.IntRange(min=1), metavar="CHARS", help="Use only the first CHARS characters.")
@click.option("--window", type=click.IntRange(min=2), help="Tokens of a window.  [default: 512, or the context]")
@click.option(
    "--out",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the counts, for hot_profile in a recipe.",
)
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw the use of experts (matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="Print the counts instead of the table.")
@engine_options
def command(
    bundle: Path,
    text_file: Path,
    limit: int | None,
    window: int | None,
    out: Path | None,
    plot_file: Path | None,
    as_json: bool,
    verbose: int,
    **options: Any,
) -> None:
    """Count how often each routed expert of BUNDLE is used on a text.

    A recipe with hot_experts and hot_profile puts the most used ones on a GPU: docs/recipes.md.
    """
    check_picture(plot_file)
    check_outputs(out)
    text = read_text(text_file, limit)

    from ktc.eval import expert_use_report as report
    from ktc.eval.routing import expert_use
    from ktc.eval.run import WINDOW, text_ids, windows_of
    from ktc.native.tokenizer import load_tokenizer

    model = _open(bundle, verbose, window, options)
    tokenizer = load_tokenizer(Path(model.ktc_report.bundle) / "model")
    context = min(getattr(model, "context", 1 << 30), model.config.max_position_embeddings or 1 << 30)
    if window is not None and window > context:
        raise UsageError(f"a window of {window} tokens does not fit the context of {context}", f"--window {context}")
    ids = text_ids(tokenizer, text)
    windows = windows_of(ids, window or min(WINDOW, context), tokenizer.bos_token_id)
    windows = [part[:context] for part in windows]  # with BOS one may be a token too long
    use = expert_use(model, windows, text_file.name)
    if out is not None:
        use.write(out)
        print(f"ktc: wrote {out}", file=sys.stderr)
    if plot_file is not None:
        report.plot(use, plot_file)
    click.echo(json.dumps(use.to_json(), indent=1) if as_json else report.markdown(use))


def _open(bundle: Path, verbose: int, window: int | None, options: dict[str, Any]) -> Any:
    """On the decode graph; a bundle that has none, or is for a GPU, as modules in torch."""
    from ktc.cli.engine_options import load_model
    from ktc.cli.graph_options import load_native, wants_graph
    from ktc.cuda.device import wants_cuda
    from ktc.eval.run import WINDOW

    if (bundle / "manifest.json").is_file() and (wants_cuda(bundle) or not wants_graph(bundle, "auto", None, None, 0)):
        return load_model(bundle, verbose, **options)
    return load_native(bundle, verbose, context=(window or WINDOW) + 1, **options)  # and BOS
