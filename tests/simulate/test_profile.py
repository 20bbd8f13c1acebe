"""Hardware profiles: the shipped ones, and one clear error with file, line and column for a faulty one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ktc.errors import UsageError
from ktc.simulate import ProfileError, load_profile, shipped_profiles
from ktc.simulate.profile import DEFAULT_KERNELS, parse_profile

GPU = """\
version: 1
cpu:
  sockets: 2
  cores_per_socket: 8
  dram_local_gbs: 200
  dram_remote_gbs: 100
  peak_tflops: {avx512: 2, amx_bf16: 20}
  kernels:
    ktc: {dram_fraction: 0.8, compute_fraction: 0.3}
device:
  kind: cuda
  hbm_gbs: 1000
  hbm_fraction: 0.7
  peak_tflops: 100
  compute_fraction: 0.6
  kernel_us: 4
  kernels: {router: 7}
link: {gbs: 20, latency_us: 8}
host: {submit_us: 10, sync_us: 10}
"""
POOL = """\
version: 1
measured: {by: ktc tune, date: 2026-01-01, figures: [1, 2]}
cpu:
  sockets: 1
  cores_per_socket: 2
  dram_local_gbs: 30
  peak_tflops: {avx512: 0.42}
  kernels:
    ktc: {dram_fraction: 0.9, compute_fraction: 0.5}
