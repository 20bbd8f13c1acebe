"""Speed of a loaded model, or of several in turns: prompt and decode tokens/s over repetitions, and their table."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ktc.engine.generate import TextGenerator
from ktc.errors import UsageError
from ktc.progress import Progress


@dataclass(frozen=True)
class Row:
    """One line of the table. `mean` and `deviation` (sample standard deviation; one repetition has none) are tokens
    per second.

    `graph`: "on" for the decode graph, "off" for the modules in torch. `of_limit`: what it is of the tokens/s at which
    memory could deliver the weights, both measured in turns: the median of the repetitions. None: not measured.
    """

    graph: str
    test: str
    tokens: int
    repetitions: int
    mean: float
    deviation: float | None
    samples: tuple[float, ...]
    of_limit: float | None = None


class _NoText:
    """Speed does not depend on what the tokens say, and a bundle may have no tokenizer."""

    eos_token_id = None

    def decode(self, ids: Any, **options: Any) -> str:
        return ""


def measure(
    models: Mapping[str, Any],
    prompt: int,
    decode: int,
    repetitions: int,
    limit: Callable[[], float] | None = None,
) -> list[Row]:
    """Time `prompt` random tokens and `decode` greedy ones, `repetitions` times after one short warm-up.

    Several models take turns, every other time in reverse, so that whatever else the machine does hits all of them.

    Args:
        models: `Row.graph` -> loaded model.
        limit: the most tokens/s that memory allows now; asked before and after each decode of the graph.

    Raises:
        UsageError: nothing to measure, or more tokens than the context holds.
    """
    if prompt < 0 or decode < 0 or prompt + decode == 0 or repetitions < 1:
        raise UsageError("nothing to measure", "give -p or -n a positive number of tokens, and -r at least 1")
    length = max(prompt, 1)
    turns = [(graph, _generator(model)) for graph, model in models.items()]
    for _, generator in turns:
        if generator.context is not None and length + decode > generator.context:
            raise UsageError(
                f"{length} + {decode} tokens do not fit the model's context of {generator.context}",
                f"-p and -n of {generator.context} together",
            )
    vocabulary = turns[0][1].model.config.get_text_config().vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, length).tolist()
    for _, generator in turns:
        generator.generate(ids[:16], max_tokens=2, ignore_eos=True)
    rates: dict[tuple[str, str], list[float]] = {}
    shares: list[float] = []
    with Progress("bench", repetitions * len(turns), "repetitions") as progress:
        for repetition in range(repetitions):
            for graph, generator in turns if repetition % 2 == 0 else turns[::-1]:
                generator.reset()
                measured = [limit()] if limit and decode and graph == "on" else []
                # one token more than steps: the first comes from the prompt's logits
                out = generator.generate(ids, max_tokens=decode + 1 if decode else 0, ignore_eos=True)
                if out.finish_reason == "interrupted":
                    raise KeyboardInterrupt
                if prompt:
                    rates.setdefault((f"prompt {prompt}", graph), []).append(out.timings.prompt_rate or 0.0)
                if decode:
                    rates.setdefault((f"decode {decode}", graph), []).append(out.timings.decode_rate or 0.0)
                if measured and limit:
                    measured.append(limit())
                    shares.append((out.timings.decode_rate or 0.0) / statistics.mean(measured))
                progress.update()
    tests = dict.fromkeys(test for test, _ in rates)
    return [
        _row(graph, test, rates[test, graph], shares if (test, graph) == (f"decode {decode}", "on") else [])
        for test in tests
        for graph in models
    ]


def _generator(model: Any) -> TextGenerator:
    """What decodes as `ktc run` does: a session's own steps, or Hugging Face's forward."""
    if hasattr(model, "prefill"):
        from ktc.native.generate import NativeGenerator

        return NativeGenerator(model, _NoText())
    return TextGenerator(model, _NoText())


def _row(graph: str, test: str, samples: list[float], shares: list[float]) -> Row:
    deviation = statistics.stdev(samples) if len(samples) > 1 else None
    mean, of_limit = statistics.mean(samples), statistics.median(shares) if shares else None
    return Row(graph, test, int(test.split()[1]), len(samples), mean, deviation, tuple(samples), of_limit)


def _deviation(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def render(rows: list[Row], about: dict[str, Any], form: str) -> str:
    """The table as "md", "csv" or "json"; `about` (model, recipe, variant, threads) goes into every row."""
    if form == "json":
        return json.dumps({**about, "results": [asdict(r) for r in rows]}, indent=2)
    header = [*about, "graph", "test", "tokens/s", "deviation", "repetitions"]
    body = [
        [*map(str, about.values()), r.graph, r.test, f"{r.mean:.2f}", _deviation(r.deviation), str(r.repetitions)]
        for r in rows
    ]
    if any(r.of_limit is not None for r in rows):
        header.append("of memory's limit")
        for line_of_row, r in zip(body, rows, strict=True):
            line_of_row.append("-" if r.of_limit is None else f"{r.of_limit:.0%}")
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([header, *body])
        return out.getvalue().rstrip("\n")
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, body)])
