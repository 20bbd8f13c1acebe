"""Paths as users type them, for users of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktc import paths
from ktc.errors import DiskError


def test_a_tilde_without_a_user_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert paths.expand("~/x") == Path("/home/someone/x")
    assert paths.expand("~no-such-user/x") == Path("~no-such-user/x")


def test_the_nearest_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts" / "demo").mkdir(parents=True)
    assert paths.nearest("artifacts/dmo") == paths.nearest("artifcats/demo") == Path("artifacts/demo")
    assert paths.nearest("artifacts/demo") == Path("artifacts/demo")
    assert paths.nearest(tmp_path / "artifact" / "dem") == tmp_path / "artifacts" / "demo"
    assert paths.nearest("xyz") is None and paths.nearest("artifacts/demo/config.json") is None
    (tmp_path / "ctrlc.ktc").mkdir()
    assert paths.nearest("cpk.ktc") is None and paths.nearest("ctrl.ktc") == Path("ctrlc.ktc")
    assert paths.did_you_mean("artifact/demo") == "did you mean artifacts/demo? " and paths.did_you_mean("xyz") == ""


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(DiskError, match="no home directory") as error:
        paths.home()
    assert "KTC_CACHE_DIR" in (error.value.hint or "")
    from ktc.perf import tuning

    monkeypatch.delenv("KTC_CONFIG_DIR", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert not tuning.load().applied  # a run needs no home for its tuning
