"""Goldens and `verify`: a good bundle passes on every variant, a damaged one never does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ktc.bundle import open_bundle
from ktc.bundle.goldens import golden_fault, golden_input, make_moe_golden, read_moe_goldens, relative_error, uniform
from ktc.bundle.verify import verify
from ktc.errors import BundleError
from tests.bundle.conftest import edit_manifest, relist

EXPERTS = "weights/experts/node0/L001.safetensors"


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)


def test_a_good_bundle_passes(with_kernels: Path) -> None:
    bundle = open_bundle(with_kernels)
    report = verify(with_kernels, variant="portable")
    assert report.ok and not report.faults
    assert report.files == len(bundle.files) and report.nbytes == bundle.nbytes()
    assert [c.name for c in report.cases] == ["model.layers.1.mlp", "logits"]
    assert report.cases[0].error < 1e-5 and report.variant == "portable"


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["int4", "int8", "bf16", "fp32"])
def test_the_numpy_reference_and_the_kernels_agree(compiled, family: str, recipe: str) -> None:
    """Two independent implementations over the same packed bytes; biases and clamps included (failure R7)."""
    report = verify(compiled(family, recipe), variant="portable")
    assert report.ok and report.cases, report


@pytest.mark.parametrize("nodes", [2, 3])
def test_goldens_hold_for_every_node_count(compiled, nodes: int) -> None:
    shape = {"moe_intermediate_size": 192, "hidden_size": 96}
    report = verify(compiled("deepseek_v3", nodes=nodes, **shape), variant="portable")
    assert report.ok and report.cases


@pytest.mark.parametrize("where", [5000, -1])
@pytest.mark.parametrize("name", [EXPERTS, "weights/device/D000.safetensors", "goldens.safetensors"])
def test_a_flipped_bit_in_a_weight_is_found_by_its_hash(bundle_copy: Path, name: str, where: int) -> None:
    flip(bundle_copy / name, where)
    report = verify(bundle_copy)  # opening does not hash weights
    assert not report.ok and len(report.faults) == 1 and name in report.faults[0]
    assert not report.cases  # kernels do not run over bytes that are known to be wrong


def test_a_wrong_weight_with_the_right_hash_is_found_by_the_goldens(bundle_copy: Path) -> None:
    bundle = open_bundle(bundle_copy)
    ref = bundle.tensors[0, "model.layers.1.mlp.experts.0-7.down.tiles"]
    for step in range(0, ref.nbytes, 64):
        flip(bundle_copy / EXPERTS, ref.offset + step)
    relist(bundle_copy, EXPERTS)
    report = verify(bundle_copy, variant="portable")
    assert not report.faults and not report.ok
    assert not report.cases[0].ok and report.cases[0].error > 0.01


def test_a_manifest_that_places_tensors_elsewhere_than_the_shard(bundle_copy: Path) -> None:
    def swap(value: dict) -> None:
        scales = [t for t in value["tensors"] if t["name"].endswith("mlp.gate_proj.scale")]
        ups = [
            t
            for t in value["tensors"]
            if t["name"].endswith("mlp.up_proj.scale") and t["nbytes"] == scales[0]["nbytes"]
        ]
        scales[0]["offset"], ups[0]["offset"] = ups[0]["offset"], scales[0]["offset"]

    edit_manifest(bundle_copy, swap)
    report = verify(bundle_copy, goldens=False)
    assert any("is not where or what the manifest says" in fault for fault in report.faults)


def test_a_shard_that_is_no_safetensors_file(bundle_copy: Path) -> None:
    path = bundle_copy / EXPERTS
    path.write_bytes(b"\xff" * path.stat().st_size)
    relist(bundle_copy, EXPERTS)
    assert any("not a safetensors file" in fault for fault in verify(bundle_copy).faults)


@pytest.mark.parametrize("header", [b"5", b"null", b'"x"', b"[]", b"[" * 100_000])
def test_a_shard_whose_header_is_json_but_no_header(bundle_copy: Path, header: bytes) -> None:
    path = bundle_copy / EXPERTS
    old = path.read_bytes()
    size = int.from_bytes(old[:8], "little")
    new = header.ljust(max(size, len(header)))
    path.write_bytes(len(new).to_bytes(8, "little") + new + old[8 + size :])
    relist(bundle_copy, EXPERTS)
    (fault,) = verify(bundle_copy).faults
    assert f"{EXPERTS}: not a safetensors file" in fault


@pytest.mark.parametrize("expert", [-1, 8, 10**6])
def test_goldens_with_an_expert_that_the_layer_does_not_have(bundle_copy: Path, expert: int) -> None:
    ref = open_bundle(bundle_copy).tensors[None, "model.layers.1.mlp.golden.ids"]
    data = bytearray((bundle_copy / "goldens.safetensors").read_bytes())
    data[ref.offset : ref.offset + 8] = expert.to_bytes(8, "little", signed=True)
    (bundle_copy / "goldens.safetensors").write_bytes(data)
    relist(bundle_copy, "goldens.safetensors")
    report = verify(bundle_copy, variant="portable")
    assert report.faults == ["goldens of model.layers.1.mlp: an expert is not one of the layer's 8"]


def test_goldens_that_do_not_fit_their_layer_are_not_run(compiled) -> None:
    bundle = open_bundle(compiled("deepseek_v3"))
    (case,) = read_moe_goldens(bundle)
    moe = bundle.plan.moe_modules()[0].moe
    assert moe is not None and golden_fault(case, moe) is None
    for change in (
        {"x": case.x[:, :-1]},
        {"y": case.y[:1]},
        {"x": case.x.astype(np.float64)},
        {"ids": case.ids.astype(np.float32)},
        {"ids": case.ids[0]},
        {"weights": case.weights[:, :1]},
        {"x": case.x[:0], "y": case.y[:0], "ids": case.ids[:0], "weights": case.weights[:0]},
    ):
        fault = golden_fault(replace(case, **change), moe)
        assert fault is not None and "does not fit the layer" in fault, change
    assert golden_fault(replace(case, ids=np.zeros_like(case.ids)), moe) == "a token has an expert twice"


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root reads everything")
def test_a_folder_that_cannot_be_read_hides_no_other_fault(bundle_copy: Path) -> None:
    prefix = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    (bundle_copy / "recipe.yaml").write_text("x")
    weights = bundle_copy / "weights"
    for mode in (0, 0o444):  # not listed at all; names without what they are
        weights.chmod(mode)
        try:
            done = subprocess.run(
                [*prefix, sys.executable, "-m", "ktc", "verify", "--json", str(bundle_copy)],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            weights.chmod(0o755)
        faults = json.loads(done.stdout)["faults"]
        assert done.returncode == 6
        assert any(f"cannot read {bundle_copy.resolve()}/weights" in fault for fault in faults)
        assert any("recipe.yaml: 1 bytes, but" in fault for fault in faults)
        assert not any("is missing" in fault for fault in faults)


def test_goldens_that_are_not_there(bundle_copy: Path) -> None:
    edit_manifest(bundle_copy, lambda m: m["goldens"].update(logits={"tolerance": 0.02}))
    found = verify(bundle_copy, variant="portable").faults
    assert found == ["goldens: the logits that the manifest names are not there"]
    edit_manifest(bundle_copy, lambda m: m["goldens"]["moe"][0].update(module="model.layers.9.mlp"))
    with pytest.raises(BundleError, match=r"goldens of model\.layers\.9\.mlp: no tensor"):
        verify(bundle_copy, variant="portable")


def test_every_fault_is_reported_at_once(bundle_copy: Path) -> None:
    flip(bundle_copy / EXPERTS, -1)
    flip(bundle_copy / "weights/device/D000.safetensors", -1)
    assert len(verify(bundle_copy).faults) == 2


def test_q5_goldens_are_the_same_every_time(compiled) -> None:
    # failure Q5: results differed from run to run.
    bundle = open_bundle(compiled("deepseek_v3"))
    (stored,) = read_moe_goldens(bundle)
    moe = bundle.plan.moe_modules()[0].moe
    assert moe is not None
    again = make_moe_golden(bundle.tensors, stored.module, moe)
    for name in ("x", "ids", "weights", "y"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(again, name))
    assert json.dumps(uniform(3, "seed").tolist()) == "[0.5673796977159338, -0.7864101882502805, 0.27216216637358315]"


def test_golden_inputs_touch_the_first_and_the_last_expert(compiled) -> None:
    moe = open_bundle(compiled("deepseek_v3")).plan.moe_modules()[0].moe
    assert moe is not None
    x, ids, weights = golden_input("m", moe)
    assert {0, moe.experts - 1} <= set(ids.ravel().tolist())
    assert x.dtype == weights.dtype == np.float32 and x.shape[1] == moe.hidden
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def test_relative_error() -> None:
    a = np.array([3.0, 4.0])
    assert relative_error(a, a) == 0
    assert relative_error(np.array([3.0, 4.5]), a) == pytest.approx(0.1)
    assert relative_error(np.array([3.0, np.nan]), a) == float("inf")
    assert relative_error(np.array([3.0, np.nan]), np.array([3.0, np.nan])) == 0
    assert relative_error(np.array([1e-3]), np.zeros(1)) == 1e-3
