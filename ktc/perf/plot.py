"""Plot of `ktc bench kernels`: per shape, the roofline and where each contestant is under it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.drawing import new_figure, write_figure

if TYPE_CHECKING:
    from ktc.perf.figures import Report


def plot(report: Report, path: Path) -> None:
    """Write a PNG (or what the suffix of `path` says): milliseconds and multiples of the floor over tokens.

    Raises:
        KtcError, UsageError, DiskError: see ktc.drawing.
    """
    shapes = list(dict.fromkeys(row.shape for row in report.rows))
    figure = new_figure((6.5 * len(shapes), 9), layout="tight")
    axes = figure.subplots(2, len(shapes), squeeze=False)
    for column, shape in enumerate(shapes):
        time_axis, floor_axis = axes[0][column], axes[1][column]
        rows = [row for row in report.rows if row.shape == shape]
        for index, name in enumerate(dict.fromkeys(row.name for row in rows)):
            mine = [row for row in rows if row.name == name]
            tokens = [row.tokens for row in mine]
            color = f"C{index % 10}"
            own = name.startswith("ktc")
            style = {"marker": "o" if own else "x", "linewidth": 2.0 if own else 1.0, "color": color, "label": name}
            time_axis.plot(tokens, [row.ms for row in mine], **style)
            if own:
                time_axis.plot(tokens, [row.floor_ms for row in mine], linestyle=":", color=color)
            floor_axis.plot(tokens, [row.x_floor for row in mine], **style)
        time_axis.set(title=f"{shape}: ms a layer (dotted: floor)", xscale="log", yscale="log", ylabel="ms")
        floor_axis.axhline(1.0, color="black", linewidth=0.8)
        floor_axis.set(title="multiple of the floor", xscale="log", yscale="log", xlabel="tokens", ylabel="x floor")
        for axis in (time_axis, floor_axis):
            axis.set_xscale("log", base=2)
            _plain_numbers(axis, sorted({row.tokens for row in rows}))
            axis.grid(True, which="both", alpha=0.25)
        time_axis.legend(fontsize=8)
    about = report.about
    figure.suptitle(f"{about.get('cpu', '')}, {about.get('threads', '?')} threads, {about.get('variant', 'no ktc')}")
    write_figure(figure, path)


def _plain_numbers(axis: Any, tokens: list[int]) -> None:
    """Ticks as people write numbers, not as powers: the measured token counts, and 1, 2, 5, 10, ... upwards."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xticks(tokens, [str(count) for count in tokens])
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
