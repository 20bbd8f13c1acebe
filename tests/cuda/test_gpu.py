"""The lane on a CUDA device: parity, capture and replay, leaks, launches, deferral. Skipped where there is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ktc
from ktc.cuda import linear
from ktc.cuda.mla import bmm_fp32
from ktc.cuda.session import CudaSession
from ktc.layout import QuantScheme
from tests.cuda.conftest import ROOT, cuda_here
from tests.cuda.test_lane import DEEP, run
from tests.cuda.test_linear import parts
from tests.cuda.test_paged import MODELS, WIDE
from tests.graph import test_deferral
from tests.parity import conftest
from tests.parity.conftest import error, random_ids

pytestmark = pytest.mark.skipif(not cuda_here(), reason="no CUDA device")
FAMILIES = ("deepseek_v3", "deepseek_v2", "qwen3_moe", "gpt_oss", "mixtral_window", "qwen2_moe", "granitemoe")
DEMO = ROOT / "artifacts" / "demo"


@pytest.fixture(scope="module")
def hf(checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """(name, dtype) -> Hugging Face's own model on the CPU."""
    from transformers import AutoModelForCausalLM

    loaded: dict[Any, Any] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Any:
        if (name, dtype) not in loaded:
            loaded[name, dtype] = AutoModelForCausalLM.from_pretrained(
                checkpoint(name), dtype=dtype, experts_implementation="eager"
            ).eval()
        return loaded[name, dtype]

    return get


@pytest.fixture(scope="module")
def on_gpu(lane_bundle: Any, library: Any, best_variant: str) -> Callable[..., Any]:
    """(model, experts, linears, dtype, **bundle) -> loaded on cuda:0; shared, so leave it as it is."""
    conftest.MODELS["deep_v3"] = ("deepseek_v3", DEEP, None)
    loaded: dict[Any, Any] = {}

    def get(name: str, experts: str = "fp32", linears: str = "", dtype: str = "fp32", **options: Any) -> Any:
        key = (name, experts, linears, dtype, *options.items())
        if key not in loaded:
            path = lane_bundle(name, experts, linears, **options)
            loaded[key] = ktc.load(path, kernel_library=library(best_variant), dtype=dtype)
        return loaded[key]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_parity_with_the_cpu_device(name: str, on_gpu: Any, lane_bundle: Any, library: Any, best_variant: str) -> None:
    """fp32 on both: prefill of an odd length in chunks, then single tokens, with and without the graph."""
    ids = random_ids(1, 40, seed=3)
    cpu = ktc.load(lane_bundle(name, "fp32", device="cpu"), kernel_library=library(best_variant))
    with torch.no_grad():
        want = cpu(ids).logits[0, 20:]
    model = on_gpu(name)
    assert next(model.parameters()).device == model.ktc_lane.sides["cuda:0"].device
    for graph in (False, True):
        got = run(CudaSession(model, graph=graph, chunk=16), ids[0].numpy(), 21)
        assert error(torch.from_numpy(got), want) < 1e-4, f"graph {graph}"


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_stay_close(name: str, dtype: str, on_gpu: Any, hf: Any) -> None:
    ids = random_ids(1, 24, seed=4)
    with torch.no_grad():
        want = hf(name)(ids).logits[0, 7:]
        theirs = error(hf(name, torch.bfloat16)(ids).logits[0, 7:].float(), want)  # the experts are bf16 in both cases
    got = run(CudaSession(on_gpu(name, "bf16", dtype=dtype)), ids[0].numpy(), 8)
    assert error(torch.from_numpy(got), want) < 2 * theirs + 0.01


def test_graph_replay_with_changing_routing_equals_eager(on_gpu: Any) -> None:
    """200 tokens chosen at random: every step takes other experts; position, cache and mask are data."""
    model = on_gpu("deepseek_v3")
    tokens = np.random.default_rng(0).integers(3, 250, 200)
    logits = []
    for graph in (False, True):
        session = CudaSession(model, graph=graph)
        session.prefill([1, 2, 3])
        logits.append(np.stack([session.decode(int(t)) for t in tokens]))
    assert np.isfinite(logits[0]).all() and np.ptp(logits[0], axis=0).max() > 0.1
    assert np.abs(logits[1] - logits[0]).max() <= 1e-5 * np.abs(logits[0]).max()


