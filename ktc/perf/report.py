"""What `ktc bench kernels` found, as markdown, CSV or JSON. Formats only; a plot is in plot.py."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ktc.perf.limits import Limits

if TYPE_CHECKING:
    from ktc.perf.breakdown import Breakdown
    from ktc.perf.figures import Report

FORMS = ("md", "csv", "json")


def render(report: Report, form: str) -> str:
    """The report as one text. CSV holds the rows alone, one per contestant, shape and token count."""
    if form == "json":
        return json.dumps(report.to_json(), indent=2)
    if form == "csv":
        data = report.to_json()["rows"]
        return _csv(list(data[0]) if data else [], [list(r.values()) for r in data])
    parts = [_about(report.about)]
    for shape in dict.fromkeys(row.shape for row in report.rows):
        parts.append(f"### {shape}")
        parts.append(_limits(report.limits[shape]))
        header = [
            "tokens", "what", "bits/param", "ms", "floor ms", "bound", "x floor", "% of limit", "GB/s", "TOPS",
            "x torch", "error",
        ]  # fmt: skip
        body = []
        previous = 0
        for row in (r for r in report.rows if r.shape == shape):
            body.append(
                [
                    str(row.tokens) if row.tokens != previous else "",
                    row.name,
                    f"{row.bits:.2f}",
                    f"{row.ms:.3g}",
                    f"{row.floor_ms:.3g}",
                    row.bound,
                    f"{row.x_floor:.2f}",
                    f"{row.percent:.0f}",
                    f"{row.gbytes:.1f}",
                    f"{row.tops:.2f}",
                    "" if row.vs_torch is None else f"{row.vs_torch:.2f}",
                    "" if row.error is None else f"{row.error:.4f}",
                ]
            )
            previous = row.tokens
        parts.append(table(header, body))
    parts += [f"skipped: {reason}" for reason in report.skipped] + [f"note: {note}" for note in report.notes]
    return "\n\n".join(parts)


def render_breakdown(breakdown: Breakdown, form: str) -> str:
    """The paper's steps and the kernel choice, one table each."""
    if form == "json":
        return json.dumps(breakdown.to_json(), indent=2)
    data = breakdown.to_json()["rows"]
    if form == "csv":
        return _csv(list(data[0]) if data else [], [list(r.values()) for r in data])
    parts = [_about(breakdown.about), _limits(breakdown.limits)]
    header = ["shape", "tokens", "loads", "step", "kernel", "scheduling", "numa", "ms", "x first", "x floor"]
    for title, kind in (("Steps of the paper", "step"), ("Choice of kernel", "kernel")):
        body = [
            [
                r.shape, str(r.tokens), r.loads, r.step, r.kernel, r.scheduling, r.numa, f"{r.ms:.3g}",
                f"{r.speedup:.2f}", f"{r.x_floor:.2f}",
            ]
            for r in breakdown.rows
            if r.table == kind
        ]  # fmt: skip
        if body:
            parts += [f"### {title}", table(header, body)]
    parts += [f"note: {note}" for note in breakdown.notes]
    return "\n\n".join(parts)


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, body)])


def _csv(header: list[str], body: list[list[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *body])
    return out.getvalue().rstrip("\n")


def _about(about: dict[str, Any]) -> str:
    shown = ("cpu", "threads", "variant", "format", "kernels", "tuning", "skew", "load")
    busy = busy_note(about.get("load", 0.0), about.get("threads", 1))
    warning = f"\n\n**{busy}**" if busy else ""
    return ", ".join(f"{key} {_short(about[key])}" for key in shown if key in about) + warning


def busy_note(load: float, threads: int) -> str:
    """What to say where more was running than what was measured; empty if nothing was."""
    if load <= 0.5 + threads:
        return ""
    return f"Taken on a busy machine (load {load:.1f}): figures are not this machine's."


def _short(value: Any) -> str:
    """Two digits, but never an exponent: a load of 370 is no 3.7e+02."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"
    return str(value)


def _limits(limits: Limits) -> str:
    return "limits in this run: " + "; ".join(" ".join(line.split()) for line in limits.lines())
