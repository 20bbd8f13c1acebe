"""FlashInfer's wiring: plans, buffers, pages and windows, on a stand-in of its wrappers (fake_flashinfer.py).

None of this says anything about FlashInfer's kernels: those need a GPU (test_gpu.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktc.cuda import paged
from ktc.cuda.session import CudaSession
from ktc.errors import KtcError
from tests.cuda import fake_flashinfer
from tests.cuda.test_lane import NeedsHost, open_lane, run  # noqa: F401 - fixtures
from tests.parity import conftest
from tests.parity.conftest import error, random_ids

HEADS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
MODELS = {
    "wide_qwen3": ("qwen3_moe", HEADS, None),
    "wide_window": ("mixtral", HEADS | {"sliding_window": 13}, None),
    "wide_v3": ("deepseek_v3", LATENT, None),
    "wide_v2": ("deepseek_v2", LATENT, None),
}
WIDE = list(MODELS)
IDS = random_ids(1, 150, seed=12)[0].numpy()


@pytest.fixture(autouse=True)
def models() -> None:
    conftest.MODELS.update(MODELS)


@pytest.fixture
def stand_in(cpu_as_device: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_flashinfer.Log]:
    """The stand-in as `flashinfer`, on whatever device and type the test runs."""
    for name, module in fake_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(paged, "unusable", paged.unusable_shape)
    fake_flashinfer.log.__init__()  # type: ignore[misc]
    yield fake_flashinfer.log


@torch.no_grad()
@pytest.mark.parametrize("name", WIDE)
def test_the_same_as_torchs_attention(name: str, stand_in: fake_flashinfer.Log, open_lane: Any) -> None:  # noqa: F811
    """Over several pages, in one session that also goes back, and with a window shorter than a page."""
    model = open_lane(name)
    want = run(CudaSession(model, attention="torch", context=200), IDS, 9)
    assert not stand_in.runs
    session = CudaSession(model, context=200)
    assert session.attention.startswith("FlashInfer (") and session.cache.context == 256
    got = run(session, IDS, 9)
    assert error(torch.from_numpy(got), torch.from_numpy(want)) < 1e-5
    layers, steps = model.config.num_hidden_layers, len(IDS) - 9
    assert stand_in.runs == layers * (steps + 1)  # and the step that warms up
    planned = [p["length"] for p in stand_in.plans]
    assert planned == [256, *range(10, len(IDS) + 1)], "once for the caches, then for every step, before it"
    session.position = 70
    again = np.stack([session.decode(int(t)) for t in IDS[70:80]])
    assert np.array_equal(again, got[62:72])
    windows = {p.get("window") for p in stand_in.plans}
    assert windows == ({None} if name.startswith("wide_v") else {12} if name == "wide_window" else {-1})


@torch.no_grad()
def test_two_sessions_and_generate_share_a_model(stand_in: fake_flashinfer.Log, open_lane: Any) -> None:  # noqa: F811
    model = open_lane("wide_qwen3")
    ids = torch.from_numpy(IDS[None, :9])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    text = model.generate(ids, **options)
    a, b, plain = CudaSession(model), CudaSession(model, context=64), CudaSession(model, attention="torch")
    want = run(plain, IDS[:40], 9)
    first, second = [a.prefill(IDS[:9])], [b.prefill(IDS[:9])]
    for token in IDS[9:40]:
        first.append(a.decode(int(token)))
        second.append(b.decode(int(token)))
    for got in (first, second):
        assert error(torch.from_numpy(np.stack(got)), torch.from_numpy(want)) < 1e-5
    runs = stand_in.runs
    assert torch.equal(model.generate(ids, **options), text) and stand_in.runs == runs


def test_prefill_stays_with_torch(stand_in: fake_flashinfer.Log, open_lane: Any) -> None:  # noqa: F811
    session = CudaSession(open_lane("wide_v3"))
    runs, plans = stand_in.runs, len(stand_in.plans)
    session.prefill(IDS[:20])
    session.prefill(IDS[20:21])  # a single token too: it is no decode step
    assert (stand_in.runs, len(stand_in.plans)) == (runs, plans)


@pytest.mark.parametrize("name", ["wide_qwen3", "wide_v3"])
def test_nothing_in_a_step_needs_the_host(
    name: str,
    stand_in: fake_flashinfer.Log,
    open_lane: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ktc's side: the stand-in itself reads its buffers on the host, so here it only answers."""
    session = CudaSession(open_lane(name, "bf16", dtype="bf16"))
    session.prefill([1, 2, 3])
    session._given[0], session._given[1] = 5, 3
    for kind, answer in (
        (fake_flashinfer.BatchMLAPagedAttentionWrapper, lambda self, query, kv_cache: torch.zeros_like(query[0])),
        (fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, lambda self, q, paged_kv_cache: torch.zeros_like(q)),
    ):
        monkeypatch.setattr(kind, "run", answer)
    with NeedsHost() as mode:
        session._step()
    session.lane.synchronize()
    assert mode.count > 50 and not mode.seen


