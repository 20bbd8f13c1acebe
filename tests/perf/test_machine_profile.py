"""The hardware profile that `ktc tune` measures: simulate reads it, and it says what this machine has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from ktc.cli.main import cli
from ktc.errors import DiskError, KtcError
from ktc.perf import jobs, limits, machine_profile
from ktc.perf.shapes import SCHEMES, MoeShape
from ktc.simulate import ProfileError, load_profile, simulate
from tests.cli.runner import ktc
from tests.cuda.conftest import FakeCuda, fake, fake_path  # noqa: F401 - fixtures
from tests.simulate.conftest import ROOT, small_plan

pytest.importorskip("ktc._runtime")
SHAPE = MoeShape("small", 4, 256, 128, 2, "")
SMALL: dict[str, Any] = {"seconds": 0.005, "shape": SHAPE, "buffer_bytes": 16 << 20, "working_set": 1 << 20}
QWEN = ROOT / "tests" / "configs" / "Qwen3-30B-A3B.json"


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KTC_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config"


def test_what_is_measured_is_what_simulate_reads(own_config: Path) -> None:
    profile = machine_profile.measure_machine(("int4", "bf16"), 7, **SMALL)
    assert profile.write() == own_config / "this-machine.yaml"
    hardware = load_profile("this-machine")
    cpu, fields = hardware.cpu, profile.fields["cpu"]
    assert hardware.name == "this-machine" and hardware.device.kind == "cpu"
    assert cpu.dram_local == pytest.approx(1e9 * fields["dram_local_gbs"]) and cpu.dram_local > 1e8
    assert cpu.amx_min_tokens == (7 if "amx_int8" in cpu.peak else 5)
    assert list(cpu.kernels) == ["ktc", "ktc-bf16"] and cpu.peak["avx512"] > 1e9
    # job and fractions together give back the times that were measured: the line's mean is theirs
    raw, ours = profile.fields["measured"]["kernels"]["int4"], cpu.kernels["ktc"]
    times, expert = raw["us_at_1_token_by_experts"], SHAPE.expert_bytes(SCHEMES["int4"])
    assert len(times) == SHAPE.top_k and raw["gbs_at_1_token"] == pytest.approx(2e-3 * expert / times[-1], rel=2e-3)
    line = jobs.fit([t * 1e-6 for t in times], expert / cpu.dram_local)
    assert cpu.job == pytest.approx(line.job, abs=2e-9 * max(times)) and cpu.job >= 0
    assert expert / (ours.dram_fraction * cpu.dram_local) == pytest.approx(line.expert, rel=5e-2)
    done = raw["tops_at_512_tokens"] * 1e12
    assert done <= ours.compute_fraction * cpu.peak_for("int4", 512) * (1 + 2e-3) <= 2.01 * done
    sim = simulate(small_plan(nodes=cpu.sockets), hardware)
    assert sim.auto == 0 and any("has no device" in note for note in sim.notes)


def test_two_sockets_have_a_remote_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from ktc import _runtime

    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setattr(_runtime, "numa_nodes", lambda: [[cpu], [cpu]])
    profile = machine_profile.measure_machine(("int8",), **SMALL)
    assert profile.fields["cpu"]["sockets"] == 2 and profile.fields["cpu"]["cores_per_socket"] == 1
    assert 0 < profile.fields["cpu"]["dram_remote_gbs"] <= profile.fields["cpu"]["dram_local_gbs"]
    assert os.sched_getaffinity(0) != set() and "dram_remote_gbs" in profile.yaml()


def rates_of(**rates: float) -> limits.Limits:
    return limits.Limits({kind: {1: limits.Rate(rate, rate, 1)} for kind, rate in rates.items()}, 1, 0)


def test_units_that_a_machine_lacks_are_left_out() -> None:
    assert machine_profile.peaks(rates_of(dram_huge=1.0, fp32_fma=2e12)) == {"avx512": 2.0}
    found = machine_profile.peaks(rates_of(fp32_fma=1e12, amx_int8=8e12, avx512_vnni=2e12))
    assert found == {"amx_int8": 8.0, "avx512": 1.0, "avx512_int8": 2.0}
    assert machine_profile.peaks(rates_of(fp32_fma=5e11, avx512_bf16=1e12)) == {"avx512": 1.0}
    found = machine_profile.peaks(rates_of(fp32_fma=1e11, avx2_int8=2e11))
    assert found == {"avx512": 0.1, "avx512_int8": 0.2}
    with pytest.raises(KtcError, match="neither AVX2 nor AVX-512"):
        machine_profile.peaks(rates_of(dram_huge=1.0))


def timed(one_token: tuple[float, ...], expert_bytes: float = 1e6) -> machine_profile.TimedKernels:
    """int4 kernels; many tokens do 3e9 operations in 1.1 ms."""
    return machine_profile.TimedKernels("int4", "int4", expert_bytes, one_token, 1.1e-3, 3e9, None)  # type: ignore[arg-type]


def test_what_a_job_takes_is_in_neither_fraction() -> None:
    """Calls of 100 us and 250 us an expert: 1 MB in 250 us is 4 GB/s, and 1 ms of the 1.1 ms is arithmetic."""
    kernels = timed((350e-6, 600e-6, 850e-6))
    line = kernels.line(8e9)
    assert (line.job, line.expert) == (pytest.approx(100e-6), pytest.approx(250e-6))
    found = kernels.fractions(8e9, {"avx512": 1.0, "amx_int8": 6.0}, line.job)
    assert found == {"dram_fraction": 0.5, "compute_fraction": 0.5}
    assert kernels.fractions(8e9, {"avx512": 4.0, "avx512_int8": 12.0}, line.job)["compute_fraction"] == 0.25
    assert kernels.figures()["gbs_at_1_token"] == pytest.approx(3e-3 / 850e-6, rel=1e-3)
    # another format's job: the slope alone gives way, so that the times are met as well as can be
    assert kernels.fractions(8e9, {"avx512": 6.0}, 0.0)["dram_fraction"] < 0.5


def test_more_than_all_counts_as_all() -> None:
    """No expert is read faster than DRAM gives it; what that makes too slow is taken from the job."""
    kernels = timed((300e-6, 350e-6, 400e-6))
    line = kernels.line(8e9)
    assert line.expert == 125e-6 and line.job == pytest.approx(100e-6)
    found = kernels.fractions(8e9, {"avx512": 6.0}, line.job)
    assert found["dram_fraction"] == 1.0 and found["compute_fraction"] == 0.5
    assert timed((1e-3,)).fractions(8e9, {"avx512": 1.0}, 1.0)["compute_fraction"] == 1.0  # a job longer than the call


@pytest.mark.parametrize(("formats", "says"), [((), "no format"), (("int5",), "unknown format 'int5'")])
def test_formats_that_are_none(formats: tuple[str, ...], says: str) -> None:
    with pytest.raises(KtcError, match=says):
        machine_profile.measure_machine(formats, **SMALL)


def test_the_command_writes_it_and_simulate_finds_it(
    own_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ktc.perf import crossover

    monkeypatch.setattr(crossover, "measure", lambda *a, **k: [])  # its own tests are elsewhere, and it takes long
    full = machine_profile.measure_machine
    monkeypatch.setattr(machine_profile, "measure_machine", lambda formats, rows, **k: full(formats, rows, **SMALL))
    assert ktc("simulate", QWEN, "-r", "bf16", "-H", "this-machine") == 4
    err = capsys.readouterr().err
    assert "there is no profile of this machine yet" in err and "hint: ktc tune measures it" in err
    assert ktc("tune", "--format", "int4", "--dry-run") == 0 and not own_config.exists()
    assert "not written (--dry-run)" in capsys.readouterr().out
    assert ktc("tune", "--format", "int4") == 0
    assert f"written to {own_config / 'this-machine.yaml'}" in capsys.readouterr().out
    assert ktc("simulate", QWEN, "-r", "bf16", "--profile", "this-machine") == 0
    out = capsys.readouterr().out
    assert "on this-machine" in out and "note: the profile has no device" in out and "auto takes 0" in out
    elsewhere = tmp_path / "there" / "mine.yaml"
    assert ktc("tune", "--format", "int4", "--profile", elsewhere, "--json") == 0
    assert json.loads(capsys.readouterr().out)["profile"]["cpu"] == yaml.safe_load(elsewhere.read_text())["cpu"]
    assert ktc("tune", "--profile", elsewhere, "--no-profile") == 2
    assert "exclude each other" in capsys.readouterr().err
    assert ktc("bench", "emulate", "--profile", "this-machine") == 4
    assert "there is nothing to emulate" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made(own_config: Path) -> None:
    own_config.write_text("a file where the directory should be")
    with pytest.raises(DiskError, match="cannot be created"):
        machine_profile.MachineProfile({}).write()


def test_a_damaged_profile_is_named_whole(own_config: Path) -> None:
    own_config.mkdir()
    path = own_config / "this-machine.yaml"
    path.write_text("version: 1\n")
    with pytest.raises(ProfileError, match=f"{path}:1:1: 'cpu' is missing"):
        load_profile("this-machine")


def test_the_gpus_measurements_run_on_another_device() -> None:
    """Only the code: on the CPU the figures mean nothing."""
    import torch

    from ktc.perf.device_rates import rates

    found = rates(torch.device("cpu"), stream_bytes=32 << 20, link_bytes=1 << 20, matrix=64)
    fields = {
        "version": 1,
        "cpu": {
            "sockets": 1,
            "cores_per_socket": 1,
            "dram_local_gbs": 1,
            "peak_tflops": {"avx512": 1},
            "kernels": {"ktc": {"dram_fraction": 1, "compute_fraction": 1}},
        },
        **found,
        "host": {"submit_us": 1.0, "sync_us": 1.0},
    }
    assert "kernel_us" in machine_profile.MachineProfile(fields).yaml()


def test_callbacks_are_timed_on_a_lane(fake: FakeCuda) -> None:  # noqa: F811
    import torch

    from ktc.perf.device_rates import callback_us
    from ktc.perf.limits import DRAM_HUGE, Sampler, default_cpus

    cpus = default_cpus(1)
    sampler = Sampler(cpus, [DRAM_HUGE], [1], 16 << 20)
    kernels = machine_profile._time_kernels(("int8",), SHAPE, cpus, sampler, 0.0, 1 << 20, lambda _: None)
    submit, sync = callback_us(kernels[0], torch.device("cpu"), 0.0, fake.path)
    assert submit == sync and 0 <= submit < 1e6


def test_show_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "measure_machine", None)
    assert CliRunner().invoke(cli, ["tune", "--show"]).exit_code == 0
