"""Expert use as a table and as a plot (matplotlib, imported only for that)."""

from __future__ import annotations

from pathlib import Path

from ktc.drawing import new_figure, write_figure
from ktc.plan.expert_use import ExpertUse

FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the experts of a layer, whose share of the uses the table shows."""
MOST = 5


def columns(use: ExpertUse) -> list[int]:
    """Numbers of hot experts that are worth a column."""
    return sorted({max(1, round(use.model.experts * f)) for f in FRACTIONS})


def markdown(use: ExpertUse) -> str:
    """Per layer: the share of the uses that the most used N experts take, and which those are."""
    numbers = columns(use)
    header = ["layer", *(f"top {n}" for n in numbers), "never used", "most used (expert: share)"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for layer, counts in sorted(use.layers.items()):
        shares = [f"{use.share(layer, use.hottest(layer, n)):.1%}" for n in numbers]
        first = sorted(range(len(counts)), key=lambda e: (-counts[e], e))[:MOST]
        named = ", ".join(f"{e}: {use.share(layer, (e,)):.1%}" for e in first)
        lines.append("| " + " | ".join([str(layer), *shares, str(counts.count(0)), named]) + " |")
    even = ", ".join(f"{n / use.model.experts:.1%}" for n in numbers)
    m = use.model
    lines += [
        "",
        f"{use.tokens} tokens, {m.experts} experts a layer, {m.top_k} of them a token; top N: what the most used N take"
        f" of a layer's uses (evenly used: {even}).",
    ]
    return "\n".join(lines)


def plot(use: ExpertUse, path: Path) -> None:
    """One row per layer, its experts from the most to the least used.

    Raises:
        KtcError, UsageError, DiskError: see ktc.drawing.
    """
    layers = sorted(use.layers)
    shares = [sorted((c / max(1, sum(use.layers[i])) for c in use.layers[i]), reverse=True) for i in layers]
    figure = new_figure((7, 1.5 + 0.16 * len(layers)), layout="tight")
    axis = figure.subplots()
    image = axis.imshow([[100 * s for s in row] for row in shares], aspect="auto", cmap="viridis", vmin=0)
    axis.set_xlabel("experts of a layer, most used first")
    axis.set_ylabel("MoE layer")
    step = -(-len(layers) // 16)
    axis.set_yticks(range(0, len(layers), step), [str(i) for i in layers[::step]])
    figure.colorbar(image, label="% of the layer's uses")
    write_figure(figure, path)
