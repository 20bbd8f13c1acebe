"""`ktc verify`: exit code 0 only if everything matched (failure I7: a verifier that exits 0 on failure)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ktc.bundle import open_bundle
from tests.bundle.conftest import edit_manifest, relist
from tests.cli.runner import ktc

Capture = pytest.CaptureFixture[str]
EXPERTS = "weights/experts/node0/L001.safetensors"


def test_a_good_bundle(with_kernels: Path, capsys: Capture) -> None:
    assert ktc("verify", with_kernels, "--variant", "portable", "-v") == 0
    out = capsys.readouterr().out
    assert "every hash matches" in out and "ok    logits" in out and "2 of 2 goldens match on portable" in out


def test_json_of_a_good_bundle(with_kernels: Path, capsys: Capture) -> None:
    assert ktc("verify", with_kernels, "--variant", "portable", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and len(report["goldens"]) == 2 and report["faults"] == []


def test_hashes_only(compiled, capsys: Capture) -> None:
    assert ktc("verify", compiled("deepseek_v3"), "--hashes-only") == 0
    assert "goldens were not run" in capsys.readouterr().out


def damage_weight(bundle: Path) -> None:
    path = bundle / EXPERTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80
    path.write_bytes(data)


def damage_golden(bundle: Path) -> None:
    ref = open_bundle(bundle).tensors[None, "model.layers.1.mlp.golden.y"]
    data = bytearray(ref.file.read_bytes())
    for at in range(ref.offset, ref.offset + ref.nbytes, 4):
        data[at + 3] ^= 0x80  # the sign of every expected value
    ref.file.write_bytes(data)
    relist(bundle, "goldens.safetensors")


def damage_logits(bundle: Path) -> None:
    ref = open_bundle(bundle).tensors[None, "golden.logits"]
    data = bytearray(ref.file.read_bytes())
    for at in range(ref.offset, ref.offset + ref.nbytes, 4):
        data[at + 3] ^= 0x80
    ref.file.write_bytes(data)
    relist(bundle, "goldens.safetensors")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_weight, "BAD   "),
        (damage_golden, "BAD   model.layers.1.mlp: relative error"),
        (damage_logits, "BAD   logits: relative error"),
    ],
)
def test_i7_every_mismatch_is_a_nonzero_exit(kernels_copy: Path, capsys: Capture, damage, said: str, as_json) -> None:
    damage(kernels_copy)
    assert ktc("verify", kernels_copy, "--variant", "portable", *(["--json"] if as_json else [])) == 6
    out, err = capsys.readouterr()
    if as_json:
        assert json.loads(out)["ok"] is False
    else:
        assert said in out and "mismatch" in err


def damage_much(bundle: Path) -> None:
    damage_weight(bundle)
    (bundle / "plan.json").unlink()
    device = bundle / "weights/device/D000.safetensors"
    device.write_bytes(device.read_bytes()[:-1])
    (bundle / "extra").write_text("x")


def test_every_bad_file_is_listed(kernels_copy: Path, capsys: Capture) -> None:
    damage_much(kernels_copy)
    expected = ["extra is not listed", "plan.json is missing", "D000.safetensors: ", f"{EXPERTS}: sha256"]
    assert ktc("verify", kernels_copy) == 6
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == len(expected) and all(line.startswith("BAD   ") for line in lines)
    assert all(any(said in line for line in lines) for said in expected)
    assert "4 mismatches" in err
    assert ktc("verify", kernels_copy, "--json") == 6
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["ok"] is False and len(report["faults"]) == 4 and report["goldens"] == []
    assert "4 mismatches" in err


def test_a_linked_folder_is_one_fault(kernels_copy: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.move(kernels_copy / "weights", tmp_path / "weights")
    (kernels_copy / "weights").symlink_to(tmp_path / "weights")
    assert ktc("verify", kernels_copy, "--json") == 6
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert "is a symbolic link" in fault


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: (b / "manifest.json").write_text("{"),
        lambda b: (b / "manifest.json").unlink(),
        lambda b: edit_manifest(b, lambda m: m["files"].append(m["files"][0])),
        lambda b: edit_manifest(b, lambda m: m["tensors"].clear()),
    ],
)
def test_json_of_what_cannot_be_opened(kernels_copy: Path, capsys: Capture, damage) -> None:
    damage(kernels_copy)
    assert ktc("verify", kernels_copy, "--json") == 6
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["ok"] is False and len(report["faults"]) == 1 and report["faults"][0] in err


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: (b / "plan.json").unlink(),
        lambda b: (b / "extra").write_text("x"),
        lambda b: (b / "manifest.json").write_text("{}"),
        lambda b: edit_manifest(b, lambda m: m["format"].update(major=2)),
        lambda b: edit_manifest(b, lambda m: m["files"][0].update(path="../../etc/passwd")),
    ],
)
def test_i7_a_bundle_that_does_not_open_is_a_nonzero_exit(kernels_copy: Path, capsys: Capture, damage) -> None:
    damage(kernels_copy)
    for command in ("verify", "inspect"):
        assert ktc(command, kernels_copy) == 6
        assert capsys.readouterr().err.startswith("ktc: error: ")


def test_i7_no_kernel_to_run_the_goldens_is_a_nonzero_exit(
    kernels_copy: Path, another_machine, capsys: Capture
) -> None:
    assert ktc("verify", kernels_copy) == 7
    out, err = capsys.readouterr()
    assert "--trust-kernel" in err and "every hash matches" in out
    assert ktc("verify", kernels_copy, "--json") == 7
    assert json.loads(capsys.readouterr().out)["ok"] is False
    digest = open_bundle(kernels_copy).manifest["kernels"][0]["sha256"]
    assert ktc("verify", kernels_copy, "--trust-kernel", digest) == 0
