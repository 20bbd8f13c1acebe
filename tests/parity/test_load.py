"""Loading as a user does it: the bundle's own kernels, reports, strictness, faults before and during a run."""

from __future__ import annotations

import gc
import os
import shutil
import threading

import numpy as np
import pytest
import torch

import ktc
from ktc.engine.linear import KtcLinear
from ktc.engine.moe import KtcFusedMoE
from ktc.errors import BuildError, BundleError, KtcError, UsageError
from ktc.native.engine import open_native
from tests.parity.conftest import error, random_ids


@pytest.fixture(scope="module")
def own(bundle):
    """A model on kernels generated for its own shapes (built once, then in the user's cache)."""
    return ktc.load(bundle("deepseek_v3", "int4"), threads=2)


@torch.no_grad()
def test_own_kernels_give_the_same_bits_as_generic_ones(own, loaded) -> None:
    ids = random_ids(1, 23)
    assert torch.equal(own(ids).logits, loaded("deepseek_v3", "int4")(ids).logits)
    kernels = own.get_submodule("model.layers.1.mlp").native.report()["kernels"]
    assert any(name.endswith(":silu_mul:k64") and calls for name, calls in kernels.items())


def test_m6_the_report_names_what_every_layer_runs_on(own, bundle) -> None:
    # failure M6: acceleration silently not engaged
    report = own.ktc_report
    text = "\n".join(report.lines())
    assert report.variant in text and "2 threads" in text
    where = dict(report.layers)
    assert "int4-g16c on" in where["model.layers.1.mlp"] and "8 experts, top 2" in where["model.layers.1.mlp"]
    assert "absorbed latent attention" in where["model.layers.{0-1}.self_attn"]
    assert "Hugging Face DeepseekV3TopkRouter" in where["model.layers.1.mlp.gate"]
    planned = {m.name for m in own.ktc_plan.modules}
    assert len(report.layers) <= len(planned)


