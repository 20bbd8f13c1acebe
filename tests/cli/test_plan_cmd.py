"""`ktc plan`: what can be wrong on its command line. The plans themselves are tested in tests/plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktc.cli.main import main
from ktc.plan import Plan

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LONGROPE = {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 10.0,
                             "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}}  # fmt: skip


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_table_and_json_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory with nothing but config.json is enough."""
    (tmp_path / "config.json").write_text((CONFIGS / "Qwen3-30B-A3B.json").read_text())
    assert run(str(tmp_path), "--recipe", "int8", "--nodes", "2") == 0
    out, err = capsys.readouterr()
    assert "model.layers.{0-47}.mlp " in out and "experts, node 1" in out and err == ""
    assert run(str(tmp_path), "-r", "int8", "-n", "2", "--json") == 0
    plan = Plan.from_json(json.loads(capsys.readouterr().out))
    assert (plan.nodes, plan.recipe, len(plan.moe_modules())) == (2, "int8", 48)
    assert run(str(tmp_path), "-r", "int8", "-v") == 0
    assert "model.layers.47.mlp " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        ("Qwen3-30B-A3B", {}, "decode graph: 486 nodes, all native (what no rule matched, on the weights as stored);"
         " prefill attention bf16"),
        ("GLM-5", {}, "decode graph: 777 nodes, 78 of them callbacks into torch, so it is loaded and slower; the"
         " others native (what no rule matched, on the weights as stored); prefill attention in torch\n"
         "  model.layers.{0-77}.self_attn is Hugging Face's code, called in torch: sparse attention"),
        ("Qwen3-30B-A3B", LONGROPE, "decode graph: 293 nodes, 48 of them callbacks into torch, so it is loaded and"
         " slower; the others native (what no rule matched, on the weights as stored); prefill attention in torch\n"
         "  model.layers.{0-47}.self_attn is Hugging Face's code, called in torch: rope type 'longrope' changes"),
    ],
)  # fmt: skip
def test_what_keeps_a_module_off_the_graph_is_named(
    config: str,
    change: dict[str, object],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ktc._runtime.bf16_attention", lambda: True)
    raw = json.loads((CONFIGS / f"{config}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    code = run(str(tmp_path), "-r", "bf16")
    out, err = capsys.readouterr()
    assert code == 0, err
    assert f"\n\n{says}" in out


def test_prefill_attention_is_what_this_cpu_would_run() -> None:
    """On one without bf16: fp32, as `ktc run -v` says there, and what the recipe would allow."""
    command = [sys.executable, "-m", "ktc", "plan", str(CONFIGS / "Qwen3-30B-A3B.json"), "-r", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "KTC_OPS_ISA": "baseline"})
    assert done.returncode == 0, done.stderr
    assert "; prefill attention fp32; the recipe allows bf16, which this CPU lacks\n" in done.stdout


def test_an_uneven_split_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """768 columns in blocks of 64 do not divide by 5; over 4 nodes they do."""
    config = str(CONFIGS / "Qwen3-30B-A3B.json")
    assert run(config, "-r", "int8", "-n", "5") == 0
    out = capsys.readouterr().out
    said = "split unevenly: 768 columns as 128, 128, 192, 128, 192; a layer waits for the widest, 1.25x an even split"
    assert f"* model.layers.{{0-47}}.mlp: {said} (48 modules" in out
    assert run(config, "-r", "int8", "-n", "4") == 0
    assert "unevenly" not in capsys.readouterr().out


def test_a_faulty_recipe_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("- match: {role: moe}\n  replace: {class: ktc.FuzedMoE}\n")
    assert run("no-such-checkpoint", "--recipe", str(recipe)) == 4
    err = capsys.readouterr().err
    assert err.startswith(f"ktc: error: {recipe}:2:20: replace.class: 'ktc.FuzedMoE'")
    assert "hint: did you mean ktc.FusedMoE?" in err


def test_a_recipe_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failure C7: on the command line, with the rule's line and exit code 4."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "\n- match: {class: Qwen9MoeBlock}\n  replace: {class: ktc.FusedMoE, kwargs: {data_type: int4}}\n"
    )
    assert run(str(CONFIGS / "Qwen3-30B-A3B.json"), "-r", str(recipe)) == 4
    err = capsys.readouterr().err
    assert f"rule 1 ({recipe}:2): matches no module of this qwen3_moe model: class=Qwen9MoeBlock" in err
    assert "Qwen3MoeSparseMoeBlock" in err


def test_no_checkpoint_and_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path)) == 3
    assert "config.json" in capsys.readouterr().err
    assert run(str(tmp_path / "nowhere.json")) == 3
    assert "nowhere.json" in capsys.readouterr().err


def test_a_model_that_is_not_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert run(str(tmp_path)) == 5
    assert "dense model" in capsys.readouterr().err


def test_nodes_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("x", "--nodes", "0") == 2
    assert "--nodes" in capsys.readouterr().err
