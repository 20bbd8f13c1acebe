"""Bundles whose graph calls Hugging Face's modules: by a recipe's rule, or because there is no native operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ktc.compile import compile_checkpoint
from ktc.engine.generate import TextGenerator
from ktc.engine.kernels import Kernels
from ktc.engine.linear import KtcLinear
from ktc.errors import BundleError, KtcError, RecipeError
from ktc.native import NativeModel, open_native
from ktc.native.generate import NativeGenerator
from ktc.native.tokenizer import load_tokenizer
from tests.cli.runner import ktc
from tests.parity.test_native import eager_logits, ids_of, native_logits, relative
from tests.tiny import longrope, make_tiny

MOE = "- match: {role: moe}\n  replace: {class: ktc.FusedMoE, kwargs: {data_type: fp32}}\n"
PACKED = "- match: {role: linear}\n  replace: {class: ktc.Linear, kwargs: {data_type: fp32}}\n"
MLA = "- match: {role: mla}\n  replace: {class: ktc.MLAAttention}\n"


def stays(role: str, layer: int) -> str:
    match = f"{{role: {role}, name: 'layers\\.{layer}\\.'}}"
    return f"- match: {match}\n  replace: {{class: default, kwargs: {{callback: true}}}}\n"


# name -> (family, config overrides, recipe, callbacks, part of the reason)
CASES: dict[str, tuple[str, dict[str, Any], str, list[str], str]] = {
    "gqa": ("qwen2_moe", {}, stays("attention", 1) + MOE + PACKED, ["model.layers.1.self_attn"], "rule 1 (recipe.yaml"),
    "sinks": ("gpt_oss", {}, stays("attention", 0) + MOE, ["model.layers.0.self_attn"], "rule 1"),
    "mla": ("deepseek_v3", {}, stays("mla", 0) + MLA + MOE + PACKED, ["model.layers.0.self_attn"], "rule 1"),
    "dense mlp": ("deepseek_v3", {}, stays("dense_mlp", 0) + MOE, ["model.layers.0.mlp"], "rule 1"),
    "shared": (
        "qwen2_moe", {}, MOE + stays("shared_expert", 0) + PACKED, ["model.layers.0.mlp.shared_expert"], "rule 2",
    ),
    "longrope": (
        "deepseek_v3", {"rope_parameters": longrope("deepseek_v3")}, MLA + MOE + PACKED,
        ["model.layers.0.self_attn", "model.layers.1.self_attn"], "rope type 'longrope'",
    ),
    "glm": (
        "glm_moe_dsa", {"index_topk": 16, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
        MOE + PACKED, [f"model.layers.{i}.self_attn" for i in range(3)], "indexer",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """name of CASES -> (bundle, what compiling said)."""
    folder, done = tmp_path_factory.mktemp("callbacks"), {}

    def get(name: str) -> tuple[Path, list[str]]:
        if name not in done:
            family, overrides, recipe, *_ = CASES[name]
            root = folder / name.replace(" ", "-")
            root.mkdir()
            (root / "recipe.yaml").write_text(recipe)
            checkpoint = make_tiny(family, root / "m", tokenizer="chat", **overrides)
            said: list[str] = []
            compile_checkpoint(checkpoint, root / "recipe.yaml", root / "m.ktc", variants=(), jobs=1, say=said.append)
            done[name] = root / "m.ktc", said
        return done[name]

    return get


@pytest.fixture
def native(
    made: Callable[[str], tuple[Path, list[str]]], library: Callable[[str], Path], best_variant: str
) -> Callable[..., NativeModel]:
    def get(name: str, **options: Any) -> NativeModel:
        return open_native(made(name)[0], kernel_library=library(best_variant), **{"threads": 2, **options})

    return get


@pytest.fixture
def eager(
    made: Callable[[str], tuple[Path, list[str]]], library: Callable[[str], Path], best_variant: str
) -> Callable[[str], Any]:
    from ktc import load

    return lambda name: load(made(name)[0], kernel_library=library(best_variant), threads=2)


@pytest.mark.parametrize("name", list(CASES))
def test_graph_with_callbacks_equals_eager_engine(
    native: Callable[..., NativeModel], eager: Callable[[str], Any], name: str
) -> None:
    model, reference, ids = native(name), eager(name), ids_of(45)
    graph = model.graph.program
    assert graph.callbacks() == CASES[name][3] and CASES[name][4] in graph.notes[0]
    want = eager_logits(reference, ids) if name not in ("glm", "longrope") else stepped(reference, ids, 29)
    assert relative(native_logits(model, ids, 29), want) <= 1e-5
    # a restart at an earlier position
    model.position, other = 29, ids_of(16, seed=7)
    got = np.stack([model.decode(int(i)) for i in other])
    again = torch.cat([ids[:29], other])
    want = eager_logits(reference, again) if name not in ("glm", "longrope") else stepped(reference, again, 29)
    assert relative(got, want[29:]) <= 1e-5


def stepped(model: Any, ids: torch.Tensor, prefill: int) -> Any:
    """[T, vocab] by the eager engine in the steps of `native_logits`: what it attends to depends on them."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        parts = ids.split([prefill, *[1] * (len(ids) - prefill)])
        return np.concatenate([model(p[None], cache=cache, use_cache=True).logits[0].numpy() for p in parts])


