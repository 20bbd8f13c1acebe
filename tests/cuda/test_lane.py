"""Whole models on the lane, with the CPU as the device: everything but CUDA itself (streams are threads)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ktc
from ktc.cuda.session import CudaSession
from ktc.errors import KtcError
from tests.parity.conftest import error, random_ids

FAMILIES = ("deepseek_v3", "deepseek_v2", "qwen2_moe", "qwen3_moe", "mixtral_window", "gpt_oss", "granitemoe")
pytestmark = pytest.mark.usefixtures("cpu_as_device")


@pytest.fixture(scope="module")
def hf(checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """(name, dtype="float32") -> Hugging Face's own model."""
    from transformers import AutoModelForCausalLM

    loaded: dict[Any, Any] = {}

    def get(name: str, dtype: str = "float32") -> Any:
        if (name, dtype) not in loaded:
            loaded[name, dtype] = AutoModelForCausalLM.from_pretrained(
                checkpoint(name), dtype=getattr(torch, dtype), experts_implementation="eager"
            ).eval()
        return loaded[name, dtype]

    return get


@pytest.fixture
def open_lane(lane_bundle: Any, library: Any, best_variant: str) -> Callable[..., Any]:
    """(model, experts, linears, dtype, **bundle) -> loaded model."""

    def get(name: str, experts: str = "fp32", linears: str = "", dtype: str = "fp32", **options: Any) -> Any:
        path = lane_bundle(name, experts, linears, **options)
        return ktc.load(path, kernel_library=library(best_variant), threads=2, dtype=dtype)

    return get


def run(session: CudaSession, ids: np.ndarray, prompt: int) -> np.ndarray:
    """Logits of the last prompt token and of every token after it."""
    rows = [session.prefill(ids[:prompt])]
    rows += [session.decode(int(token)) for token in ids[prompt:]]
    return np.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_decode_equal_hugging_face(name: str, open_lane: Any, hf: Any) -> None:
    ids = random_ids(1, 45, seed=3)
    want = hf(name)(ids).logits[0, 20:]
    session = CudaSession(open_lane(name), chunk=16)
    got = run(session, ids[0].numpy(), 21)
    assert error(torch.from_numpy(got), want) < 1e-4
    session.position = 21  # going back: newer positions are overwritten
    again = np.stack([session.decode(int(t)) for t in ids[0, 21:]])
    assert np.array_equal(again, got[1:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_bf16_stays_close_to_hugging_faces_bf16(name: str, open_lane: Any, hf: Any) -> None:
    ids = random_ids(1, 24, seed=4)
    exact = hf(name)(ids).logits[0, 7:]
    theirs = error(hf(name, "bfloat16")(ids).logits[0, 7:].float(), exact)
    model = open_lane(name, "bf16", dtype="bf16")
    assert model.dtype == torch.bfloat16
    got = run(CudaSession(model), ids[0].numpy(), 8)
    assert error(torch.from_numpy(got), exact) < 2 * theirs + 0.01


@torch.no_grad()
def test_r2_routers_stay_in_fp32(open_lane: Any) -> None:
    # failure R2: correction bias cast to bf16: other experts chosen
    model = open_lane("deepseek_v3", "bf16", dtype="bf16")
    gate = model.get_submodule("model.layers.1.mlp.gate")
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    assert model.get_submodule("model.norm").weight.dtype == torch.bfloat16


@torch.no_grad()
def test_q7_quantised_linears_agree_with_the_cpu_device(open_lane: Any, lane_bundle: Any, library: Any,
                                                        best_variant: str) -> None:  # fmt: skip
    """failure Q7: output drifts as modules move between devices. Same stored integers, other arithmetic around them."""
    ids = random_ids(1, 20, seed=5)
    for linears in ("int4", "int8"):
        path = lane_bundle("deepseek_v3", "int8", linears, device="cpu")
        cpu = ktc.load(path, kernel_library=library(best_variant), threads=2)(ids).logits[0, 9:]
        for dtype, bound in (("fp32", 0.06), ("bf16", 0.08)):
            got = run(CudaSession(open_lane("deepseek_v3", "int8", linears, dtype)), ids[0].numpy(), 10)
            assert error(torch.from_numpy(got), cpu) < bound


@torch.no_grad()
def test_generate_of_hugging_face_works(open_lane: Any, hf: Any) -> None:
    """Also after a session, which runs in inference mode: buffers must not become its own."""
    ids = random_ids(1, 9, seed=6)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model, want = open_lane("qwen3_moe"), hf("qwen3_moe").generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), want)
    run(CudaSession(model), ids[0].numpy(), 6)
    assert torch.equal(model.generate(ids, **options), want)
    long = random_ids(1, 200, seed=6)
    side = model.ktc_lane.sides["cuda:0"]
    side.many = side.make_staging(3)  # staging that has to grow
    assert error(model(long).logits, hf("qwen3_moe")(long).logits) < 1e-4
    assert torch.equal(model.generate(ids, **options), want)


