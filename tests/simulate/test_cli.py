"""`ktc simulate` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bundle.conftest import compiled
from tests.cli.runner import ktc
from tests.simulate.conftest import ROOT

__all__ = ["compiled"]
QWEN = ROOT / "tests" / "configs" / "Qwen3-30B-A3B.json"
PAPER = "paper-2x8452y-a100"
ONE_CORE = """version: 1
cpu: {sockets: 1, cores_per_socket: 1, dram_local_gbs: 25, peak_tflops: {avx512: 1},
      kernels: {ktc: {dram_fraction: 0.8, compute_fraction: 0.3}}}
device: {kind: cpu}
"""


def test_table_json_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.json"
    assert ktc("simulate", QWEN, "-r", "bf16", "-H", PAPER, "--trace", trace) == 0
    out, err = capsys.readouterr()
    assert err == "" and "qwen3_moe, 48 layers, 48 with experts (bf16), recipe bf16" in out
    rows = [line for line in out.splitlines() if line.strip().startswith(tuple("0123456*")) and "%" in line]
    assert len(rows) == 7 and sum(line.startswith("  *") for line in rows) == 1
    assert "prefill of 1024 tokens" in out
    processes = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert processes[0] == "K = 0" and len(processes) == 2
    assert ktc("simulate", QWEN, "-r", "bf16", "-H", PAPER, "--json", "--prompt", 64, "--numa", "single") == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["deferred"] for row in data["decode"]] == list(range(7)) and data["prefill"]["tokens"] == 64
    assert len(data["layers"]) == 48 and len(data["layers"][0]["routed"]) == 1


def test_a_bundle_is_a_model_too(compiled, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = compiled("deepseek_v3")
    assert ktc("simulate", bundle, "-H", PAPER, "--numa", "single") == 0
    assert "recipe int4" in capsys.readouterr().out
    assert ktc("simulate", bundle, "-H", PAPER) == 2
    err = capsys.readouterr().err
    assert f"split over 1 NUMA node, and the hardware profile {PAPER} describes 2 sockets" in err
    assert "--numa unaware" in err and "ktc repack --nodes 2" in err
    assert ktc("simulate", bundle, "-H", PAPER, "-r", "int8") == 2
    assert "a bundle has its recipe inside" in capsys.readouterr().err


def test_a_faulty_profile_is_said_before_anything_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\ncpu: {}\ndevice: {kind: cpu}\n")
    assert ktc("simulate", "no-such-model", "-H", path) == 4
    assert capsys.readouterr().err.startswith(f"ktc: error: {path}:2:6: cpu: 'sockets' is missing\n  hint: ")
    assert ktc("simulate", "no-such-model", "-H", "paper-2x8452y-a10") == 4
    assert "did you mean paper-2x8452y-a100?" in capsys.readouterr().err
    assert ktc("simulate", "no-such-model", "-H", PAPER, "--kernels", "fast") == 2
    assert "entries of this profile: ktc, baseline" in capsys.readouterr().err


def test_a_machine_must_be_named_and_the_known_ones_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KTC_CONFIG_DIR", str(tmp_path))
    assert ktc("simulate", QWEN) == 2
    err = capsys.readouterr().err
    assert "--hardware is missing" in err
    assert "profiles: h200-spr, paper-2x8452y-a100, this-machine (once it is measured: ktc tune), or a file" in err
    (tmp_path / "this-machine.yaml").write_text(ONE_CORE)
    assert ktc("simulate", QWEN) == 2
    assert "this-machine (measured here by ktc tune)" in capsys.readouterr().err
    assert ktc("simulate", QWEN, "-H", "this-machine") == 0
    assert "on this-machine: 1 x 1 core, the expert pool;" in capsys.readouterr().out


def test_too_many_deferred_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    assert ktc("simulate", QWEN, "-H", PAPER, "--trace", trace, "-K", "7") == 2
    assert "0 to 6 leave two immediate experts" in capsys.readouterr().err and not trace.exists()


def test_a_k_to_trace_needs_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert ktc("simulate", QWEN, "-H", PAPER, "-K", "1") == 2
    assert "--deferred needs --trace FILE" in capsys.readouterr().err


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.svg"
    assert ktc("simulate", QWEN, "-H", PAPER, "--plot", path) == 0
    assert "<svg" in path.read_text()
    assert ktc("simulate", QWEN, "-H", PAPER, "--plot", tmp_path / "p.xyz") == 2
    assert ".png, .svg or .pdf" in capsys.readouterr().err and not (tmp_path / "p.xyz").exists()


def test_plot_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert ktc("simulate", QWEN, "-H", PAPER, "--plot", tmp_path / "p.svg") == 1
    assert "pip install 'ktc[plot]'" in capsys.readouterr().err
