"""KV caches in host memory on a CUDA device. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ktc.cuda.host_cache import on_device
from ktc.cuda.session import CudaSession
from tests.cuda.conftest import cuda_here
from tests.cuda.test_gpu import FAMILIES, on_gpu  # noqa: F401 - fixtures
from tests.cuda.test_lane import run
from tests.cuda.test_paged import MODELS
from tests.parity import conftest
from tests.parity.conftest import error, random_ids

pytestmark = pytest.mark.skipif(not cuda_here(), reason="no CUDA device")
IDS = random_ids(1, 60, seed=9)[0].numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_write_and_read_pinned_memory(dtype: torch.dtype) -> None:
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        host = torch.zeros(1, 2, 64, 16, dtype=dtype, pin_memory=True)
        view = on_device(host, device)
        assert view.device == device and view.data_ptr() == host.data_ptr()
        rows, at = torch.randn(1, 2, 3, 16, device=device, dtype=dtype), torch.tensor([5, 6, 9], device=device)
        view.index_copy_(2, at, rows)
        torch.cuda.synchronize(device)
        assert torch.equal(host[:, :, at.cpu()], rows.cpu()) and host[:, :, 10:].eq(0).all()
        assert torch.equal(view.sum(-1).cpu(), view.clone().cpu().sum(-1)) or dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_logits(name: str, graph: bool, on_gpu: Any) -> None:  # noqa: F811
    want = run(CudaSession(on_gpu(name), chunk=16), IDS, 21)
    session = CudaSession(on_gpu(name, host="0|1"), chunk=16, graph=graph)
    assert all(t.is_pinned() for caches in session.cache.host.values() for t in caches._pinned.values())
    got = run(session, IDS, 21)
    assert error(torch.from_numpy(got), torch.from_numpy(want)) < 1e-5
    session.position = 30
    again = np.stack([session.decode(int(t)) for t in IDS[30:]])
    assert error(torch.from_numpy(again), torch.from_numpy(got[10:])) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["wide_window", "wide_v3"])
def test_flashinfer_reads_it_where_it_is(name: str, on_gpu: Any) -> None:  # noqa: F811
    pytest.importorskip("flashinfer", reason="no flashinfer")
    conftest.MODELS.update(MODELS)
    got = [
        run(CudaSession(on_gpu(name, "bf16", dtype="bf16", host=host), context=200, attention="flashinfer"), IDS, 9)
        for host in ("", "0|1")
    ]
    assert np.abs(got[1] - got[0]).max() < 1e-2 * np.abs(got[0]).max()


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_in_two_stages(on_gpu: Any) -> None:  # noqa: F811
    want = run(CudaSession(on_gpu("qwen3_moe")), IDS, 21)
    got = run(CudaSession(on_gpu("qwen3_moe", stages="1", host="0|1")), IDS, 21)
    assert error(torch.from_numpy(got), torch.from_numpy(want)) < 1e-5