def decode_after_a_wrong_expert(session: CudaSession, block: Any, ids: np.ndarray) -> np.ndarray:
    """Logits of `ids`, decoded after a step in which the first MoE block asked for an expert that is not there."""
    route = block.route
    block.route = lambda x: (route(x)[0], torch.full_like(route(x)[1], 99))
    with pytest.raises(RuntimeError, match=r"MoE layer 0: .*expert 99, there are 8"):
        session.decode(int(ids[0]))
    del block.route
    return np.stack([session.decode(int(t)) for t in ids])


class NeedsHost(TorchDispatchMode):
    """Collects what a CUDA graph cannot capture: values read by the host, sizes that depend on data, host constants."""

    FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "lift", "lift_fresh", "equal",
                 "allclose", "unique", "bincount")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.overloadpacket.__name__
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if name == "index" else []
        if masks or any(name == f or name.startswith(f"{f}_") for f in self.FORBIDDEN):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_the_detector_sees_what_it_should() -> None:
    x = torch.ones(3)
    for needs in (lambda: x.sum().item(), lambda: bool(x.sum() > 2), lambda: x[x > 0], lambda: torch.tensor(3.0) + x):
        with NeedsHost() as mode:
            needs()
        assert mode.seen


def check_needs_no_host(session: CudaSession) -> None:
    """What makes capture fail on a GPU is not in a decode step."""
    session.prefill([1, 2, 3])
    session._given[0], session._given[1] = 5, 3
    with NeedsHost() as mode:
        session._step()
    session.lane.synchronize()
    assert mode.count > 50 and not mode.seen


@pytest.mark.parametrize("name", [*FAMILIES, "olmoe", "glm4_moe", "minimax_m2", "deepseek_v3_yarn"])
def test_nothing_in_a_decode_step_needs_the_host(name: str, open_lane: Any) -> None:
    """What makes capture fail on a GPU, found without one."""
    check_needs_no_host(CudaSession(open_lane(name, "bf16", dtype="bf16")))


# ---- Expert Deferral -----------------------------------------------------------------------------------------------
DEEP = {"num_hidden_layers": 4, "num_experts_per_tok": 4, "n_group": 2}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path], lane_bundle: Any) -> str:
    """A model with three MoE layers of top-4, known to `checkpoint` by this name."""
    from tests.parity import conftest

    conftest.MODELS["deep_v3"] = ("deepseek_v3", DEEP, None)
    return "deep_v3"