# ---- which one is taken, and what is said ---------------------------------------------------------------------------
@pytest.mark.usefixtures("cpu_as_device")
def test_without_a_gpu_it_is_torch_and_says_so(open_lane: Any) -> None:  # noqa: F811
    model = open_lane("qwen3_moe")
    assert CudaSession(model).attention == "torch (the device is cpu)"
    assert CudaSession(model, attention="torch").attention == "torch"
    with pytest.raises(KtcError, match="--attention flashinfer: the device is cpu"):
        CudaSession(model, attention="flashinfer")
    with pytest.raises(KtcError, match="'eager' is not one of auto, flashinfer, torch"):
        CudaSession(model, attention="eager")


@pytest.mark.parametrize(
    ("name", "says"),
    [("qwen3_moe", "heads of 16 columns"), ("deepseek_v3", "latent attention of rank 16 with 8 rotary columns"),
     ("gpt_oss", "attention with sinks")],
)  # fmt: skip
def test_models_that_it_does_not_take(name: str, says: str, stand_in: Any, open_lane: Any) -> None:  # noqa: F811
    model = open_lane(name)
    assert CudaSession(model).attention.startswith(f"torch ({says}")
    with pytest.raises(KtcError, match=says):
        CudaSession(model, attention="flashinfer")


def test_a_plan_that_fails_falls_back(stand_in: fake_flashinfer.Log, open_lane: Any) -> None:  # noqa: F811
    stand_in.fail = "no nvcc\nhere"
    model = open_lane("wide_v3")
    session = CudaSession(model)
    assert session.attention == "torch (FlashInfer cannot be planned: RuntimeError: no nvcc here)"
    assert np.isfinite(run(session, IDS[:12], 9)).all()
    with pytest.raises(KtcError, match="no nvcc here"):
        CudaSession(model, attention="flashinfer")


class Device:
    """What `unusable` asks of a model."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.ktc_dtype = dtype
        self.ktc_pipeline = type("Pipeline", (), {"devices": [torch.device("cuda:0")]})


def test_the_device_and_the_package_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "older than compute capability 8.0" in paged.unusable(Device(torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "pip install 'ktc[cuda]'" in paged.unusable(Device(torch.bfloat16))
    for name, module in fake_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert "not in torch.float32" in paged.unusable(Device(torch.float32))


@pytest.mark.usefixtures("cpu_as_device")
def test_the_command_line_says_it(
    lane_bundle: Callable[..., Path], library: Any, best_variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.cli.runner import ktc

    options = ("-p", "abc", "--max-tokens", 2, "--greedy", "--kernel-library", library(best_variant), "--json")
    bundle = lane_bundle("qwen3_moe", "int8")
    assert ktc("run", bundle, *options, "-v") == 0
    assert "attention of decode steps: torch (the device is cpu)" in capsys.readouterr().err
    assert ktc("run", bundle, *options, "--attention", "flashinfer") == 2
    assert "--attention flashinfer: the device is cpu" in capsys.readouterr().err
    plain = lane_bundle("qwen3_moe", "int8", device="cpu")
    for command in (("run", plain, *options), ("bench", plain)):
        assert ktc(*command, "--attention", "torch") == 2
        assert "for bundles that run on a GPU" in capsys.readouterr().err


# ---- the stand-in and the real thing --------------------------------------------------------------------------------
def test_signatures_are_flashinfers() -> None:
    """Every argument that the stand-in takes exists there, at the same place if it is positional."""
    flashinfer = pytest.importorskip("flashinfer")
    mla = pytest.importorskip("flashinfer.mla")
    for real, ours in (
        (mla.BatchMLAPagedAttentionWrapper, fake_flashinfer.BatchMLAPagedAttentionWrapper),
        (flashinfer.BatchDecodeWithPagedKVCacheWrapper, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper),
    ):
        for method in ("__init__", "plan", "run"):
            compare(getattr(real, method), getattr(ours, method))
    compare(mla.MLAPlanMetadata.csr, fake_flashinfer.MLAPlanMetadata.csr)


def compare(real: Any, ours: Any) -> None:
    there, here = inspect.signature(real).parameters, inspect.signature(ours).parameters
    takes_any = any(p.kind == p.VAR_KEYWORD for p in there.values())
    positions = list(there)
    for place, (name, parameter) in enumerate(here.items()):
        assert name in there or takes_any, f"{real.__qualname__} has no {name}"
        if parameter.kind == parameter.POSITIONAL_OR_KEYWORD and name in there:
            assert positions[place] == name, f"{real.__qualname__}: {name} is not argument {place}"
