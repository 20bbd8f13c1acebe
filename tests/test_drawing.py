"""Pictures: refused before anything is measured, and written whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ktc.drawing import check_picture, new_figure, write_figure
from ktc.errors import DiskError, KtcError, UsageError


def test_a_picture_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_picture(None)
    for good in ("a.png", "a.SVG", "a.pdf"):
        check_picture(tmp_path / good)
    for bad in ("a.nonsense", "a", "a."):
        with pytest.raises(UsageError, match="no format for pictures") as caught:
            check_picture(tmp_path / bad)
        assert caught.value.hint == "end its name in .png, .svg or .pdf"
    with pytest.raises(DiskError, match="there is no folder"):
        check_picture(tmp_path / "no" / "a.png")


def test_written_or_said_why_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = new_figure((1, 1))
    figure.subplots().plot([1, 2])
    write_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot be written: Format 'nonsense'"):
        write_figure(figure, tmp_path / "a.nonsense")
    with pytest.raises(DiskError, match="cannot be written: No such file or directory"):
        write_figure(figure, tmp_path / "no" / "a.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KtcError, match="matplotlib, which is not installed") as caught:
        check_picture(tmp_path / "a.png")
    assert caught.value.hint == "pip install 'ktc[plot]'"
