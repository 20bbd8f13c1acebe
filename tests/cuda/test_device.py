"""Which device a plan means, errors where it is not there, cross-compiling, and CUDA sources under nvcc."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ktc
from ktc.cuda import device
from ktc.errors import BundleError, KtcError
from ktc.plan import build_plan
from ktc.plan.stages import place
from ktc.recipe import load_recipe
from tests.cli.runner import ktc as run_ktc
from tests.cuda.conftest import ROOT, cuda_here
from tests.tiny import TINY, tiny_config

PAPER = """rules:
  - match: {role: moe}
    replace: {class: ktc.FusedMoE, device: cpu, kwargs: {data_type: int4}}
  - match: {role: mla}
    replace: {class: ktc.MLAAttention, device: "cuda:0"}
  - match: {role: linear}
    replace: {class: ktc.Linear, device: "%s", kwargs: {data_type: int8}}
"""


def plan_of(tmp_path: Path, text: str, family: str = "deepseek_v3") -> Any:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return build_plan(tiny_config(family), load_recipe(path))


def test_the_papers_recipe_with_two_rules_on_the_gpu(tmp_path: Path) -> None:
    """Norms, router, embedding and lm_head are decided by no rule: they follow the attention."""
    placed = place(plan_of(tmp_path, PAPER % "cuda:0"))
    assert placed is not None and placed.devices == ("cuda:0",) and len(placed.stages) == 1
    assert place(plan_of(tmp_path, (PAPER % "cpu").replace("cuda:0", "cpu"))) is None


def test_plans_that_cannot_run_name_the_rule(tmp_path: Path) -> None:
    with pytest.raises(KtcError, match=r"self_attn\.q_a_proj is on the cpu \(rule 3 \(.*r\.yaml:6\)\)"):
        place(plan_of(tmp_path, PAPER % "cpu"))


@pytest.mark.parametrize("family", list(TINY))
def test_int4_cuda_plans_for_every_family(family: str) -> None:
    plan = build_plan(tiny_config(family), load_recipe("int4-cuda.yaml"))
    assert {m.device for m in plan.modules} == {"cuda:0"} and plan.uses_cuda()
    placed = place(plan)
    assert placed is not None and placed.devices == ("cuda:0",)
    assert {m.moe.n_deferred_experts for m in plan.moe_modules()} == {"auto"}


def test_compile_and_inspect_work_without_a_gpu_and_run_says_why_not(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Cross-compiling is the rule: only `ktc run` needs the device, and says so in one line before it reads weights."""
    from ktc.bundle import judge

    out = tmp_path / "cuda.ktc"
    source = tiny_checkpoint("qwen3_moe", dtype="bf16", tokenizer="chat")
    assert run_ktc("compile", source, "--recipe", "int4-cuda.yaml", "-o", out, "--variants", "portable") == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["device"]["kind"] == "cuda" and manifest["goldens"]["logits"] is None
    assert not (out / "graph").exists(), "its step is captured at load"
    assert run_ktc("inspect", out) == 0
    host = judge.this_host()
    monkeypatch.setattr(judge, "this_host", lambda: SimpleNamespace(**{**vars(host), "cuda": False}))
    capsys.readouterr()
    assert run_ktc("run", out, "-p", "x") == BundleError.exit_code
    err = capsys.readouterr().err
    assert err.count("error:") == 1 and "this machine shows none" in err and "hint:" in err


@pytest.mark.skipif(cuda_here(), reason="there is a CUDA device")
def test_a_driver_without_a_usable_torch_is_one_error(lane_bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc.bundle import judge

    monkeypatch.setattr(judge, "_device", lambda bundle, host: judge.Part("device", "OPTIMAL", ""))
    path = lane_bundle("qwen3_moe", "int8")
    what = "built without CUDA" if torch.version.cuda is None else "no usable CUDA device"
    with pytest.raises(KtcError, match=f"the bundle runs on cuda:0, and torch .*{what}"):
        ktc.load(path)


def test_devices_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(KtcError, match="runs on cuda:3, and this machine has 1 CUDA device\n"):
        device.open_device("cuda:3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "Tesla T4")
    with pytest.raises(KtcError, match=r"Tesla T4; compute capability 8\.0"):
        device.open_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (1000, 2000))
    with pytest.raises(KtcError, match=r"needs 4.88 KiB of memory on cuda:0, 1000 B are free"):
        device.check_memory(torch.device("cuda:0"), 5000)


def test_the_cpu_computes_in_fp32_only(lane_bundle: Any, library: Any, best_variant: str, cpu_as_device: None) -> None:
    with pytest.raises(KtcError, match="the CPU computes in fp32"):
        ktc.load(lane_bundle("qwen3_moe", "int8", device="cpu"), dtype="bf16")
    with pytest.raises(KtcError, match="bf16, fp16 or fp32, not int8"):
        ktc.load(lane_bundle("qwen3_moe", "int8"), kernel_library=library(best_variant), dtype="int8")


def test_not_a_bundle_is_not_cuda(tmp_path: Path) -> None:
    assert not device.wants_cuda(tmp_path / "nothing")
    file = tmp_path / "manifest.json"
    quoted = '{"note":"\\"device\\":{\\"kind\\":\\"cuda\\"}"}'
    for text in ("[1]", "{", '{"device":{"kind":"cpu"}}', '{"device":"cuda"}', quoted,
                 '{"a":{"device":{"kind":"cuda"}},"device":{"kind":"cpu"}}', '{"device":{"kind":"cuda"}'):  # fmt: skip
        file.write_text(text)
        assert not device.wants_cuda(tmp_path), text
    for text in ('{"device":{"kind":"cuda"}}', '{"a": 1, "device": {"torch": null,\n "kind" : "cuda"}}'):
        file.write_text(text)
        assert device.wants_cuda(tmp_path), text


def test_manifests_without_a_cuda_device_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of `ktc run` asks; parsing takes some twenty times as long as looking."""
    (tmp_path / "manifest.json").write_text('{"device":{"kind":"cpu"}}')
    monkeypatch.setattr(device.json, "loads", lambda data: pytest.fail("parsed"))
    assert not device.wants_cuda(tmp_path)


def test_cuda_sources_compile_for_sm_80_89_90_120(tmp_path: Path) -> None:
    """Against NVIDIA's own headers: the declarations that the runtime looks up by name are what they really are."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    sources = sorted((ROOT / "runtime").rglob("*.cu"))
    assert sources
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (80, 89, 90, 120)]
    includes = [f"-I{ROOT / 'runtime' / part}" for part in ("include", "src")]
    for source in sources:
        command = [nvcc, "-std=c++17", "-Werror=all-warnings", *targets, *includes, "-c", str(source)]
        done = subprocess.run([*command, "-o", str(tmp_path / "out.o")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
