"""Speed of a loaded model: prompt and decode tokens/s over repetitions, and the table of it."""

from __future__ import annotations

import csv
import io
import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ktc.engine.generate import TextGenerator
from ktc.errors import KtcError
from ktc.progress import Progress


@dataclass(frozen=True)
class Row:
    """One line of the table. `mean` and `deviation` (sample standard deviation) are tokens per second."""

    test: str
    tokens: int
    repetitions: int
    mean: float
    deviation: float
    samples: tuple[float, ...]


class _NoText:
    """Speed does not depend on what the tokens say, and a bundle may have no tokenizer."""

    eos_token_id = None

    def decode(self, ids: Any, **options: Any) -> str:
        return ""


def measure(model: Any, prompt: int, decode: int, repetitions: int) -> list[Row]:
    """Time `prompt` random tokens and `decode` greedy ones, `repetitions` times after one short warm-up.

    Raises:
        KtcError: nothing to measure, or more tokens than the context holds.
    """
    if prompt < 0 or decode < 0 or prompt + decode == 0 or repetitions < 1:
        raise KtcError("nothing to measure", "give -p or -n a positive number of tokens, and -r at least 1")
    generator = TextGenerator(model, _NoText())
    length = max(prompt, 1)
    if generator.context is not None and length + decode > generator.context:
        raise KtcError(f"{length} + {decode} tokens do not fit the model's context of {generator.context}")
    vocabulary = model.config.get_text_config().vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, length).tolist()
    generator.generate(ids[:16], max_tokens=2, ignore_eos=True)
    rates: dict[str, list[float]] = {}
    with Progress("bench", repetitions, "repetitions") as progress:
        for _ in range(repetitions):
            generator.reset()
            # one token more than steps: the first comes from the prompt's logits
            out = generator.generate(ids, max_tokens=decode + 1 if decode else 0, ignore_eos=True)
            if out.finish_reason == "interrupted":
                raise KeyboardInterrupt
            if prompt:
                rates.setdefault(f"prompt {prompt}", []).append(out.timings.prompt_rate)
            if decode:
                rates.setdefault(f"decode {decode}", []).append(out.timings.decode_rate)
            progress.update()
    return [_row(test, samples) for test, samples in rates.items()]


def _row(test: str, samples: list[float]) -> Row:
    deviation = statistics.stdev(samples) if len(samples) > 1 else 0.0
    return Row(test, int(test.split()[1]), len(samples), statistics.mean(samples), deviation, tuple(samples))


def render(rows: list[Row], about: dict[str, Any], form: str) -> str:
    """The table as "md", "csv" or "json"; `about` (model, recipe, variant, threads) goes into every row."""
    if form == "json":
        return json.dumps({**about, "results": [asdict(r) for r in rows]}, indent=2)
    header = [*about, "test", "tokens/s", "deviation", "repetitions"]
    body = [
        [*map(str, about.values()), r.test, f"{r.mean:.2f}", f"{r.deviation:.2f}", str(r.repetitions)] for r in rows
    ]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([header, *body])
        return out.getvalue().rstrip("\n")
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, body)])