device: {kind: cpu}
"""


def test_units_and_defaults() -> None:
    h = parse_profile(GPU, "p.yaml", "p")
    assert (h.name, h.file, h.cpu.dram_remote, h.device.peak, h.link.latency) == ("p", "p.yaml", 100e9, 100e12, 8e-6)
    assert h.device.kernels == {**DEFAULT_KERNELS, "router": 7}
    assert h.cpu.peak_for("bf16", 64) == 20e12
    given = parse_profile(GPU.replace("  sockets:", "  job_us: 8\n  start_us: 5\n  sockets:"), "p").cpu
    assert (h.cpu.job, h.cpu.start) == (0, 0) and (given.job, given.start) == pytest.approx((8e-6, 5e-6))
    assert h.cpu.peak_for("bf16", 1) == h.cpu.peak_for("int4", 64) == h.cpu.peak_for("fp32", 64) == 2e12


def test_a_machine_without_a_gpu_needs_no_gpu_fields() -> None:
    """What `ktc tune` writes on such a machine; `measured` holds whatever the tool wants to remember."""
    h = parse_profile(POOL, "p.yaml")
    assert h.device.kind == "cpu" and h.cpu.dram_remote == h.cpu.dram_local == 30e9


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("sockets: 2", "sokets: 2", ":3:3: cpu: unknown key 'sokets'", "did you mean sockets?"),
        ("  dram_local_gbs: 200\n", "", ":3:3: cpu: 'dram_local_gbs' is missing", "docs/simulate.md"),
        ("gbs: 200", "gbs: fast", ":5:19: cpu.dram_local_gbs: 'fast' is not a number above 0", None),
        ("gbs: 200", "gbs: -1", ":5:19: cpu.dram_local_gbs: '-1' is not a number above 0", None),
        ("gbs: 200", "gbs: .nan", ":5:19: cpu.dram_local_gbs: nan is not a finite number", None),
        ("gbs: 200", "gbs:", ":5:18: cpu.dram_local_gbs: nothing is not a number above 0", None),
        (
            "remote_gbs: 100",
            "remote_gbs: 300",
            ":6:20: cpu.dram_remote_gbs: 300 is more than dram_local_gbs 200",
            "exch",
        ),
        ("  dram_remote_gbs: 100\n", "", ":3:3: cpu: 'dram_remote_gbs' is missing, and there are 2 sockets", "another"),
        (
            "dram_fraction: 0.8",
            "dram_fraction: 80",
            ":9:26: cpu.kernels.ktc.dram_fraction: '80' is not a fraction",
            None,
        ),
        ("sockets: 2", "sockets: 1.5", ":3:12: cpu.sockets: '1.5' is not a whole number from 1 to 64", None),
        ("kind: cuda", "kind: tpu", ":11:9: device.kind: 'tpu' is not one of cuda, cpu", None),
        ("  hbm_gbs: 1000\n", "", ":11:3: device: 'hbm_gbs' is missing", "docs/simulate.md"),
        ("kernel_us: 4", "kernel_us: -4", ":16:14: device.kernel_us: '-4' is not a time of 0 or more", None),
        ("{router: 7}", "{rooter: 7}", ":17:13: device.kernels: unknown key 'rooter'", "did you mean router?"),
        ("{router: 7}", "7", ":17:12: device.kernels: '7' is not a mapping", None),
        ("link: {gbs: 20, latency_us: 8}\n", "", "'link' is missing, and the device is a GPU", "docs/simulate.md"),
        ("sockets: 2", "job_us: -1\n  sockets: 2", ":3:11: cpu.job_us: '-1' is not a time of 0 or more", None),
        ("sockets: 2", "job_us: some\n  sockets: 2", ":3:11: cpu.job_us: 'some' is not a time of 0 or more", None),
        ("sockets: 2", "job_us: .nan\n  sockets: 2", ":3:11: cpu.job_us: nan is not a finite number", None),
        ("version: 1", "version: 2", ":1:10: version: '2' is not one of 1", None),
        (
            "  kernels:\n    ktc: {dram_fraction: 0.8, compute_fraction: 0.3}",
            "  kernels: {}",
            "at least one impl",
            None,
        ),
        ("avx512: 2, ", "", ":7:16: cpu.peak_tflops: 'avx512' is missing", None),
        ("cpu:", "cpu: [", "not valid YAML", None),
        ("host:", "link:", ":19:1: key 'link' appears twice", None),
    ],
)
def test_a_faulty_profile(old: str, new: str, message: str, hint: str | None, tmp_path: Path) -> None:
    assert GPU.count(old) >= 1
    path = tmp_path / "machine.yaml"
    path.write_text(GPU.replace(old, new, 1))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert caught.value.message.startswith(str(path)) and message in caught.value.message
    assert "recipe" not in str(caught.value)
    assert hint is None or (caught.value.hint is not None and hint in caught.value.hint)


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("- 1\n", "a list"), ("just words", "just words")])
def test_not_a_profile_at_all(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(message)):
        parse_profile(text, "p.yaml")


def test_gpu_fields_on_a_machine_without_one() -> None:
    with pytest.raises(ProfileError, match=r"p\.yaml:10:21: device: unknown key 'hbm_gbs'"):
        parse_profile(POOL.replace("{kind: cpu}", "{kind: cpu, hbm_gbs: 3}"), "p.yaml")


def test_not_found(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no hardware profile 'h200-spt'") as caught:
        load_profile("h200-spt")
    assert caught.value.hint is not None and caught.value.hint.startswith("did you mean h200-spr?")
    assert "paper-2x8452y-a100" in caught.value.hint
    with pytest.raises(ProfileError, match="is a directory"):
        load_profile(tmp_path)
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"version: 1\xff")
    with pytest.raises(ProfileError, match="bad UTF-8 at byte 10"):
        load_profile(binary)


def test_unknown_kernels() -> None:
    with pytest.raises(UsageError, match=r"p\.yaml: cpu\.kernels has no entry 'fast'") as caught:
        parse_profile(GPU, "p.yaml").kernels("fast")
    assert caught.value.hint == "entries of this profile: ktc"


@pytest.mark.parametrize("name", ["paper-2x8452y-a100", "h200-spr"])
def test_shipped(name: str) -> None:
    assert name in shipped_profiles()
    for spelling in (name, f"{name}.yaml", f"hardware/{name}.yaml", f"recipes/hardware/{name}"):
        assert load_profile(spelling).name == name
