"""Hot experts on the device: the same results as with all experts on the CPU, and nothing that a graph cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktc.cuda import build
from ktc.cuda.hot import HotExperts
from ktc.cuda.session import CudaSession
from ktc.engine.reference import reference_modules
from ktc.plan.ir import Plan
from ktc.plan.stages import place
from tests.cuda.test_lane import (  # noqa: F401 - fixtures
    NeedsHost,
    decode_after_a_wrong_expert,
    deep,
    hf,
    open_lane,
    run,
)
from tests.graph.test_deferral import moe_blocks, reference
from tests.parity.conftest import error, random_ids

pytestmark = pytest.mark.usefixtures("cpu_as_device")
IDS = random_ids(1, 40, seed=9)[0].numpy()


def logits(model: Any, **options: Any) -> torch.Tensor:
    return torch.from_numpy(run(CudaSession(model, **options), IDS, 9))


def gathering(model: Any) -> Any:
    """The other way to compute, whatever the sizes say."""
    for hot in model.ktc_lane.hot:
        hot.gathers = not hot.gathers
    return model


@torch.no_grad()
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "gpt_oss", "mixtral_window"])
def test_the_same_as_all_on_the_cpu(name: str, gather: bool, open_lane: Any) -> None:  # noqa: F811
    want = logits(open_lane(name))
    model = open_lane(name, hot=3)
    assert all(isinstance(h, HotExperts) and not h.gathers for h in model.ktc_lane.hot)
    got = logits(gathering(model) if gather else model)
    assert error(got, want) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("experts", ["int8", "int4"])
def test_quantised_experts_are_the_same_weights(experts: str, open_lane: Any) -> None:  # noqa: F811
    """Exactly those of the bundle; whole models differ by what quantised activations do, on the CPU only."""
    model = open_lane("qwen3_moe", experts, hot=3)
    hot, lane = model.ktc_lane.hot[0], model.ktc_lane.sides["cuda:0"]
    oracle = reference_modules(model)["model.layers.0.mlp"]
    oracle.integer = False
    ids, weights = torch.tensor([[hot.plan.hot[2], hot.plan.hot[0]]]), torch.tensor([[0.3, 0.6]])
    x = torch.randn(1, lane.hidden)
    assert error(hot.compute(x, *hot.slots(ids, weights, lane.kept)), oracle(x, ids, weights)) < 1e-5
    assert 0 < error(logits(model), logits(open_lane("qwen3_moe", experts))) < 0.06


@torch.no_grad()
def test_bf16_on_the_device(open_lane: Any) -> None:  # noqa: F811
    want = logits(open_lane("deepseek_v3", "bf16", dtype="bf16"))
    model = open_lane("deepseek_v3", "bf16", dtype="bf16", hot=3)
    assert model.ktc_lane.hot[0].gate_up.dtype == torch.bfloat16
    assert error(logits(model), want) < 0.02


@torch.no_grad()
def test_what_is_hot_costs_the_cpu_nothing(open_lane: Any) -> None:  # noqa: F811
    """All experts hot: a decode step submits no expert to the pool; prefill still does."""

    def calls(model: Any) -> int:
        return sum(sum(moe.report()["kernels"].values()) for moe in model.ktc_lane.moes)

    model = open_lane("qwen3_moe", hot=8)
    session = CudaSession(model)
    session.prefill(IDS[:9])
    before = calls(model)
    assert before > 0
    got = [session.decode(int(t)) for t in IDS[9:]]
    assert calls(model) == before
    assert error(torch.from_numpy(np.stack(got)), logits(open_lane("qwen3_moe"))[1:]) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("n_deferred", [1, 2])
def test_deferral_defers_what_is_not_hot(n_deferred: int, deep: str, open_lane: Any, hf: Any) -> None:  # noqa: F811
    """The K lowest of all experts would be deferred; those of them that are hot are added at once."""
    model, plain = open_lane(deep, hot=3), hf(deep)
    hot = [set(m.moe.hot) for m in model.ktc_plan.moe_modules()]
    got = logits(model, n_deferred=n_deferred)
    blocks = moe_blocks(plain)
    forwards = {block: block.forward for block in blocks}
    try:
        _defer_cold(blocks, n_deferred, hot)
        want = torch.from_numpy(reference(plain, torch.from_numpy(IDS), 9)[8:])
        assert error(got, want) < 1e-5
        _defer_cold(blocks, n_deferred, [set()] * 3)
        other = torch.from_numpy(reference(plain, torch.from_numpy(IDS), 9)[8:])
        assert error(got, other) > 1e-4, "the hot ones were deferred too"
    finally:
        for block, forward in forwards.items():
            block.forward = forward


def _defer_cold(blocks: list[Any], n_deferred: int, hot: list[set[int]]) -> None:
    mailbox: list[torch.Tensor] = []

    def forward_of(block: Any, here: set[int], last: bool) -> Any:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            x = hidden.view(-1, hidden.shape[-1])
            _, weights, ids = block.gate(x)
            later = n_deferred if x.shape[0] == 1 and not last else 0
            order = weights.argsort(-1, descending=True)
            late = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order[:, weights.shape[1] - later :], True)
            late &= torch.tensor([[int(e) not in here for e in row] for row in ids])
            out = block.experts(x, ids, weights.masked_fill(late, 0.0)) + block.shared_experts(x)
            if mailbox:
                out = out + mailbox.pop()
            if later:
                mailbox.append(block.experts(x, ids, weights.masked_fill(~late, 0.0)))
            return out.view(hidden.shape)

        return forward

    for block, here in zip(blocks, hot, strict=True):
        block.forward = forward_of(block, here, block is blocks[-1])


@torch.no_grad()
@pytest.mark.parametrize("gather", [False, True])
def test_skipping_drops_hot_ones_too(gather: bool, deep: str, open_lane: Any) -> None:  # noqa: F811
    want = logits(open_lane(deep), n_skipped=2)
    model = open_lane(deep, hot=3)
    session = CudaSession(gathering(model) if gather else model, n_skipped=2)
    assert error(torch.from_numpy(run(session, IDS, 9)), want) < 1e-4
    session.reset()
    session.split(0)  # the number is data: nothing is built anew
    assert error(torch.from_numpy(run(session, IDS, 9)), logits(open_lane(deep))) < 1e-4


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_nothing_needs_the_host(name: str, gather: bool, open_lane: Any) -> None:  # noqa: F811
    model = open_lane(name, "bf16", dtype="bf16", hot=3)
    lane, hot = model.ktc_lane.sides["cuda:0"], (gathering(model) if gather else model).ktc_lane.hot[0]
    x = torch.randn(1, lane.hidden, dtype=torch.bfloat16)
    ids, weights = torch.arange(lane.top_k)[None], torch.rand(1, lane.top_k)
    with NeedsHost() as mode:
        slots, chosen = hot.slots(ids, weights, lane.kept)
        ids.masked_fill_(slots < len(hot.plan.hot), -1)
        out = hot.compute(x, slots, chosen)
    assert mode.count > 20 and not mode.seen and out.shape == x.shape and out.dtype == torch.float32


def test_the_device_sorts_as_the_cpu_does(open_lane: Any) -> None:  # noqa: F811
    """Ties go to the first, NaN counts as the largest, and an id that is no expert is nowhere."""
    lane = open_lane("qwen3_moe", hot=8).ktc_lane
    hot, nan = lane.hot[0], float("nan")
    for weights, kept, want in (([0.5, 0.5], 1, [0.5, 0.0]), ([0.1, nan], 1, [0.0, nan]), ([0.2, 0.3], 2, [0.2, 0.3])):
        slots, got = hot.slots(torch.tensor([[6, 2]]), torch.tensor([weights]), torch.tensor(kept))
        assert slots.tolist() == [6, 2]
        assert torch.equal(torch.nan_to_num(got, 9.0), torch.nan_to_num(torch.tensor(want), 9.0))
    slots, got = hot.slots(torch.tensor([[99, -7]]), torch.tensor([[0.5, 0.5]]), torch.tensor(2))
    assert slots.tolist() == [8, 8] and not got.any()


def test_an_overflow_of_an_unused_expert_stays_unused(open_lane: Any) -> None:  # noqa: F811
    hot = open_lane("qwen3_moe", hot=3).ktc_lane.hot[0]
    used, other = hot.plan.hot[0], next(e for e in range(8) if e not in hot.plan.hot)
    hot.down[1].fill_(float("inf"))
    x, kept = torch.randn(1, hot.plan.hidden), torch.tensor(2)
    slots, weights = hot.slots(torch.tensor([[used, other]]), torch.tensor([[0.5, 0.5]]), kept)
    assert torch.isfinite(hot.compute(x, slots, weights)).all()
    slots, weights = hot.slots(torch.tensor([[hot.plan.hot[1], other]]), torch.tensor([[0.5, 0.5]]), kept)
    assert not torch.isfinite(hot.compute(x, slots, weights)).any()


def test_m8_a_fault_leaves_nothing_of_the_hot_ones(open_lane: Any) -> None:  # noqa: F811
    # failure M8: an error must not poison what comes after it
    model = open_lane("deepseek_v3", hot=3)
    session = CudaSession(model)
    want = run(session, IDS, 9)
    session.position = 9
    block = model.get_submodule("model.layers.1.mlp")
    assert np.array_equal(decode_after_a_wrong_expert(session, block, IDS[9:]), want[1:])


def test_sizes_and_report_and_manifest(open_lane: Any, lane_bundle: Any) -> None:  # noqa: F811
    path: Path = lane_bundle("gpt_oss", "bf16", hot=3)
    plan = Plan.from_json(json.loads((path / "plan.json").read_bytes()))
    assert json.loads(json.dumps(plan.to_json())) == json.loads((path / "plan.json").read_bytes())
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["device"]["hot_experts"] == 3
    model = open_lane("gpt_oss", "bf16", dtype="bf16", hot=3)
    hot = model.ktc_lane.hot
    planned = [m.moe for m in plan.moe_modules()]
    assert [h.plan.hot for h in hot] == [m.hot for m in planned if m] and all(m and len(m.hot) == 3 for m in planned)
    weights = sum(t.numel() for h in hot for t in (h.gate_up, h.down, *h.biases))
    assert sum(m.hot_bytes for m in planned if m) == 2 * weights
    without = Plan.from_json(json.loads((lane_bundle("gpt_oss", "bf16") / "plan.json").read_bytes()))
    needed = [build.device_bytes(p, torch.bfloat16, place(p))["cuda:0"] for p in (plan, without)]
    extra = needed[0] - needed[1]
    assert extra == 2 * weights == sum(plan.device_bytes().values()) - sum(without.device_bytes().values())
    assert "hot" not in json.dumps(without.to_json())
    text = "\n".join(model.ktc_report.lines())
    assert "3 of each layer on the device too, dequantised to bf16" in text


def test_ktc_profile_counts_a_bundle_for_a_device(
    lane_bundle: Any, library: Any, best_variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.cli.runner import ktc

    text = tmp_path / "t.txt"
    text.write_text("some text to count")
    options = ("--text", text, "--threads", 1, "--kernel-library", library(best_variant), "--json")
    assert ktc("profile", lane_bundle("qwen3_moe", "int8", hot=3), *options) == 0
    use = json.loads(capsys.readouterr().out)
    assert [sum(counts) for counts in use["layers"].values()] == [use["tokens"] * use["model"]["top_k"]] * 2
