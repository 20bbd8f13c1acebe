"""The timeline of a few layers as a picture, K = 0 above the K that auto takes. matplotlib is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktc.drawing import new_figure, write_figure
from ktc.simulate.metrics import steady_window
from ktc.simulate.report import lanes
from ktc.simulate.schedule import DEVICE, HOST, LINK
from ktc.simulate.sweep import Row, Simulation

COLOURS = {
    "attention": "#4878a8",
    "shared": "#6aa6c8",
    "merge": "#9cc4dc",
    "head": "#9cc4dc",
    "immediate": "#d9822b",
    "deferred": "#f2c078",
    "copy out": "#7a7a7a",
    "copy back": "#7a7a7a",
    "submit": "#5a9a5a",
    "sync": "#b7d7b7",
}
LAYERS = 4


def write_plot(sim: Simulation, path: Path) -> None:
    """Draw `LAYERS` layers from the middle of the model; the suffix of `path` says the format.

    Raises: as `draw_rows`.
    """
    chosen = [sim.rows[0]] + ([sim.rows[sim.auto]] if sim.auto else [])
    title = f"{sim.plan.model_type}, {sim.plan.recipe}, on {sim.hardware.name} (simulated)"
    draw_rows(chosen, lanes(sim), title, path)


def draw_rows(chosen: Sequence[Row], order: Sequence[str], title: str, path: Path) -> None:
    """Draw rows one above the other; simulated or measured ones.

    Args:
        order: lanes from top to bottom; those without work are left out.
    Raises:
        KtcError, UsageError, DiskError: see ktc.drawing.
    """
    figure = new_figure((11, 1.0 + 1.7 * len(chosen)), layout="constrained")
    from matplotlib.patches import Patch

    axes: Any = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)
    names = [lane for lane in order if any(s.task.lane == lane for s in chosen[0].slices)]
    for axis, row in zip(axes[:, 0], chosen, strict=True):
        _draw(axis, row, names)
    axes[-1, 0].set_xlabel("ms")
    kinds = [kind for kind in COLOURS if kind not in ("head", "copy back")]
    handles = [Patch(color=COLOURS[kind], label=kind.replace(" out", "")) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    write_figure(figure, path)


def _draw(axis: Any, row: Row, names: list[str]) -> None:
    window, layers = steady_window(row.slices)
    middle = sorted({s.task.layer for s in row.slices if s.task.kind == "immediate"})
    first = middle[len(middle) // 2]
    zero = min(s.start for s in row.slices if s.task.layer == first and s.task.kind == "attention")
    span = LAYERS * (window[1] - window[0]) / layers
    for s in row.slices:
        begin, end = s.start - zero, s.end - zero
        if end <= 0 or begin >= span or end == begin:
            continue
        begin, end = max(begin, 0.0), min(end, span)
        height = names.index(s.task.lane)
        axis.barh(height, (end - begin) * 1e3, left=begin * 1e3, height=0.8, color=COLOURS[s.task.kind], linewidth=0)
        if s.task.kind in ("immediate", "attention") and end - begin > span / 25:
            text = f"{s.task.layer}"
            axis.text((begin + end) / 2 * 1e3, height, text, ha="center", va="center", fontsize=7, color="white")
    words = {DEVICE: "device", LINK: "PCIe", HOST: "host"}
    axis.set_yticks(range(len(names)), [words.get(n, n.replace("cpu", "CPU ")) for n in names], fontsize=8)
    axis.invert_yaxis()
    axis.set_title(
        f"K = {row.deferred}: {row.tokens_per_second:.2f} tokens/s, layer {row.layer_seconds * 1e3:.2f} ms,"
        f" CPU {row.layer.cpu:.0%}, device {row.layer.device:.0%}",
        fontsize=9,
        loc="left",
    )
    axis.spines[["top", "right"]].set_visible(False)
