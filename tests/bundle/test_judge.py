"""The verdict: each level for its reason, with the command that mends it, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ktc.bundle import open_bundle, verdict
from ktc.bundle.judge import LEVELS, Verdict
from ktc.host import Host, this_host
from tests.bundle.conftest import edit_manifest


def part(made: Verdict, name: str):
    return next(p for p in made.parts if p.name == name)


@pytest.fixture
def plain() -> Host:
    """This machine's nodes, but a CPU that runs portable kernels only, so that the portable library is the best."""
    return replace(this_host(), features=frozenset({"sse2"}))


def test_optimal_where_it_was_made(with_kernels: Path, plain: Host) -> None:
    made = verdict(open_bundle(with_kernels), host=plain)
    assert made.level == "OPTIMAL", made
    assert all(not p.fix for p in made.parts)


def test_m3_another_node_count_needs_a_repack_unless_emulated(compiled) -> None:
    # failure M3: fewer shards than nodes indexed out of range; the verdict comes before the load.
    bundle = open_bundle(compiled("deepseek_v3", nodes=2, moe_intermediate_size=192, hidden_size=96))
    here = replace(this_host(), nodes=((0,),))
    topology = part(verdict(bundle, host=here), "topology")
    assert topology.level == "NEEDS_REPACK"
    assert topology.reason == "packed for 2 NUMA nodes, this machine has 1"
    assert topology.fix.startswith(f"ktc repack {bundle.path} --nodes 1 -o OUT")
    emulated = part(verdict(bundle, host=here, emulate_nodes=True), "topology")
    assert emulated.level == "RUNS_SLOWER" and "--emulate-nodes" in emulated.reason
    assert "ktc repack" in emulated.fix and "--emulate-nodes" not in emulated.fix  # it is given already
    two = replace(here, nodes=((0,), (1,)))
    assert part(verdict(bundle, host=two), "topology").level == "OPTIMAL"
    four = replace(here, nodes=((0,), (1,), (2,), (3,)))
    assert part(verdict(bundle, host=four), "topology").level == "NEEDS_REPACK"


def test_a_missing_best_variant_is_rebuilt_where_there_is_a_compiler(kernels_copy: Path, another_machine: Path) -> None:
    host = replace(this_host(), compiler="/usr/bin/g++", features=frozenset({"avx2", "fma", "f16c"}))
    kernels = part(verdict(open_bundle(kernels_copy), host=host), "kernels")
    assert kernels.level == "NEEDS_REBUILD" and "it has no avx2 library" in kernels.reason


def test_without_a_compiler_a_trusted_lesser_variant_runs_slower(kernels_copy: Path, another_machine: Path) -> None:
    bundle = open_bundle(kernels_copy)
    digest = bundle.manifest["kernels"][0]["sha256"]
    host = replace(this_host(), compiler=None, features=frozenset({"avx2", "fma", "f16c"}))
    kernels = part(verdict(bundle, host=host, trust_sha256=(digest,)), "kernels")
    assert kernels.level == "RUNS_SLOWER" and "portable kernels; avx2 needs a compiler" in kernels.reason
    assert kernels.fix == "install g++"


def test_a_lesser_library_of_the_bundle_may_be_vouched_for(kernels_copy: Path, another_machine: Path) -> None:
    bundle = open_bundle(kernels_copy)  # it ships the portable library only
    host = replace(this_host(), compiler=None, features=frozenset({"avx2", "fma", "f16c"}))
    kernels = part(verdict(bundle, host=host), "kernels")
    digest = bundle.manifest["kernels"][0]["sha256"]
    assert kernels.level == "UNSUPPORTED"
    assert kernels.fix == f"install g++, or vouch for the portable one in the bundle: --trust-kernel {digest}"


def test_without_trust_and_compiler_it_is_unsupported_and_says_how_to_vouch(
    kernels_copy: Path, another_machine: Path, plain: Host
) -> None:
    bundle = open_bundle(kernels_copy)
    made = verdict(bundle, host=replace(plain, compiler=None))
    assert made.level == "UNSUPPORTED"
    assert bundle.manifest["kernels"][0]["sha256"] in part(made, "kernels").fix


def test_a_cuda_bundle_on_a_machine_without(bundle_copy: Path) -> None:
    edit_manifest(bundle_copy, lambda m: m["device"].update(kind="cuda"))
    bundle, host = open_bundle(bundle_copy), replace(this_host(), cuda=False)
    assert part(verdict(bundle, host=host), "device").level == "UNSUPPORTED"
    assert part(verdict(bundle, host=replace(host, cuda=True)), "device").level == "OPTIMAL"
    # what cannot run here is not offered to be run, built or repacked here
    away = replace(host, compiler="/usr/bin/g++", nodes=((0,), (1,)), features=frozenset({"avx2", "fma", "f16c"}))
    fixes = {p.name: p.fix for p in verdict(bundle, host=away).parts}
    assert fixes["topology"] == fixes["kernels"] == "" and "on a machine with one" in fixes["device"]
    near = {p.name: p.fix for p in verdict(bundle, host=replace(away, cuda=True)).parts}
    assert "builds it once" in near["kernels"] and "ktc repack" in near["topology"]


def test_tiles_of_another_layout_version(bundle_copy: Path) -> None:
    edit_manifest(bundle_copy, lambda m: m["layouts"][0].update(version=2))
    layout = part(verdict(open_bundle(bundle_copy), host=this_host()), "layout")
    assert layout.level == "UNSUPPORTED" and "compile the checkpoint again" in layout.fix


def test_the_worst_part_counts(bundle_copy: Path) -> None:
    edit_manifest(bundle_copy, lambda m: m["layouts"][0].update(version=2))
    made = verdict(open_bundle(bundle_copy), host=replace(this_host(), nodes=((0,), (1,))))
    assert {p.level for p in made.parts} >= {"NEEDS_REPACK", "UNSUPPORTED"} and made.level == "UNSUPPORTED"
    assert set(LEVELS) >= {p.level for p in made.parts}
    assert made.to_json()["level"] == "UNSUPPORTED"
