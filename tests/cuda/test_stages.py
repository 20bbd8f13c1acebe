"""Layers split over two logical devices: both are torch's CPU device, beside the stand-in for libcudart."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import ktc
from ktc.cuda import experts
from ktc.cuda.session import CudaSession
from tests.cuda import fake_flashinfer
from tests.cuda.conftest import ROOT
from tests.cuda.record import use_recorded_graphs
from tests.cuda.test_lane import (  # noqa: F401 - fixtures
    FAMILIES,
    decode_after_a_wrong_expert,
    deep,
    hf,
    open_lane,
    run,
)
from tests.cuda.test_paged import MODELS, stand_in  # noqa: F401 - fixtures
from tests.parity import conftest
from tests.parity.conftest import error, random_ids

pytestmark = pytest.mark.usefixtures("cpu_as_device")
IDS = random_ids(1, 40, seed=9)[0].numpy()


def logits(model: Any, **options: Any) -> torch.Tensor:
    return torch.from_numpy(run(CudaSession(model, chunk=8, **options), IDS, 21))


@pytest.fixture
def on_cpu(lane_bundle: Any, library: Any, best_variant: str) -> Any:
    def get(name: str) -> Any:
        return ktc.load(lane_bundle(name, "fp32", device="cpu"), kernel_library=library(best_variant), threads=2)

    return get


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_two_stages_equal_one_device_and_the_cpu(name: str, open_lane: Any, on_cpu: Any) -> None:  # noqa: F811
    model = open_lane(name, stages="1")
    assert [stage.device for stage in model.ktc_pipeline.stages] == ["cuda:0", "cuda:1"]
    got = logits(model)
    assert error(got, logits(open_lane(name))) < 1e-5
    assert error(got, on_cpu(name)(torch.from_numpy(IDS[None])).logits[0, 20:]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("stages", ["1", "2", "3", "2-3"])
@pytest.mark.parametrize("n_deferred", [0, 1, 2])
def test_deferral_crosses_the_boundary(n_deferred: int, stages: str, deep: str, open_lane: Any, hf: Any) -> None:  # noqa: F811
    """What the last MoE layer of a stage defers is added in the first one of the next; "2-3" ends where it began."""
    from tests.graph import test_deferral

    model, plain = open_lane(deep, stages=stages), hf(deep)
    assert len(model.ktc_pipeline.stages) == (3 if stages == "2-3" else 2)
    got = logits(model, n_deferred=n_deferred)
    assert error(got, logits(open_lane(deep), n_deferred=n_deferred)) < 1e-5
    with test_deferral.deferring(plain, n_deferred):
        want = test_deferral.reference(plain, torch.from_numpy(IDS), 21)[20:]
    assert error(got, torch.from_numpy(want)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["deep_v3", "gpt_oss", "mixtral_window", "granitemoe"])
def test_a_graph_per_stage(name: str, deep: str, open_lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Recorded once and replayed with other tokens, positions, routing and numbers of deferred experts."""
    stages = "2-3" if name == deep else "1"
    made = use_recorded_graphs(monkeypatch)
    session = CudaSession(open_lane(name, stages=stages), chunk=8)
    graphs = session._graphs
    assert graphs is not None and len(graphs) == len(session.pipeline.stages) == len(made)
    off = CudaSession(open_lane(name), chunk=8, graph=False)
    for n_deferred in (0, 2, 1) if name == deep else (0,):
        for each in (session, off):
            each.reset()
            each.split(n_deferred)
        before = [g.launches for g in made]
        got, want = (torch.from_numpy(run(each, IDS, 21)) for each in (session, off))
        assert error(got, want) < 1e-5
        assert [g.launches - b for g, b in zip(made, before, strict=True)] == [len(IDS) - 21] * len(made)


@torch.no_grad()
def test_what_the_replays_read_was_copied(open_lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Without the copies between the graphs the second stage would compute the first step for ever."""
    use_recorded_graphs(monkeypatch)
    session = CudaSession(open_lane("qwen3_moe", stages="1"))
    graphs = session._graphs
    assert graphs is not None and graphs._copies[0] == [] and graphs._copies[1]
    devices = {id(target) for target, _ in graphs._copies[1]} & {id(source) for _, source in graphs._copies[1]}
    assert not devices
    want = run(session, IDS, 21)
    graphs._copies[1] = []
    session.reset()
    assert error(torch.from_numpy(run(session, IDS, 21)), torch.from_numpy(want)) > 1e-3


@torch.no_grad()
def test_hot_experts_and_generate_in_two_stages(deep: str, open_lane: Any, hf: Any) -> None:  # noqa: F811
    model = open_lane(deep, stages="2", hot=3)
    assert error(logits(model, n_deferred=1), logits(open_lane(deep, hot=3), n_deferred=1)) < 1e-5
    ids = torch.from_numpy(IDS[None, :9])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), hf(deep).generate(ids, **options))


@torch.no_grad()
@pytest.mark.parametrize("name", ["wide_window", "wide_v3"])
def test_flashinfer_has_plans_on_each_device(name: str, stand_in: fake_flashinfer.Log, open_lane: Any) -> None:  # noqa: F811
    conftest.MODELS.update(MODELS)
    session = CudaSession(open_lane(name, stages="1"), context=200)
    assert session.attention.startswith("FlashInfer (")
    assert [p["length"] for p in stand_in.plans] == [256, 256], "one for each device"
    got = run(session, IDS, 21)
    assert error(torch.from_numpy(got), logits(open_lane(name), attention="torch")) < 1e-5


def test_m8_a_fault_in_one_stage_leaves_nothing_in_the_other(deep: str, open_lane: Any) -> None:  # noqa: F811
    # failure M8: an error must not poison what comes after it
    model = open_lane(deep, stages="2")
    session = CudaSession(model, n_deferred=1)
    want = run(session, IDS, 21)
    session.position = 21
    block = model.get_submodule("model.layers.1.mlp")
    assert np.array_equal(decode_after_a_wrong_expert(session, block, IDS[21:]), want[1:])


def test_operands_are_on_the_device_of_their_layer(lane_bundle: Any, library: Any, best_variant: str) -> None:
    """In a process of its own, because torch gets a backend with two devices there (operands.py)."""
    names = [*FAMILIES, "olmoe", "glm4_moe", "minimax_m2"]
    bundles = [str(lane_bundle(name, "bf16", stages="1")) for name in names]
    command = [sys.executable, "-m", "tests.cuda.operands", str(library(best_variant)), *bundles]
    environment = os.environ | {"KTC_TEST_CUDART": str(experts.CUDART)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == names