def test_1000_replays_do_not_leak(on_gpu: Any) -> None:
    session = CudaSession(on_gpu("deepseek_v3"))
    session.prefill([1, 2, 3])

    def steps(count: int) -> None:
        for i in range(count):
            session.decode(3 + i % 200)
            session.position = 3 + i % 100

    steps(100)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident_bytes()
    steps(1000)
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident_bytes()
    assert after[:2] == before[:2], "device memory grew"
    assert after[2] - before[2] < 4 << 20, "host memory grew"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_one_launch_a_token(on_gpu: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    session = CudaSession(on_gpu("deepseek_v3"))
    session.prefill([1, 2, 3])
    session.decode(5)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for token in range(10):
            session.decode(10 + token)
    calls = {e.key: e.count for e in profiler.key_averages() if e.key.startswith("cu")}
    assert calls.get("cudaGraphLaunch") == 10, calls
    others = {k: n for k, n in calls.items() if k.startswith(("cudaLaunch", "cudaMemcpy", "cudaMalloc", "cuLaunch"))}
    assert not others, calls


@pytest.mark.parametrize("n_deferred", [0, 1, 2])
def test_deferral_equals_plain_torch_over_64_steps(n_deferred: int, on_gpu: Any, hf: Any) -> None:
    """One captured graph: the split is set before the steps and needs no new capture."""
    ids = random_ids(1, 64 + 11, seed=7)[0]
    session = CudaSession(on_gpu("deep_v3"), n_deferred=0)
    session.split(n_deferred)
    got = run(session, ids.numpy(), 11)
    model = hf("deep_v3")
    with test_deferral.deferring(model, n_deferred):
        want = test_deferral.reference(model, ids, 11)[10:]
    assert error(torch.from_numpy(got), torch.from_numpy(want)) < 1e-4


def test_auto_measures(on_gpu: Any) -> None:
    assert set(CudaSession(on_gpu("deep_v3", deferred="auto")).n_deferred) <= {0, 1, 2}


def test_m8_a_workers_error_surfaces_after_the_replay(lane_bundle: Any, library: Any, best_variant: str) -> None:
    # failure M8: a worker's fault hung the program. Ids that no expert has are captured into the graph.
    model = ktc.load(lane_bundle("deepseek_v3", "fp32"), kernel_library=library(best_variant), dtype="fp32")
    good = CudaSession(model)
    ids = random_ids(1, 12, seed=8)[0].numpy()
    want = run(good, ids, 8)
    good.position = 8
    bad = CudaSession(model, graph=False)
    block = model.get_submodule("model.layers.1.mlp")
    route = block.route
    wrong = torch.full((1, 2), 99, device=model.device)
    block.route = lambda x: (route(x)[0], wrong)
    bad._capture()
    del block.route
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"MoE layer 0: .*expert 99, there are 8"):
            bad.decode(5)
    assert bad.position == 0
    assert np.array_equal(np.stack([good.decode(int(t)) for t in ids[8:]]), want[1:])


def test_generate_of_hugging_face_works(on_gpu: Any, hf: Any) -> None:
    ids = random_ids(1, 9, seed=6)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        got = on_gpu("qwen3_moe").generate(ids.cuda(), **options).cpu()
        assert torch.equal(got, hf("qwen3_moe").generate(ids, **options))


@pytest.mark.parametrize("scheme", [QuantScheme("int4", "integer", 32), QuantScheme("int4", "group", 128)])
@pytest.mark.parametrize("n", [96, 72])
def test_the_int4_kernel_equals_the_dequantised_matrix(scheme: QuantScheme, n: int) -> None:
    plan, stored, dense = parts(n, 256, scheme)
    module = linear.LaneLinear(plan)
    module.load(stored, torch.device("cuda:0"), torch.bfloat16)
    assert module.kernel == "int4"
    for rows in (1, 3, 40):
        x = torch.randn(rows, 256, dtype=torch.bfloat16)
        want = x.float() @ torch.from_numpy(dense)[:n].T
        assert (module(x.cuda()).float().cpu() - want).abs().max() < 0.02 * want.abs().max()


def test_products_in_fp32() -> None:
    a, b = torch.randn(2, 5, 64), torch.randn(2, 64, 33)
    got = bmm_fp32(a.cuda().bfloat16(), b.cuda().bfloat16())
    want = torch.bmm(a.bfloat16().float(), b.bfloat16().float())
    assert got.dtype == torch.float32 and (got.cpu() - want).abs().max() < 1e-4 * want.abs().max()