def test_m6_strict_fails_where_it_would_run_slower(bundle, library, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle("deepseek_v3", "int4")
    assert ktc.load(path, strict=True, threads=1).ktc_report.degraded == []

    from ktc import _runtime
    from ktc.engine import pool as pools

    class Unpinned(_runtime.Pool):
        """A real pool, on a machine that forbids pinning."""

        def warnings(self):
            return ["threads could not be pinned"]

    monkeypatch.setattr(pools, "get_pool", Unpinned)
    assert ktc.load(path, threads=1).ktc_report.degraded == ["threads could not be pinned"]
    with pytest.raises(KtcError, match="strict: threads could not be pinned"):
        ktc.load(path, threads=1, strict=True)


@torch.no_grad()
def test_m8_a_fault_in_the_runtime_is_an_exception_and_the_next_call_works(own) -> None:
    # failure M8: a worker's fault hung the program
    block = own.get_submodule("model.layers.1.mlp")
    ids = random_ids(1, 9)
    expected = own(ids).logits
    route = block.route

    def wrong(x):
        weights, chosen = route(x)
        chosen = chosen.clone()
        chosen[-1, 0] = 99  # there are 8 experts
        return weights, chosen

    block.route = wrong
    try:
        with pytest.raises((RuntimeError, ValueError), match="99"):
            own(ids)
    finally:
        del block.route
    assert torch.equal(own(ids).logits, expected)


@torch.no_grad()
def test_a_nan_row_stays_in_its_row(own) -> None:
    x = torch.randn(1, 5, 64)
    for module in own.modules():
        if isinstance(module, KtcFusedMoE | KtcLinear) and getattr(module, "in_features", 64) == 64:
            good = module(x)
            bad = x.clone()
            bad[0, 2, 7] = float("nan")
            out = module(bad)
            keep = [0, 1, 3, 4]
            assert torch.equal(out[:, keep], good[:, keep]) and out[:, 2].isnan().any()


@torch.no_grad()
def test_s9_experts_without_a_token_are_never_touched(own) -> None:
    # failure S9: 0 x garbage = NaN
    block = own.get_submodule("model.layers.1.mlp")
    x = torch.randn(3, 64)
    ids = torch.zeros(3, 2, dtype=torch.int64)
    ids[:, 1] = 1
    out = torch.full((3, 64), float("nan"))
    weights = torch.zeros(3, 2)
    block.native.forward(x.data_ptr(), 64, 3, ids.data_ptr(), weights.data_ptr(), out.data_ptr(), 64)
    assert (out == 0).all()
    empty = own.lm_head(torch.empty(0, 64))
    assert empty.shape == (0, 260)


def test_m1_weights_are_in_memory_once(own) -> None:
    # failure M1: repacking at load doubled the memory
    store = own.ktc_store
    packed = sum(ref.nbytes for (_, name), ref in store.bundle.tensors.items() if "golden" not in name)
    assert store.nbytes <= packed + 4096 * len(store.buffers) + 2 * 2**20 * len(store.buffers)
    files = {ref.file for (node, _), ref in store.bundle.tensors.items() if node is not None}
    assert len(store.buffers) <= len(files) + 2


def test_memory_that_is_not_there_is_refused_first(bundle, library, best_variant, monkeypatch) -> None:
    from ktc.engine import memory

    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    path, lib = bundle("deepseek_v3", "int4"), library(best_variant)
    with pytest.raises(KtcError, match=r"the weights need .* of memory, 1000 B are available"):
        ktc.load(path, kernel_library=lib)
    ktc.load(path, kernel_library=lib, check_memory=False)


@pytest.mark.parametrize("node", [None, 0])
def test_a_missing_tensor_is_named(node, bundle, library, best_variant, monkeypatch) -> None:
    from ktc.bundle import reader

    index = reader._index_tensors

    def without(opened):
        index(opened)
        name = "model.norm.weight" if node is None else "model.layers.1.mlp.experts.0-7.down.tiles"
        del opened.tensors[node, name]

    monkeypatch.setattr(reader, "_index_tensors", without)
    with pytest.raises(BundleError, match=r"(model\.norm\.weight|experts\.0-7\.down\.tiles) .*is missing"):
        ktc.load(bundle("deepseek_v3", "int4"), kernel_library=library(best_variant))


def test_kernels_that_do_not_fit_are_named(bundle, library, best_variant, tmp_path) -> None:
    path = bundle("deepseek_v3", "int4")
    junk = tmp_path / "libjunk.so"
    junk.write_bytes(b"no library")
    with pytest.raises(BuildError, match=r"libjunk\.so"):
        ktc.load(path, kernel_library=junk)
    with pytest.raises(UsageError, match="no such kernel name"):
        ktc.load(path, kernel_library=library(best_variant), force_kernel="no such kernel name")
    with pytest.raises(BundleError, match="does not exist"):
        ktc.load(tmp_path / "nothing.ktc")


@torch.no_grad()
def test_forced_kernels_are_the_ones_that_run(bundle, library, best_variant, loaded) -> None:
    if best_variant != "amx":
        pytest.skip("one kernel per spec here: nothing to force")
    ids = random_ids(1, 40)
    for forced in ("avx512", "amx"):
        model = ktc.load(bundle("deepseek_v3", "int8"), kernel_library=library("amx"), force_kernel=forced, threads=2)
        assert torch.equal(model(ids).logits, loaded("deepseek_v3", "int8")(ids).logits)
        used = {n for m in model.modules() if getattr(m, "native", None) for n in m.native.report()["kernels"]}
        assert used and all(name.startswith(forced) for name in used)


def test_a_deleted_model_gives_its_memory_back(bundle, library, best_variant) -> None:
    import weakref

    model = ktc.load(bundle("deepseek_v3", "int4"), kernel_library=library(best_variant))
    gone = [weakref.ref(model), weakref.ref(model.ktc_store)]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_tied_embeddings(bundle, library, best_variant, hf, tmp_path, checkpoint) -> None:
    """granitemoe ties lm_head to the embedding: packed as a copy, or shared where it stays Hugging Face's."""
    from ktc.compile import compile_checkpoint

    recipe = tmp_path / "experts.yaml"
    recipe.write_text(
        "version: 1\nname: experts\nrules:\n  - match: {role: moe}\n    replace:\n      class: ktc.FusedMoE\n"
        "      kwargs: {backend: portable, data_type: fp32}\n"
    )
    out = tmp_path / "tied.ktc"
    compile_checkpoint(checkpoint("granitemoe"), recipe, out, variants=(), jobs=1)
    model = ktc.load(out, kernel_library=library(best_variant))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = random_ids(1, 12)
    with torch.no_grad():
        assert error(model(ids).logits, hf("granitemoe")(ids).logits) < 1e-4


def test_a_truncated_shard_is_refused(bundle, library, best_variant, tmp_path) -> None:
    path = tmp_path / "cut.ktc"
    shutil.copytree(bundle("deepseek_v3", "int4"), path)
    shard = next((path / "weights" / "experts" / "node0").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(BundleError, match=shard.name):
        ktc.load(path, kernel_library=library(best_variant))


@torch.no_grad()
def test_a_loaded_model_is_fp32_and_frozen(own) -> None:
    assert own.dtype == torch.float32 and not own.training
    assert not any(p.requires_grad for p in own.parameters())
    embedding = own.get_input_embeddings()
    assert embedding.weight.dtype == torch.bfloat16 and embedding(torch.tensor([3])).dtype == torch.float32
    assert np.isfinite(own(random_ids(1, 3)).logits.numpy()).all()


@torch.no_grad()
def test_the_recipes_backend_is_obeyed_or_said(checkpoint, library, best_variant, tmp_path) -> None:
    from ktc.compile import compile_checkpoint

    if best_variant != "amx":
        pytest.skip("needs a library with two kernels per spec")
    recipe = tmp_path / "avx512.yaml"
    recipe.write_text(
        "version: 1\nname: avx512\nrules:\n  - match: {role: moe}\n    replace:\n      class: ktc.FusedMoE\n"
        "      kwargs: {backend: AVX512, data_type: int8, group: channel}\n"
    )
    out = tmp_path / "avx512.ktc"
    compile_checkpoint(checkpoint("olmoe"), recipe, out, variants=(), jobs=1)
    model = ktc.load(out, kernel_library=library("amx"))
    model(random_ids(1, 40))
    used = model.get_submodule("model.layers.0.mlp").native.report()["kernels"]
    assert used and all(name.startswith("avx512:") for name in used) and not model.ktc_report.degraded
    portable = ktc.load(out, kernel_library=library("portable"))
    assert "backend AVX512" in portable.ktc_report.degraded[0]

    graph = open_native(out, kernel_library=library("amx"))
    graph.prefill(random_ids(1, 40)[0].tolist())
    reports = [operator.report()["kernels"] for operator in graph.ktc_report.weights.native_operators()]
    used = [name for report in reports for name in report if ":int8-channel:" in name]
    assert used and all(name.startswith("avx512:") for name in used) and not graph.ktc_report.degraded
    assert "backend AVX512" in open_native(out, kernel_library=library("portable")).ktc_report.degraded[0]


@torch.no_grad()
def test_an_empty_batch_and_an_empty_sequence(own) -> None:
    vocabulary = own.config.vocab_size
    assert own(torch.zeros(0, 3, dtype=torch.long)).logits.shape == (0, 3, vocabulary)
    assert own(torch.zeros(2, 0, dtype=torch.long)).logits.shape == (2, 0, vocabulary)


def test_saving_what_is_left_as_parameters_is_refused(own, tmp_path) -> None:
    with pytest.raises(KtcError, match="cannot be saved as a checkpoint"):
        own.save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()


@torch.no_grad()
def test_a_path_of_any_bytes(bundle, library, best_variant, own, tmp_path) -> None:
    copy = tmp_path / "b\udcff\n \u00fc.ktc"  # a byte that is no UTF-8, as os.fsdecode gives it
    shutil.copytree(bundle("deepseek_v3", "int4"), copy)
    ids = random_ids(1, 5)
    assert torch.equal(ktc.load(copy, threads=1)(ids).logits, own(ids).logits)


@torch.no_grad()
def test_calls_from_several_threads_are_right(own) -> None:
    """Two callers of one model at once, with different torch threads: the same bits, and each keeps its setting."""
    inputs = [random_ids(1, n) for n in (3, 7)]
    wanted = [own(ids).logits for ids in inputs]
    faults: list[object] = []

    def call(number: int) -> None:
        torch.set_num_threads(1 + number)
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(own(inputs[number]).logits, wanted[number]):
                    faults.append(number)
        if torch.get_num_threads() != 1 + number:
            faults.append((number, torch.get_num_threads()))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not faults and not any(thread.is_alive() for thread in threads)
