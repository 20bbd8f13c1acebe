"""Scores as a Markdown table, as JSON and as a plot (matplotlib, imported only for that)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktc.drawing import new_figure, write_figure
from ktc.eval.metrics import Score
from ktc.eval.run import Setting


def base_of(scores: Mapping[Setting, Score]) -> Setting | None:
    """What changes are given against: decoding with every expert immediate."""
    return next((s for s in scores if s == Setting("decode", 0)), None)


def rows(scores: Mapping[Setting, Score]) -> list[dict[str, Any]]:
    """One record per setting; `change` and `change_error` are relative, against decoding with all immediate."""
    base = base_of(scores)
    out = []
    for setting, score in scores.items():
        row: dict[str, Any] = {
            "setting": str(setting),
            "mode": setting.mode,
            "deferred": setting.n_deferred,
            "skipped": setting.n_skipped,
            "tokens": score.tokens,
            "perplexity": score.perplexity,
            "nll": score.mean_nll,
            "kl": score.mean_kl,
            "same_top": score.top_agreement,
            "tokens_per_second": score.tokens / score.seconds if score.seconds else None,
        }
        if base is not None and setting != base and setting.mode == "decode":
            row["change"], row["change_error"] = score.change(scores[base])
        out.append(row)
    return out


def markdown(scores: Mapping[Setting, Score], reference: str | None) -> str:
    """The table for people. KL is in nats per token."""
    records = rows(scores)
    changes = any("change" in r for r in records)
    header = ["setting", f"perplexity ({records[0]['tokens']} tokens)"]
    header += ["change"] if changes else []
    header += ["KL", "same top token"] if reference else []
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for r in records:
        cells = [r["setting"], f"{r['perplexity']:.3f}"]
        if changes:
            cells.append(f"{r['change']:+.2%} ± {r['change_error']:.2%}" if "change" in r else "")
        if reference:
            cells += [f"{r['kl']:.5f}", f"{r['same_top']:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    if reference:
        lines += ["", f"KL: nats per token, from {reference}."]
    return "\n".join(lines)


def plot(curves: Mapping[str, Mapping[Setting, Score]], path: Path) -> None:
    """Perplexity against the number of experts deferred or skipped, and KL where there is a reference.

    Args:
        curves: name of a bundle -> its scores.
    Raises:
        KtcError, UsageError, DiskError: see ktc.drawing.
    """
    with_kl = all(score.kl for scores in curves.values() for score in scores.values())
    figure = new_figure((5 * (1 + with_kl), 3.6), layout="tight")
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots(1, 1 + with_kl, squeeze=False)
    panels: list[tuple[Any, str, str, Any]] = [(axes[0][0], "perplexity", "linear", lambda s: s.perplexity)]
    if with_kl:
        panels.append((axes[0][1], "KL from the reference, nats per token", "log", lambda s: s.mean_kl))
    for axis, title, scale, value in panels:
        for index, (name, scores) in enumerate(curves.items()):
            for kind, style in (("deferred", "o-"), ("skipped", "s--")):
                points = _curve(scores, kind, value)
                axis.plot(*zip(*points, strict=True), style, color=f"C{index}", label=f"{name}, {kind}")
        axis.set_xlabel("experts a token deferred or skipped in each MoE layer")
        axis.set_ylabel(title)
        axis.set_yscale(scale)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].legend()
    write_figure(figure, path)


def _curve(scores: Mapping[Setting, Score], kind: str, value: Any) -> list[tuple[int, float]]:
    points = []
    for setting, score in scores.items():
        if setting.mode == "decode" and (kind == "skipped" or not setting.n_skipped):
            count = setting.n_skipped if kind == "skipped" else setting.n_deferred
            if kind == "skipped" and setting.n_deferred:
                continue
            points.append((int(count or 0), float(value(score))))
    return sorted(points)