@pytest.mark.parametrize("name", list(CASES))
def test_same_greedy_text_and_prefixes_are_reused(
    native: Callable[..., NativeModel], eager: Callable[[str], Any], made: Callable[..., Any], name: str
) -> None:
    tokenizer = load_tokenizer(made(name)[0] / "model")
    ours, theirs = (make(m(name), tokenizer, 11) for make, m in ((NativeGenerator, native), (TextGenerator, eager)))
    prompt = [256, *b"the quick brown fox jumps"]
    for text in (prompt, [*prompt[:9], *b" and the lazy dog"], prompt):
        got, want = (g.generate(text, max_tokens=12, ignore_eos=True) for g in (ours, theirs))
        assert got.ids == want.ids
    assert got.timings.prompt_cached > 0


def test_only_what_is_called_is_built_and_read(native: Callable[..., NativeModel]) -> None:
    model = native("mla")
    weights: Any = model.graph.weights
    built = weights._modules._model
    names = [name for name, _ in built.named_parameters()]
    assert names and all(name.startswith("model.layers.0.self_attn.") for name in names)
    packed = [name for name, m in built.named_modules() if isinstance(m, KtcLinear)]
    assert "model.layers.0.self_attn.o_proj" in packed and all("layers.0.self_attn" in name for name in packed)
    assert weights._modules.nbytes < 0.2 * weights.nbytes
    assert len(weights.native_operators()) == len(weights._native) + len(packed)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_any_size(native: Callable[..., NativeModel], chunk: int) -> None:
    ids = ids_of(50, seed=5).tolist()
    assert relative(native("gqa", chunk=chunk).prefill(ids), native("gqa").prefill(ids)) <= 1e-5


def test_threads_give_the_same_bits(native: Callable[..., NativeModel]) -> None:
    ids = ids_of(30, seed=6)
    assert np.array_equal(*(native_logits(native("mla", threads=n), ids, 20) for n in (1, 2)))


def test_a_failing_module_ends_the_step_and_not_the_model(native: Callable[..., NativeModel]) -> None:
    model, ids = native("shared"), ids_of(20, seed=2).tolist()
    want, weights = model.prefill(ids), model.graph.weights
    module = weights._modules._model.get_submodule("model.layers.0.mlp.shared_expert")  # type: ignore[attr-defined]

    def fail(*_: Any) -> None:
        raise ValueError("out of luck")

    hook = module.register_forward_hook(fail)
    for step in (lambda: model.prefill(ids), lambda: model.decode(5)):
        with pytest.raises(KtcError, match=r"layers\.0\.mlp\.shared_expert: .* position 20: ValueError: out of luck"):
            step()
        assert model.position == 20
    hook.remove()
    model.reset()
    assert np.array_equal(model.prefill(ids), want)


def test_what_is_said(native: Callable[..., NativeModel], made: Callable[..., Any]) -> None:
    path, said = made("gqa")
    wanted = "model.layers.1.self_attn is Hugging Face's code, called in torch: rule 1 (recipe.yaml:1) says so"
    assert any("1 of them callbacks into torch" in line and wanted in line for line in said)
    report = native("gqa").ktc_report
    assert report is not None
    text = "\n".join(report.lines())
    assert "torch is loaded" in text and wanted in text
    assert "model.layers.1.self_attn.q_norm" not in text and "(Qwen2MoeTopKRouter), weights as stored" in text
    from ktc.cli.inspect_cmd import command

    shown = CliRunner().invoke(command, [str(path), "--graph"], standalone_mode=False)
    assert shown.exception is None and f"note: {wanted}" in shown.output
    assert "callback(L1.attention_in, model.layers.1.self_attn, " in shown.output


