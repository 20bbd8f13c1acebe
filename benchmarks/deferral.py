"""What deferring and skipping experts cost in quality, for several recipes, as one Markdown table and a plot.

    python benchmarks/deferral.py artifacts/demo artifacts/demo/heldout.txt --plot docs/images/deferral.png

Compiles the checkpoint with each recipe (into --work, kept for the next run). KL is from the checkpoint in
Hugging Face's code, fp32. `ktc eval BUNDLE --table` does the same for one bundle.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ktc.eval import Score, Setting, evaluate, settings_of_table
from ktc.eval.report import plot
from ktc.eval.run import WINDOW, text_ids, windows_of
from ktc.eval.sources import CheckpointSource

Curves = Mapping[str, Mapping[Setting, Score]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path, help="UTF-8 text that the model has not seen")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "int4"])
    parser.add_argument("--limit", type=int, help="use only the first LIMIT characters")
    parser.add_argument("--work", type=Path, help="where bundles are kept (default: a temporary folder)")
    parser.add_argument("--plot", type=Path, help="draw into this file")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")[: options.limit]
    with tempfile.TemporaryDirectory() as scratch:
        curves = measure(options.checkpoint, text, options.recipes, options.work or Path(scratch))
    print(table(curves))
    if options.plot:
        plot(curves, options.plot)


def measure(checkpoint: Path, text: str, recipes: list[str], work: Path) -> dict[str, dict[Setting, Score]]:
    """Recipe -> scores of prefill, of every K deferred and of every K skipped."""
    from ktc.compile import compile_checkpoint
    from ktc.native import open_native
    from ktc.native.tokenizer import load_tokenizer

    reference = CheckpointSource(checkpoint)
    out = {}
    for recipe in recipes:
        bundle = work / f"{checkpoint.name}-{recipe}.ktc"
        if not bundle.exists():
            compile_checkpoint(checkpoint, recipe, bundle, variants=())
        model = open_native(bundle, context=WINDOW)
        tokenizer = load_tokenizer(bundle / "model")
        windows = windows_of(text_ids(tokenizer, text), WINDOW, tokenizer.bos_token_id)
        out[recipe] = evaluate(model, windows, settings_of_table(model.graph.program), reference)
    return out


def table(curves: Curves) -> str:
    """One row per setting, three columns per recipe; changes are against decoding with all experts immediate."""
    first = next(iter(curves.values()))
    tokens = next(iter(first.values())).tokens
    header = [f"{tokens} tokens"]
    for recipe in curves:
        header += [f"{recipe}: perplexity", "change", "KL", "same top token"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for setting in first:
        cells = [str(setting)]
        for scores in curves.values():
            score, base = scores[setting], Setting("decode", 0)
            change = ""
            if setting.mode == "decode" and setting != base:
                change = "{:+.2%} ± {:.2%}".format(*score.change(scores[base]))
            cells += [f"{score.perplexity:.2f}", change, f"{score.mean_kl:.4f}", f"{score.top_agreement:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
