"""The native graph over compiled bundles: same logits and text as the eager engine, and no torch in the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktc import _runtime
from ktc.engine.chat import load_tokenizer
from ktc.engine.generate import TextGenerator
from ktc.errors import BundleError, KtcError
from ktc.native import NativeModel, open_native
from tests.parity.conftest import MODELS

NAMES = list(MODELS)
Native = Callable[..., NativeModel]


@pytest.fixture(scope="session")
def native(bundle: Callable[..., Path], library: Callable[[str], Path], best_variant: str) -> Native:
    def get(name: str, recipe: str, nodes: int = 1, **options: Any) -> NativeModel:
        options = {"kernel_library": library(best_variant), "threads": 2, **options}
        return open_native(bundle(name, recipe, nodes), emulate_nodes=nodes > 1, **options)

    return get


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed))


def eager_logits(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(ids[None]).logits[0].float().numpy()


def native_logits(model: NativeModel, ids: torch.Tensor, prefill: int) -> Any:
    model.reset()
    first = model.prefill(ids[:prefill].tolist(), rows=prefill)
    return np.concatenate([first, *[model.decode(int(i))[None] for i in ids[prefill:]]])


def relative(got: Any, want: Any) -> float:
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_the_report_says_how_kernels_are_chosen(
    native: Native, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KTC_CONFIG_DIR", str(tmp_path))  # nothing is stored there
    report = native("qwen3_moe", "fp32").ktc_report
    assert report is not None
    assert any(line.startswith("  kernel choice: built-in defaults") for line in report.lines())


@pytest.mark.parametrize("name", NAMES)
def test_graph_equals_eager_engine(native: Native, loaded: Callable[..., Any], name: str) -> None:
    ids = ids_of(45)
    model = native(name, "fp32")
    assert relative(native_logits(model, ids, 29), eager_logits(loaded(name, "fp32"), ids)) <= 1e-5


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe", "gpt_oss", "granitemoe"])
@pytest.mark.parametrize("recipe", ["int4", "int8", "bf16"])
def test_quantised_graph_equals_eager_engine(
    native: Native, loaded: Callable[..., Any], name: str, recipe: str
) -> None:
    """Quantised activations round: a last-bit difference may move one of them by a step, so the bound is a step."""
    ids = ids_of(21, seed=3)
    got, want = native_logits(native(name, recipe), ids, 13), eager_logits(loaded(name, recipe), ids)
    assert relative(got, want) <= 2e-2
    assert np.median(np.abs(got - want)) <= 2e-3 * np.abs(want).max()


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_prefill_attention_is_bf16_where_the_recipe_is(native: Native, name: str) -> None:
    """Decides what is multiplied in prefill only; f32 recipes, and CPUs without bf16, keep f32."""
    ids = ids_of(90, seed=8)
    for recipe, kind in (("fp32", 0), ("bf16", 1), ("int4", 1)):
        nodes = [n for n in native(name, recipe).graph.program.nodes if n.op in ("gqa", "mla")]
        assert nodes and all(n.params["bf16"] == kind for n in nodes)
    plain = native(name, "bf16", isa="baseline")
    assert plain.graph.prefill_type == native(name, "fp32").graph.prefill_type == "fp32"
    want = native_logits(plain, ids, 70)
    for isa in {"avx512_bf16", "amx"} & set(_runtime.ops.available()):
        model = native(name, "bf16", isa=isa)
        assert model.ktc_report is not None and "prefill attention bf16" in "\n".join(model.ktc_report.lines())
        got = native_logits(model, ids, 70)
        error = np.abs(got - want).max(axis=1) / np.abs(want).max()  # of each token: a router's near-tie may move one
        assert error[:70].min() > 0
        assert np.quantile(error, 0.9) <= 2e-2
        assert np.median(np.abs(got - want)) <= 3e-3 * np.abs(want).max()


def test_nodes_and_threads_give_the_same(native: Native) -> None:
    ids = ids_of(20, seed=4)
    one = native_logits(native("deepseek_v3", "fp32"), ids, 11)
    assert np.array_equal(native_logits(native("deepseek_v3", "fp32", threads=1), ids, 11), one)
    assert relative(native_logits(native("qwen2_moe", "fp32", 1), ids, 11), native_logits(
        native("qwen2_moe", "fp32", 1, isa="baseline"), ids, 11)) <= 1e-5  # fmt: skip


def test_every_chunk_size_gives_the_same(native: Native) -> None:
    ids = ids_of(50, seed=5).tolist()
    whole = native("gpt_oss", "fp32").prefill(ids)
    for chunk in (1, 7, 49):
        assert relative(native("gpt_oss", "fp32", chunk=chunk).prefill(ids), whole) <= 1e-5


def test_deferral_over_packed_experts(native: Native, loaded: Callable[..., Any]) -> None:
    """Two slots a token leave nothing to defer; the tiny models are refused, as any other top-2 model."""
    with pytest.raises(KtcError, match="fewer than 2 immediate"):
        native("mixtral", "fp32", n_deferred=1)
    ids = ids_of(20, seed=6)
    skipped = native_logits(native("qwen3_moe", "fp32", n_skipped=1), ids, 10)
    plain = native_logits(native("qwen3_moe", "fp32"), ids, 10)
    assert np.array_equal(skipped[:10], plain[:10])
    assert relative(skipped[10:], plain[10:]) > 1e-4


def test_a3_context_full_is_said(native: Native) -> None:
    # failure A3: the end of the context aborted the process.
    model = native("qwen3_moe", "fp32", context=16)
    model.prefill(list(range(3, 18)))
    model.decode(5)
    with pytest.raises(KtcError, match="context full"):
        model.decode(5)
    assert model.position == 16
    model.position = 3
    assert np.isfinite(model.decode(5)).all()
    with pytest.raises(KtcError, match="outside the vocabulary"):
        model.decode(model.vocab)


def test_damaged_graph_is_refused(native: Native, bundle: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy.ktc"
    shutil.copytree(bundle("qwen3_moe", "fp32"), copy)
    file = copy / "graph" / "program.json"
    data = json.loads(file.read_text())
    data["nodes"][2]["op"] = "layer_norm"
    file.write_text(json.dumps(data))
    with pytest.raises(BundleError):
        open_native(copy)


def test_inspect_prints_the_graph(bundle: Callable[..., Path]) -> None:
    from click.testing import CliRunner

    from ktc.cli.inspect_cmd import command

    result = CliRunner().invoke(command, [str(bundle("deepseek_v3", "int4")), "--graph"], standalone_mode=False)
    assert result.exception is None, result.exception
    assert (
        "graph of deepseek_v3" in result.output
        and "tiles=" in result.output
        and "steps of up to 1 token" in result.output
    )
    result = CliRunner().invoke(
        command, [str(bundle("deepseek_v3", "int4")), "--graph", "--json"], standalone_mode=False
    )
    assert json.loads(result.output)["model_type"] == "deepseek_v3"


SCRIPT = """
import json, sys
from pathlib import Path
from ktc.native import open_native
from ktc.native.generate import NativeGenerator
from ktc.native.tokenizer import load_tokenizer
from ktc.engine.chat import encode_text, encode_chat
path, library = sys.argv[1:]
model = open_native(path, kernel_library=library, threads=2)
tokenizer = load_tokenizer(Path(path) / "model")
generator = NativeGenerator(model, tokenizer)
out = generator.generate(encode_text(tokenizer, "the lazy dog"), max_tokens=16)
chat = generator.generate(encode_chat(tokenizer, [{"role": "user", "content": "hello"}]), max_tokens=8)
again = generator.generate(encode_text(tokenizer, "the lazy dog"), max_tokens=16)
loaded = [m for m in ("torch", "transformers") if m in sys.modules]
print(json.dumps({"ids": out.ids, "text": out.text, "again": again.ids, "chat": chat.ids, "loaded": loaded}))
"""


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_generation_without_torch(
    bundle: Callable[..., Path],
    library: Callable[[str], Path],
    best_variant: str,
    loaded: Callable[..., Any],
    name: str,
) -> None:
    path = bundle(name, "fp32")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(library(best_variant))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["loaded"] == []
    assert got["again"] == got["ids"]
    from ktc.engine.chat import encode_chat, encode_text

    tokenizer = load_tokenizer(path / "model")
    eager = TextGenerator(loaded(name, "fp32"), tokenizer)
    want = eager.generate(encode_text(tokenizer, "the lazy dog"), max_tokens=16)
    assert (got["ids"], got["text"]) == (want.ids, want.text)
    eager.reset()
    chat = encode_chat(tokenizer, [{"role": "user", "content": "hello"}])
    assert got["chat"] == eager.generate(chat, max_tokens=8).ids


def test_memory_that_is_not_there_is_refused_first(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc.engine import memory

    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(KtcError, match=r"the caches of 256 positions need .*, 1000 B are available") as raised:
        native("qwen3_moe", "int4")
    assert "--context" in str(raised.value.hint)
    native("qwen3_moe", "int4", check_memory=False)


def test_report_says_what_runs_where(native: Native) -> None:
    report = native("qwen3_moe", "int4").ktc_report
    assert report is not None
    text = "\n".join(report.lines())
    assert "routed experts int4-g16c on" in text and "caches" in text and "in huge pages" in text
    assert 0 <= report.huge_bytes <= report.weight_bytes