def test_from_checkpoint_to_text_on_the_command_line(
    made: Callable[..., Any],
    library: Callable[[str], Path],
    best_variant: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """plan, compile, run on the graph and off it, eval, bench."""
    source, bundle = made("glm")[0].parent, tmp_path / "b.ktc"

    def say(*arguments: object) -> tuple[str, str]:
        code = ktc(*arguments)
        out, err = capsys.readouterr()
        assert code == 0, err
        return out, err

    kernels = ("--kernel-library", library(best_variant))
    recipe = ("-r", source / "recipe.yaml")
    calls = "3 of them callbacks into torch"
    note = "model.layers.{0-2}.self_attn is Hugging Face's code, called in torch: sparse attention"
    planned, _ = say("plan", source / "m", *recipe)
    _, compiled = say("compile", source / "m", *recipe, "-o", bundle, "--no-kernels")
    assert calls in planned and note in planned and calls in compiled and note in compiled
    texts = []
    for graph in ("auto", "off"):
        options = ("-p", "hello there", "--greedy", "--max-tokens", 8, "--json", "-v", "--graph", graph)
        out, said = say("run", bundle, *options, *kernels)
        texts.append(json.loads(out)["ids"])
        assert (note in said) == (graph == "auto")
    assert texts[0] == texts[1]
    text = tmp_path / "text"
    text.write_text("The quick brown fox. " * 4)
    assert "perplexity" in say("eval", bundle, "--text", text, *kernels)[0]
    assert "decode 4" in say("bench", bundle, "-p", 8, "-n", 4, "-r", 1, *kernels)[0]


def test_a_graph_that_calls_what_is_not_there(made: Callable[..., Any], tmp_path: Path) -> None:
    import shutil

    from ktc.bundle import open_bundle
    from ktc.native.engine import load_program
    from ktc.native.modules import BundleModules

    copy = tmp_path / "copy.ktc"
    shutil.copytree(made("gqa")[0], copy)
    bundle = open_bundle(copy)
    data = load_program(bundle).to_json()
    next(n for n in data["nodes"] if n["op"] == "callback")["module"] = "model.layers.7.self_attn"
    from ktc.graph.ir import Program

    with pytest.raises(BundleError, match=r"calls 'model\.layers\.7\.self_attn', which the model does not have"):
        BundleModules(bundle, Program.from_json(data), Kernels(None, None), context=16)


@pytest.mark.parametrize("match", ["{role: moe}", "{role: linear}", "{name: 'layers\\.0$'}"])
def test_what_cannot_be_called_is_refused(match: str, tmp_path: Path) -> None:
    from ktc.plan import build_plan
    from ktc.recipe import parse_recipe
    from tests.tiny import tiny_config

    text = f"- match: {match}\n  replace: {{class: default, kwargs: {{callback: true}}}}\n"
    with pytest.raises(RecipeError, match=r"rule 1 \(r\.yaml:1\): callback: true also matches"):
        build_plan(tiny_config("qwen2_moe"), parse_recipe(text, "r.yaml"))
    with pytest.raises(RecipeError, match="unknown key 'callback'"):
        parse_recipe("- match: {role: moe}\n  replace: {class: ktc.MLAAttention, kwargs: {callback: true}}\n")


def test_memory_for_modules_and_their_caches_is_counted(
    native: Callable[..., NativeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktc.engine import memory

    report = native("longrope").ktc_report
    assert report is not None and report.cache_bytes == 4 * 256 * 2 * (16 + 8)
    free = report.weight_bytes + report.cache_bytes
    monkeypatch.setattr(memory, "available_memory", lambda: free // 2)
    with pytest.raises(KtcError, match="the caches of 256 positions need"):
        native("longrope")


WATCH = """
import os, sys
seen = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            seen.append(os.environ.get("OMP_WAIT_POLICY"))
sys.meta_path.insert(0, Watch())
from ktc.native import open_native
open_native(sys.argv[1], kernel_library=sys.argv[2], threads=1)
print(seen)
"""


def test_openmp_is_quiet_before_torch_is_imported(
    made: Callable[[str], tuple[Path, list[str]]], library: Callable[[str], Path], best_variant: str
) -> None:
    """Its workers would spin beside the pool; the environment is read when torch is imported."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", WATCH, str(made("gqa")[0]), str(library(best_variant))]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "['passive']"