def test_the_demo_checkpoint(on_gpu: Any, library: Any, best_variant: str, tmp_path: Path) -> None:
    """Trained weights: bf16 on the device predicts what the CPU device predicts, int4 linears nearly so."""
    from ktc.compile import compile_checkpoint

    text = (DEMO / "heldout.txt").read_text()[:400]
    from transformers import AutoTokenizer

    ids = np.array(AutoTokenizer.from_pretrained(DEMO)(text)["input_ids"][:80])
    losses = {}
    for recipe in ("int4", "int4-cuda"):
        path = tmp_path / f"{recipe}.ktc"
        compile_checkpoint(DEMO, recipe, path, variants=(), jobs=4)
        model = ktc.load(path, kernel_library=library(best_variant))
        if recipe == "int4":
            with torch.no_grad():
                logits = model(torch.from_numpy(ids)[None]).logits[0, :-1]
        else:
            session = CudaSession(model, n_deferred=0)
            logits = torch.from_numpy(run(session, ids[:-1], 1))
        losses[recipe] = float(torch.nn.functional.cross_entropy(logits.float(), torch.from_numpy(ids[1:])))
    assert abs(losses["int4-cuda"] - losses["int4"]) < 0.05, losses


def test_sessions_do_not_share_a_sequence(on_gpu: Any) -> None:
    model = on_gpu("qwen3_moe")
    a, b = CudaSession(model), CudaSession(model)
    ids = [int(t) for t in random_ids(1, 10, seed=9)[0]]
    want = run(a, np.array(ids), 4)
    a.reset()
    first, second = [a.prefill(ids[:4])], [b.prefill(ids[:4])]
    for token in ids[4:]:
        first.append(a.decode(token))
        second.append(copy.copy(b.decode(token)))
    assert np.array_equal(np.stack(first), want) and np.array_equal(np.stack(second), want)


def test_ktc_tune_measures_the_gpu() -> None:
    from ktc.perf import machine_profile
    from ktc.perf.shapes import MoeShape
    from ktc.simulate.profile import parse_profile

    shape = MoeShape("small", 4, 256, 128, 2, "")
    profile = machine_profile.measure_machine(("int4",), shape=shape, buffer_bytes=64 << 20, working_set=64 << 20)
    hardware = parse_profile(profile.yaml(), "p.yaml")
    assert hardware.device.kind == "cuda" and hardware.device.name == torch.cuda.get_device_name()
    assert 1e11 < hardware.device.memory_rate < 2e13 and 1e13 < hardware.device.peak < 1e16
    assert 1e-7 < hardware.device.kernel_time < 1e-4 and 1e9 < hardware.link.rate < 1e12
    assert hardware.host.submit < 1e-3


@torch.no_grad()
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_hot_experts_change_nothing(name: str, gather: bool, on_gpu: Any) -> None:
    """Replayed with routing that changes, against all experts on the CPU; deferral and skipping without a new graph."""
    plain, hot = on_gpu(name), on_gpu(name, hot=3)
    for layer in hot.ktc_lane.hot:
        layer.gathers = gather
    ids = random_ids(1, 60, seed=11)[0].numpy()
    session = CudaSession(hot)
    assert error(torch.from_numpy(run(session, ids, 9)), torch.from_numpy(run(CudaSession(plain), ids, 9))) < 1e-3
    off = CudaSession(hot, graph=False)
    for skipped in (0, 1):
        for each in (session, off):
            each.reset()
            each.split(0, skipped)
        assert error(torch.from_numpy(run(session, ids, 9)), torch.from_numpy(run(off, ids, 9))) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", WIDE)
def test_flashinfer_is_as_close_as_torchs_attention(name: str, graph: bool, on_gpu: Any, hf: Any) -> None:
    """One captured graph over several pages; both attentions in bf16 against Hugging Face in fp32."""
    pytest.importorskip("flashinfer", reason="no flashinfer")
    conftest.MODELS.update(MODELS)
    model = on_gpu(name, "bf16", dtype="bf16")
    ids = random_ids(1, 150, seed=12)
    want = hf(name)(ids).logits[0, 8:]
    errors = {}
    for attention in ("flashinfer", "torch"):
        session = CudaSession(model, context=200, graph=graph, attention=attention)
        got = run(session, ids[0].numpy(), 9)
        session.position = 70
        again = np.stack([session.decode(int(t)) for t in ids[0, 70:80]])
        assert np.abs(again - got[62:72]).max() < 1e-2 * np.abs(got).max()
        errors[attention] = error(torch.from_numpy(got), want)
    assert errors["flashinfer"] < 1.5 * errors["torch"] + 0.01, errors