@torch.no_grad()
@pytest.mark.parametrize("n_deferred", [0, 1, 2])
def test_deferral_equals_plain_torch_over_64_steps(n_deferred: int, deep: str, open_lane: Any, hf: Any) -> None:
    from tests.graph import test_deferral

    ids = random_ids(1, 64 + 11, seed=7)[0]
    session = CudaSession(open_lane(deep), n_deferred=n_deferred)
    assert session.n_deferred == [n_deferred] * 3
    got = run(session, ids.numpy(), 11)
    model = hf(deep)
    plain = test_deferral.reference(model, ids, 11)[10:]
    with test_deferral.deferring(model, n_deferred):
        want = test_deferral.reference(model, ids, 11)[10:]
    assert error(torch.from_numpy(got), torch.from_numpy(want)) < 1e-5
    if n_deferred:
        assert error(torch.from_numpy(got), torch.from_numpy(plain)) > 1e-3, "deferral changed nothing"


def test_the_recipe_decides_and_run_time_may_overrule(deep: str, open_lane: Any) -> None:
    model = open_lane(deep, deferred=2)
    assert CudaSession(model).n_deferred == [2, 2, 2]
    assert CudaSession(model, n_deferred=0).n_deferred == [0, 0, 0]
    assert CudaSession(model, n_skipped=1).n_deferred == [0, 0, 0]
    assert CudaSession(open_lane(deep, deferred="auto")).n_deferred[0] in (0, 1, 2)
    for wrong in (3, -1):
        with pytest.raises(KtcError, match=r"immediate|negative"):
            CudaSession(model, n_deferred=wrong)
    with pytest.raises(KtcError, match="not both"):
        CudaSession(model, n_deferred=1, n_skipped=1)
    with pytest.raises(KtcError, match="leaves none"):
        CudaSession(model, n_skipped=4)


# ---- faults ---------------------------------------------------------------------------------------------------------
def test_m8_a_fault_in_a_step_is_an_exception_and_the_next_step_works(open_lane: Any) -> None:
    # failure M8: a worker's fault hung the program
    model = open_lane("deepseek_v3")
    session = CudaSession(model)
    ids = random_ids(1, 12, seed=8)[0].numpy()
    want = run(session, ids, 8)
    session.position = 8
    block = model.get_submodule("model.layers.1.mlp")
    route = block.route
    block.route = lambda x: (route(x)[0], torch.full_like(route(x)[1], 99))
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"MoE layer 0: .*expert 99, there are 8"):
            session.decode(int(ids[8]))
        with pytest.raises(RuntimeError, match="expert 99"):
            session.prefill(ids[8:])
        assert session.position == 8
    del block.route
    assert np.array_equal(np.stack([session.decode(int(t)) for t in ids[8:]]), want[1:])


def test_a3_a_full_context_is_said(open_lane: Any) -> None:
    # failure A3: context end aborted
    session = CudaSession(open_lane("deepseek_v3"), context=10)
    session.prefill([1] * 10)
    for call in (lambda: session.decode(1), lambda: session.prefill([1])):
        with pytest.raises(KtcError, match=r"context full: 10 \+ 1 tokens"):
            call()
    session.reset()
    with pytest.raises(KtcError, match="outside the vocabulary"):
        session.decode(10**6)
    session.decode(1)


def test_the_report_says_what_runs_where(open_lane: Any) -> None:
    text = "\n".join(open_lane("deepseek_v3", "int8", "int4", "bf16").ktc_report.lines())
    assert "routed experts int8" in text and "8 experts, top 2" in text
    assert "absorbed latent attention, torch bf16, scores fp32" in text
    assert "PyTorch's int4 matmul (tinygemm)" in text
    assert "Hugging Face DeepseekV3RMSNorm, bf16" in text


def test_text_from_ktc_run(lane_bundle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line takes the lane by itself, and its options."""
    from ktc.cli.main import main

    path = str(lane_bundle("qwen3_moe", "int8"))
    with pytest.raises(SystemExit) as done:
        main(["run", path, "-p", "abc", "--max-tokens", "5", "--greedy", "--json", "--context", "64", "-v"])
    said = capsys.readouterr()
    assert not done.value.code, said.err
    assert '"finish_reason": "length"' in said.out and "Hugging Face Qwen3MoeRMSNorm, bf16" in said.err
