"""Repacking: the bytes of a fresh compile for that node count, whatever the way there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ktc.bundle import open_bundle
from ktc.bundle.repack import repack
from ktc.bundle.verify import verify
from ktc.errors import UsageError
from tests.bundle.conftest import tree

SHAPE = {"moe_intermediate_size": 192, "hidden_size": 96}
RECIPES = ["int4", "int8", "bf16"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("start", "way"), [(1, [2]), (1, [3]), (2, [1]), (3, [2]), (1, [3, 2, 1])])
def test_repacked_bytes_are_those_of_a_fresh_compile(compiled, tmp_path: Path, recipe: str, start: int, way) -> None:
    here = compiled("deepseek_v3", recipe, nodes=start, **SHAPE)
    for step, nodes in enumerate(way):
        here = repack(open_bundle(here), nodes, tmp_path / f"{step}.ktc", variants=())
    assert tree(here) == tree(compiled("deepseek_v3", recipe, nodes=way[-1], **SHAPE))


def test_experts_with_biases(compiled, tmp_path: Path) -> None:
    shape = {"intermediate_size": 192}
    out = repack(open_bundle(compiled("gpt_oss", **shape)), 3, tmp_path / "3.ktc", variants=())
    assert tree(out) == tree(compiled("gpt_oss", nodes=3, **shape))
    assert verify(out, variant="portable").ok


def test_kernels_follow_the_new_shapes(with_kernels: Path, tmp_path: Path) -> None:
    out = open_bundle(repack(open_bundle(with_kernels), 1, tmp_path / "1.ktc"))
    assert [k["variant"] for k in out.manifest["kernels"]] == ["portable"]
    assert (None, "golden.logits") in out.tensors
    assert tree(out.path) == tree(with_kernels)


def test_c10_an_interrupted_repack_continues(compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """failures.md C10: what was finished is kept and said; the same call does the rest, to the byte."""
    bundle, said = open_bundle(compiled("deepseek_v3", **SHAPE)), []
    real, left = os.pwrite, bundle.files["weights/device/D000.safetensors"]["size"] + 10_000  # that shard, and a bit

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise KeyboardInterrupt
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(KeyboardInterrupt):
            repack(bundle, 2, tmp_path / "2.ktc", variants=(), jobs=1, say=said.append)
    assert [p.name for p in tmp_path.iterdir()] == ["2.ktc.partial"] and "same command continues" in said[-1]
    finished = [p for p in tmp_path.rglob("*.safetensors") if p.is_file()]
    assert finished
    before = {p.name: p.stat().st_ino for p in finished}
    out = repack(bundle, 2, tmp_path / "2.ktc", variants=(), say=said.append)
    assert before.items() <= {p.name: p.stat().st_ino for p in out.rglob("*.safetensors")}.items()
    assert tree(out) == tree(compiled("deepseek_v3", nodes=2, **SHAPE))


def test_s4_an_impossible_node_count_is_refused(compiled, tmp_path: Path) -> None:
    # failure S4: too many nodes for the intermediate size crashed at load.
    bundle = open_bundle(compiled("deepseek_v3", **SHAPE))
    with pytest.raises(UsageError, match="cannot be split over 4 nodes; 1 to 3 nodes work"):
        repack(bundle, 4, tmp_path / "x.ktc", variants=())
    with pytest.raises(UsageError, match="0 nodes"):
        repack(bundle, 0, tmp_path / "x.ktc", variants=())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_kept(compiled, tmp_path: Path) -> None:
    bundle = open_bundle(compiled("deepseek_v3", **SHAPE))
    out = Path(shutil.copytree(bundle.path, tmp_path / "x.ktc"))
    with pytest.raises(UsageError, match="already exists"):
        repack(bundle, 2, out, variants=())
    assert tree(out) == tree(bundle.path)
    repack(bundle, 2, out, variants=(), force=True)
    assert open_bundle(out).nodes == 2 and [p.name for p in tmp_path.iterdir()] == ["x.ktc"]
