"""Pictures, for which matplotlib is needed and nothing else of ktc is: may one be drawn, a new one, and writing it.

What is in a picture is said where its figures are made (eval, perf, simulate).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.errors import DiskError, KtcError, UsageError
from ktc.outputs import check_outputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENDINGS = "end its name in .png, .svg or .pdf"


def check_picture(path: Path | None) -> None:
    """Complain before anything is measured, not after. None: no picture is wanted.

    Raises:
        KtcError: matplotlib is not installed.
        UsageError: the path ends in no format that it writes.
        DiskError: it cannot be written.
    """
    if path is None:
        return
    known = new_figure((1, 1)).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UsageError(f"{path}: no format for pictures is called {path.suffix or 'nothing'!r}", _ENDINGS)
    check_outputs(path)


def new_figure(size: tuple[float, float], **options: Any) -> Figure:
    """An empty figure of `size` inches that no window shows.

    Raises:
        KtcError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KtcError("a picture needs matplotlib, which is not installed", "pip install 'ktc[plot]'") from error
    return Figure(figsize=size, **options)


def write_figure(figure: Figure, path: Path) -> None:
    """Write it in the format that the ending of `path` names.

    Raises:
        UsageError: an ending that matplotlib does not know.
        DiskError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DiskError(f"the picture {path} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the picture {path} cannot be written: {' '.join(str(error).split())}", _ENDINGS) from error
