"""Two compiles of one output, of which the other one is done first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ktc.compile
from ktc.compile import compile_checkpoint
from ktc.errors import UsageError
from ktc.pack.journal import partial_dir


def test_a_bundle_that_appears_before_the_lock_is_free_costs_no_packing(
    compiled, tiny_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out, key = compiled("deepseek_v3"), tmp_path / "m.ktc", ktc.compile._key

    def finish_the_other(c: ktc.compile.Compilation) -> object:
        shutil.copytree(made, out)
        return key(c)

    monkeypatch.setattr(ktc.compile, "_key", finish_the_other)
    with pytest.raises(UsageError, match="already exists"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", out, variants=())
    assert not partial_dir(out).exists()  # nothing was packed that would be worth keeping
