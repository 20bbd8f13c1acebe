"""Layers split over two real GPUs. Skipped where there are fewer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ktc
from ktc.cuda.session import CudaSession
from tests.cuda.conftest import cuda_here
from tests.cuda.test_gpu import FAMILIES, hf, on_gpu, resident_bytes  # noqa: F401 - fixtures
from tests.cuda.test_lane import run
from tests.cuda.test_paged import MODELS
from tests.graph import test_deferral
from tests.parity import conftest
from tests.parity.conftest import error, random_ids

pytestmark = pytest.mark.skipif(not cuda_here() or torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_two_gpus_equal_one_and_the_cpu(
    name: str,
    on_gpu: Any,  # noqa: F811
    lane_bundle: Any,
    library: Any,
    best_variant: str,
) -> None:
    ids = random_ids(1, 40, seed=3)
    cpu = ktc.load(lane_bundle(name, "fp32", device="cpu"), kernel_library=library(best_variant))
    want = cpu(ids).logits[0, 20:]
    one = torch.from_numpy(run(CudaSession(on_gpu(name), chunk=16), ids[0].numpy(), 21))
    model = on_gpu(name, stages="1")
    devices = {p.device for layer in model.model.layers for p in layer.parameters()}
    assert devices == {torch.device("cuda:0"), torch.device("cuda:1")}
    for graph in (False, True):
        got = torch.from_numpy(run(CudaSession(model, graph=graph, chunk=16), ids[0].numpy(), 21))
        assert error(got, one) < 1e-5 and error(got, want) < 1e-4, f"graph {graph}"


@pytest.mark.parametrize("stages", ["1", "2", "3", "2-3"])
@pytest.mark.parametrize("n_deferred", [0, 1, 2])
def test_deferral_crosses_the_boundary(n_deferred: int, stages: str, on_gpu: Any, hf: Any) -> None:  # noqa: F811
    ids = random_ids(1, 64 + 11, seed=7)[0]
    session = CudaSession(on_gpu("deep_v3", stages=stages), n_deferred=0)
    session.split(n_deferred)
    got = run(session, ids.numpy(), 11)
    model = hf("deep_v3")
    with test_deferral.deferring(model, n_deferred):
        want = test_deferral.reference(model, ids, 11)[10:]
    assert error(torch.from_numpy(got), torch.from_numpy(want)) < 1e-4


def test_one_launch_a_token_on_each_gpu(on_gpu: Any) -> None:  # noqa: F811
    from torch.profiler import ProfilerActivity, profile

    session = CudaSession(on_gpu("deepseek_v3", stages="1"))
    session.prefill([1, 2, 3])
    session.decode(5)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for token in range(10):
            session.decode(10 + token)
    calls = {e.key: e.count for e in profiler.key_averages() if e.key.startswith("cu")}
    assert calls.get("cudaGraphLaunch") == 20, calls
    assert not {k for k in calls if k.startswith(("cudaMalloc", "cudaLaunch", "cuLaunch"))}, calls


def test_1000_replays_do_not_leak_on_either(on_gpu: Any) -> None:  # noqa: F811
    session = CudaSession(on_gpu("deepseek_v3", stages="1"))
    session.prefill([1, 2, 3])

    def used() -> list[int]:
        return [torch.cuda.memory_reserved(i) for i in (0, 1)]

    for rounds, keep in ((100, True), (1000, False)):
        if not keep:
            before, host = used(), resident_bytes()
        for i in range(rounds):
            session.decode(3 + i % 200)
            session.position = 3 + i % 100
    assert used() == before and resident_bytes() - host < 4 << 20


@torch.no_grad()
def test_generate_of_hugging_face_works(on_gpu: Any, hf: Any) -> None:  # noqa: F811
    ids = random_ids(1, 9, seed=6)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    got = on_gpu("qwen3_moe", stages="1").generate(ids.cuda(0), **options).cpu()
    assert torch.equal(got, hf("qwen3_moe").generate(ids, **options))


@torch.no_grad()
@pytest.mark.parametrize("name", ["wide_window", "wide_v3"])
def test_flashinfer_on_both(name: str, on_gpu: Any) -> None:  # noqa: F811
    pytest.importorskip("flashinfer", reason="no flashinfer")
    conftest.MODELS.update(MODELS)
    ids = random_ids(1, 150, seed=12)[0].numpy()
    got = [
        run(CudaSession(on_gpu(name, "bf16", dtype="bf16", **options), context=200, attention="flashinfer"), ids, 9)
        for options in ({}, {"stages": "1"})
    ]
    assert np.abs(got[1] - got[0]).max() < 1e-2 * np.abs(got[0]).max()
