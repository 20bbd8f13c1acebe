"""What cannot be written is found out before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktc.errors import DiskError
from ktc.outputs import check_outputs


def test_what_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").touch()
    check_outputs(None, Path("new.json"), tmp_path / "old.json", Path("/dev/null"))
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]  # nothing is made


def test_what_cannot_be_written_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path / "no" / "x.json", "there is no folder"),
        (tmp_path / "file" / "x.json", "is not a folder"),
        (tmp_path, "it is a folder"),
    ):
        with pytest.raises(DiskError, match=f"cannot be written: .*{message}") as caught:
            check_outputs(None, path)
        assert caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_without_permission(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    with pytest.raises(DiskError, match="no permission to write in"):
        check_outputs(folder / "x.json")
