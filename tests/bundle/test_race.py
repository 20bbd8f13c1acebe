"""Two compiles of one output, of which the other one is done first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ktc.compile
from ktc.bundle import open_bundle
from ktc.bundle.repack import repack
from ktc.compile import compile_checkpoint
from ktc.errors import BuildError, KtcError, UsageError
from ktc.pack.journal import Journal, partial_dir
from ktc.pack.writer import hash_file


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


@pytest.mark.parametrize("command", ["compile", "repack"])
def test_a_second_writer_is_refused_before_kernels_are_built(
    command: str, compiled, tiny_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("kernels were to be built")

    monkeypatch.setattr("ktc.bundle.kernels.build_kernels", build)
    out = tmp_path / "m.ktc"
    with Journal(out, {}), pytest.raises(KtcError, match="another process is writing"):
        if command == "compile":
            compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", out, variants=("portable",))
        else:
            repack(open_bundle(compiled("deepseek_v3")), 1, out, variants=("portable",))


def test_kernels_that_cannot_be_built_leave_nothing(
    tiny_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr("ktc.bundle.kernels.build_kernels", build)
    with pytest.raises(BuildError, match="no compiler"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "m.ktc", variants=("portable",))
    assert not partial_dir(tmp_path / "m.ktc").exists()


def test_other_inputs_matter_once_a_shard_is_finished(tmp_path: Path) -> None:
    """A compile that was killed while kernels were built has nothing that would have to be discarded."""
    out = tmp_path / "m.ktc"
    with Journal(out, {"recipe": "a"}):
        pass
    with Journal(out, {"recipe": "b"}) as journal:
        (journal.bundle / "x").write_bytes(b"x")
        journal.add("x", hash_file(journal.bundle / "x"))
    with pytest.raises(UsageError, match="unfinished compile with another recipe"):
        Journal(out, {"recipe": "c"})
