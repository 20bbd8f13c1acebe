"""KV caches in host memory: the same logits, nothing that a graph cannot hold, and the bytes that the plan says."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ktc
from ktc import _runtime
from ktc.cuda.host_cache import HostCaches, on_device
from ktc.cuda.session import CudaSession
from ktc.plan.caches import cache_bytes
from tests.cuda import fake_flashinfer
from tests.cuda.record import use_recorded_graphs
from tests.cuda.test_lane import FAMILIES, check_needs_no_host, deep, open_lane, run  # noqa: F401 - fixtures
from tests.cuda.test_paged import MODELS, stand_in  # noqa: F401 - fixtures
from tests.parity import conftest
from tests.parity.conftest import error, random_ids

pytestmark = pytest.mark.usefixtures("cpu_as_device")
IDS = random_ids(1, 40, seed=9)[0].numpy()
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_view_is_the_same_memory(dtype: torch.dtype) -> None:
    host = torch.zeros(2, 3, 5, dtype=dtype)
    view = on_device(host, CPU)
    assert view.data_ptr() == host.data_ptr() and view.is_contiguous()
    assert (view.shape, view.dtype, view.device) == (host.shape, dtype, CPU)
    view[1, 2, 4] = 3.0
    host[0, 0, 0] = 2.0
    assert view[0, 0, 0] == 2.0 and host[1, 2, 4] == 3.0
    del view
    gc.collect()
    assert host[1, 2, 4] == 3.0


def test_views_nobody_takes_and_views_of_nothing() -> None:
    host = torch.zeros(4)
    for _ in range(1000):
        _runtime.view_memory(host.data_ptr(), [4], "fp32", 3)  # freed with the capsule
    with pytest.raises(ValueError, match="no such type: int4"):
        _runtime.view_memory(host.data_ptr(), [4], "int4", -1)
    with pytest.raises(ValueError, match="no memory"):
        _runtime.view_memory(0, [4], "fp32", -1)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_logits(name: str, open_lane: Any) -> None:  # noqa: F811
    plain, session = (CudaSession(open_lane(name, host=host), chunk=8) for host in ("", "0|1"))
    assert not plain.cache.host and set(session.cache.host) == {0, 1}
    want, got = run(plain, IDS, 21), run(session, IDS, 21)
    assert np.array_equal(got, want)
    session.position = 30  # going back: newer positions are overwritten
    again = np.stack([session.decode(int(t)) for t in IDS[30:]])
    assert np.array_equal(again, want[10:])
    assert session.cache.host_nbytes == plain.cache.nbytes and not plain.cache.host_nbytes
    assert session.cache.nbytes == plain.cache.nbytes // 2, "one working copy for two layers"


@torch.inference_mode()
def test_the_rows_are_in_host_memory(open_lane: Any) -> None:  # noqa: F811
    session = CudaSession(open_lane("qwen3_moe", host="1"))
    run(session, IDS, 21)
    pinned = list(session.cache.host[1]._pinned.values())
    assert len(pinned) == 2
    for buffer in pinned:
        assert buffer[:, :, : len(IDS)].abs().sum(-1).min() > 0 and not buffer[:, :, len(IDS) :].any()
        buffer.zero_()  # what the next step reads is there
    assert not np.array_equal(session.decode(5), CudaSession(open_lane("qwen3_moe")).prefill([*map(int, IDS), 5]))


@torch.no_grad()
@pytest.mark.parametrize(("name", "stages"), [("deep_v3", "2"), ("gpt_oss", ""), ("mixtral_window", "1")])
def test_replayed_graphs(name: str, stages: str, deep: str, open_lane: Any, monkeypatch: Any) -> None:  # noqa: F811
    """Fixed addresses: recorded once, in one stage or two, and replayed at other positions."""
    want = run(CudaSession(open_lane(name)), IDS, 21)
    made = use_recorded_graphs(monkeypatch)
    session = CudaSession(open_lane(name, stages=stages, host="1|2"))
    got = run(session, IDS, 21)
    assert [g.launches for g in made] == [len(IDS) - 21] * (2 if stages else 1)
    assert error(torch.from_numpy(got), torch.from_numpy(want)) < 1e-5


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_nothing_needs_the_host(name: str, open_lane: Any) -> None:  # noqa: F811
    check_needs_no_host(CudaSession(open_lane(name, "bf16", dtype="bf16", host="0|1")))


@torch.no_grad()
@pytest.mark.parametrize("name", ["wide_window", "wide_v3"])
def test_flashinfer_reads_it_where_it_is(
    name: str,
    stand_in: fake_flashinfer.Log,  # noqa: F811
    open_lane: Any,  # noqa: F811
    monkeypatch: Any,
) -> None:
    conftest.MODELS.update(MODELS)
    want = run(CudaSession(open_lane(name), context=200, attention="torch"), IDS, 21)
    session = CudaSession(open_lane(name, host="0|1"), context=200)
    assert session.attention.startswith("FlashInfer (")
    got = [session.prefill(IDS[:21])]
    monkeypatch.setattr(HostCaches, "working_copies", lambda *_: pytest.fail("copied in a decode step"))
    got += [session.decode(int(t)) for t in IDS[21:]]
    assert error(torch.from_numpy(np.stack(got)), torch.from_numpy(want)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_the_bytes_are_those_of_the_plan(name: str, open_lane: Any) -> None:  # noqa: F811
    for host in ("", "1"):
        model = open_lane(name, "bf16", dtype="bf16", host=host)
        cache = CudaSession(model, context=640).cache
        planned = cache_bytes(model.ktc_plan, cache.context)["cuda:0"]
        assert (cache.nbytes, cache.host_nbytes) == (planned.device, planned.host)
        assert planned.plain == cache.host_nbytes + cache.nbytes - (cache.host_nbytes if host else 0)


@torch.no_grad()
def test_on_the_cpu_it_means_nothing(lane_bundle: Any, library: Any, best_variant: str) -> None:
    logits = []
    for host in ("", "0|1"):
        path: Path = lane_bundle("qwen3_moe", "fp32", device="cpu", host=host)
        model = ktc.load(path, kernel_library=library(best_variant), threads=2)
        logits.append(model(torch.from_numpy(IDS[None])).logits)
    assert torch.equal(*logits)
    assert "kv_cache" in json.dumps(json.loads((path / "plan.json").read_bytes()))


@torch.no_grad()
def test_ktc_run_says_it(lane_bundle: Any, library: Any, best_variant: str, capsys: Any) -> None:
    from tests.cli.runner import ktc as run_ktc

    bundle = lane_bundle("qwen3_moe", "int8", host="0|1")
    options = ("-p", "abc", "--max-tokens", 2, "--greedy", "--kernel-library", library(best_variant))
    assert run_ktc("run", bundle, *options, "--context", 64, "-v") == 0
    assert "KV cache: 16.0 KiB in host memory, 8.00 KiB on the device" in capsys.readouterr().err
