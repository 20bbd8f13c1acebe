"""`ktc inspect`: contents, layers, scratch and verdict, without loading weights or building anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ktc import __version__, load
from ktc.bundle import open_bundle
from ktc.bundle.trust import ready_library
from ktc.host import git_revision
from ktc.native import open_native
from tests.bundle.conftest import edit_manifest
from tests.cli.runner import ktc

Capture = pytest.CaptureFixture[str]


def test_everything_is_shown(with_kernels: Path, capsys: Capture) -> None:
    assert ktc("inspect", with_kernels, "-v") == 0
    out = capsys.readouterr().out
    commit = git_revision()  # of a source checkout
    assert f"made by ktc {__version__}" + (f" ({commit[:12]}" if commit else ";") in out
    for text in (
        "DeepseekV3ForCausalLM",
        "1 of 2 layers x 8 experts, top 2",
        "experts, node 0",
        "model.layers.1.mlp ",
        "model.layers.{0-1}.self_attn.o_proj",
        "int4-g16c",
        "1 MoE layer and logits",
        "verdict: ",
        "kernels/portable/libktc_experts.so",
        "flags of portable: -std=c++17",
    ):
        assert text in out, text
    rows = out.partition("kernels in the bundle\n")[2].partition("\nscratch")[0].splitlines()
    assert len({min(row.find(w) for w in ("runs here", "not for this") if w in row) for row in rows}) == 1  # a column


def test_m2_scratch_is_static_and_shown(with_kernels: Path, capsys: Capture) -> None:
    # failure M2: scratch of 963 GB at a large chunk.
    assert ktc("inspect", with_kernels, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert 0 < facts["scratch"]["decode"] <= facts["scratch"]["prefill of 512 tokens"] < 64 << 20


def test_json(compiled, capsys: Capture) -> None:
    assert ktc("inspect", compiled("deepseek_v3", nodes=2, moe_intermediate_size=192, hidden_size=96), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["nodes"] == 2 and facts["sizes"]["experts, node 1"] > 0 and facts["kernels"] == []
    moe = next(row for row in facts["layers"] if row["operator"] == "moe")
    assert moe["count"] == 1 and moe["modules"] == "model.layers.1.mlp" and moe["bytes"] > 0
    assert {p["name"] for p in facts["verdict"]["parts"]} == {"layout", "device", "topology", "kernels"}
    if facts["verdict"]["level"] == "NEEDS_REPACK":
        topology = next(p for p in facts["verdict"]["parts"] if p["name"] == "topology")
        assert "ktc repack" in topology["fix"]


@pytest.mark.parametrize("graph", [True, False])
def test_the_words_are_those_of_run_v(kernels_copy: Path, capsys: Capture, graph: bool) -> None:
    if not graph:
        (kernels_copy / "graph/program.json").unlink()
        edit_manifest(kernels_copy, lambda m: m.update(files=[f for f in m["files"] if f["role"] != "graph"]))
    library = ready_library(open_bundle(kernels_copy))
    assert library is not None
    model = (open_native if graph else load)(kernels_copy, variant=library[0])
    assert model.ktc_report is not None
    assert ktc("inspect", kernels_copy, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["layers"]
    assert [(row["modules"], row["runs_on"]) for row in rows] == model.ktc_report.layers
    assert ktc("inspect", kernels_copy) == 0
    out = capsys.readouterr().out
    assert "native graph (DeepseekV3RMSNorm)" in out if graph else "Hugging Face DeepseekV3RMSNorm, fp32" in out
    assert ("Hugging Face" in out) != graph


def test_neither_torch_nor_transformers_is_imported(with_kernels: Path) -> None:
    code = (
        "import sys\nfrom ktc.cli.main import main\n"
        f"try:\n    main(['inspect', {str(with_kernels)!r}])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_repack_command(compiled, tmp_path: Path, monkeypatch, capsys: Capture) -> None:
    source = compiled("deepseek_v3", moe_intermediate_size=192, hidden_size=96)
    assert ktc("repack", source, "--nodes", 3, "-o", tmp_path / "3.ktc") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / '3.ktc'}: 3 nodes",
        f"next: ktc verify {tmp_path / '3.ktc'}",
    ]
    assert ktc("repack", source, "--nodes", 4, "-o", tmp_path / "4.ktc") == 2
    assert "1 to 3 nodes work" in capsys.readouterr().err
    assert ktc("repack", source, "-o", tmp_path / "4.ktc") == 2
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert ktc("repack", source, "--nodes", 3, "-o", "my 3.ktc") == 0
    assert capsys.readouterr().out.splitlines() == ["my 3.ktc: 3 nodes", "next: ktc verify 'my 3.ktc'"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3.ktc", "my 3.ktc"]
