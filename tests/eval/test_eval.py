"""`ktc eval` over tiny bundles: its figures are those of the engine and of Hugging Face; bad input is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from ktc.cli.eval_cmd import command
from ktc.compile import compile_checkpoint
from ktc.engine.perplexity import perplexity
from tests.tiny import make_tiny

TEXT = "The quick brown fox jumps over the lazy dog, and naïve cafés are déjà vu. " * 3
TOP_K = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "qwen3_moe", tmp_path_factory.mktemp("eval") / "m", tokenizer="byte", num_experts_per_tok=TOP_K, num_experts=8,
        num_hidden_layers=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Callable[[str], Path]:
    def get(recipe: str) -> Path:
        path = checkpoint.parent / f"{recipe}.ktc"
        if not path.exists():
            compile_checkpoint(checkpoint, recipe, path, variants=(), jobs=1)
        return path

    return get


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> Path:
    path = checkpoint.parent / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)


def results(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exception is None, repr(result.exception)
    return json.loads(result.stdout)


def test_figures_equal_hugging_face(bundle: Any, text: Path, checkpoint: Path) -> None:
    """An fp32 bundle: perplexity as transformers computes it, KL from the checkpoint next to nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = results(bundle("fp32"), "--text", text, "--window", 32, "--reference", checkpoint)
    assert "fp32" in out["reference"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    want = perplexity(model, AutoTokenizer.from_pretrained(checkpoint), TEXT, window=32)
    for row in out["results"]:
        assert row["tokens"] == want.tokens == len(TEXT.encode())
        assert row["nll"] == pytest.approx(want.nll, rel=1e-5)
        assert abs(row["kl"]) < 1e-7 and row["same_top"] == 1.0


def test_table_has_every_k_and_more_is_worse(bundle: Any, text: Path) -> None:
    out = results(bundle("fp32"), "--text", text, "--window", 64, "--table", "--reference", bundle("fp32"))
    assert out["reference"] == "fp32.ktc (fp32), prefill"
    rows = {(r["mode"], r["deferred"], r["skipped"]): r for r in out["results"]}
    deferred = [("decode", k, 0) for k in range(TOP_K - 1)]
    skipped = [("decode", 0, k) for k in range(1, TOP_K)]
    assert list(rows) == [("prefill", None, 0), *deferred, *skipped]
    kl = [rows[key]["kl"] for key in skipped]
    assert rows["decode", 0, 0]["kl"] < 1e-7 < kl[0] < kl[1] < kl[2]
    assert all(rows[key]["kl"] > 1e-4 and rows[key]["change_error"] > 0 for key in deferred[1:])


def test_deferral_shows_in_decode_only(bundle: Any, text: Path) -> None:
    plain = results(bundle("fp32"), "--text", text, "--limit", 60)["results"]
    other = results(bundle("fp32"), "--text", text, "--limit", 60, "--deferred", 2)["results"]
    assert other[0]["nll"] == plain[0]["nll"]
    assert abs(other[1]["nll"] - plain[1]["nll"]) > 1e-4
    assert other[1]["setting"] == "decode, 2 deferred"


def test_markdown_and_plot(bundle: Any, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    result = run(bundle("fp32"), "--text", text, "--limit", 40, "--table", "--plot", file)
    assert result.exception is None, repr(result.exception)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| setting | perplexity (40 tokens) | change |") and "KL" not in lines[0]
    assert len(lines) == 2 + 1 + (TOP_K - 1) + (TOP_K - 1)
    assert file.read_bytes().startswith(b"\x89PNG")
    bad = run(bundle("fp32"), "--text", text, "--limit", 40, "--table", "--plot", tmp_path / "no" / "plot.png")
    assert "cannot be written: there is no folder" in str(bad.exception) and bad.stdout == ""


def test_bad_input_is_said(bundle: Any, text: Path, checkpoint: Path, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    short = tmp_path / "short.txt"
    short.write_text("a")
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 2)
    other = make_tiny("qwen3_moe", tmp_path / "other")  # another vocabulary
    good = ("--text", text, "--limit", 40)
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--text", tmp_path / "none.txt"), "cannot read the text"),
        (("--text", latin), "not UTF-8: byte 3"),
        (("--text", short), "fewer than two tokens"),
        ((*good, "--deferred", 3), "leaves fewer than 2 immediate"),
        ((*good, "--skip", 4), "leaves none"),
        ((*good, "--table", "--skip", 1), "leave out --deferred and --skip"),
        ((*good, "--plot", "x.png"), "--plot draws --table"),
        ((*good, "--reference", tmp_path / "none"), "none"),
        ((*good, "--reference", other), "not the same model"),
        (("--text", long, "--window", 300), "does not fit the context of 256"),
    ]
    for arguments, message in cases:
        assert message in str(run(bundle("fp32"), *arguments).exception), arguments


def test_a_quantised_reference_bundle_is_noted(bundle: Any, text: Path) -> None:
    arguments = ("--text", text, "--limit", 40, "--reference")
    assert "the reference is itself quantised (int8-channel)" in run(bundle("fp32"), *arguments, bundle("int8")).stderr
    assert "quantised" not in run(bundle("fp32"), *arguments, bundle("fp32")).stderr


def test_quantised_reference_checkpoint_is_refused(bundle: Any, text: Path, tmp_path: Path) -> None:
    fp8 = make_tiny("qwen3_moe", tmp_path / "fp8", fmt="fp8")
    result = run(bundle("fp32"), "--text", text, "--limit", 40, "--reference", fp8)
    assert "quantised weights" in str(result.exception)
