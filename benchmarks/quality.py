"""Held-out perplexity of Hugging Face bf16 and fp32 and of ktc bf16, int8 and int4, as one table.

    python benchmarks/quality.py artifacts/demo artifacts/demo/heldout.txt

Compiles the checkpoint with each recipe (into --work, kept for the next run) and prints Markdown or JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ktc.engine.lane import quiet_openmp


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path, help="UTF-8 text that the model has not seen")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--window", type=int, default=512, help="tokens per window (default 512)")
    parser.add_argument("--limit", type=int, help="use only the first LIMIT characters")
    parser.add_argument("--work", type=Path, help="where bundles are kept (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet_openmp()
    text = options.text.read_text(encoding="utf-8")[: options.limit]
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(options.checkpoint, text, options.recipes, options.window, options.work or Path(scratch))
    if options.json:
        print(json.dumps({"checkpoint": options.checkpoint.name, "window": options.window, "rows": rows}, indent=2))
    else:
        print(table(rows))


def measure(checkpoint: Path, text: str, recipes: list[str], window: int, work: Path) -> list[dict[str, Any]]:
    """One row per way to run the model; `change` is relative to the first row (Hugging Face bf16)."""
    import torch
    from transformers import AutoModelForCausalLM

    import ktc
    from ktc.compile import compile_checkpoint
    from ktc.engine.chat import load_tokenizer
    from ktc.engine.perplexity import perplexity

    tokenizer = load_tokenizer(checkpoint)
    rows: list[dict[str, Any]] = []

    def add(name: str, model: Any, nbytes: int) -> None:
        started = time.perf_counter()
        result = perplexity(model, tokenizer, text, window)
        rows.append(
            {
                "model": name,
                "perplexity": result.value,
                "change": result.value / rows[0]["perplexity"] - 1 if rows else 0.0,
                "tokens": result.tokens,
                "bytes": nbytes,
                "seconds": time.perf_counter() - started,
            }
        )
        print(f"{name}: {result.value:.4f}", file=sys.stderr)

    for name, dtype in (("Hugging Face bf16", torch.bfloat16), ("Hugging Face fp32", torch.float32)):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        add(name, model, sum(p.numel() * p.element_size() for p in model.parameters()))
        del model
        gc.collect()
    for recipe in recipes:
        bundle = work / f"{checkpoint.name}-{recipe}.ktc"
        if not bundle.exists():
            compile_checkpoint(checkpoint, recipe, bundle, variants=())
        model = ktc.load(bundle)
        plan = model.ktc_plan
        nbytes = sum(plan.expert_bytes(n) for n in range(plan.nodes)) + sum(plan.device_bytes().values())
        add(f"ktc {Path(recipe).stem} ({model.ktc_report.variant})", model, nbytes)
        del model
        gc.collect()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        f"| | perplexity ({rows[0]['tokens']} tokens) | against {rows[0]['model']} | weights |",
        "|---|---|---|---|",
    ]
    for row in rows:
        change = "" if row is rows[0] else f"{row['change']:+.2%}"
        lines.append(f"| {row['model']} | {row['perplexity']:.3f} | {change} | {row['bytes'] / 2**20:.1f} MiB |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
