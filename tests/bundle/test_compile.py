"""`ktc compile` end to end on tiny checkpoints: what comes out, and that nothing comes out when it must not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from ktc.bundle.goldens import read_expert, read_moe_goldens
from ktc.bundle.reader import open_bundle
from ktc.bundle.reference import stored_values, weight_scales
from ktc.compile import compile_checkpoint
from ktc.errors import BuildError, BundleError, CheckpointError, DiskError, KtcError, UsageError
from tests.bundle.conftest import tree
from tests.tiny import twin_of

FAMILIES = ["deepseek_v3", "gpt_oss", "qwen3_moe", "granitemoe"]


@pytest.mark.parametrize("recipe", ["int4", "int8", "bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_becomes_a_bundle(compiled, family: str, recipe: str) -> None:
    bundle = open_bundle(compiled(family, recipe))
    assert bundle.manifest["model"]["model_type"] == family
    for name in bundle.files:
        if name.endswith(".safetensors"):
            with safe_open(bundle.path / name, "np") as shard:  # every reader can read every shard
                pads = [n for n in shard.keys() if n.startswith("__pad__")]  # noqa: SIM118 (not a dict)
                assert all(shard.get_slice(n).get_dtype() == "U8" for n in pads)
    for module in bundle.plan.modules:
        for param in module.params:
            name = f"{module.name}.{param}" if module.name else param
            assert (None, name) in bundle.tensors
        if module.linear is not None:
            assert (None, f"{module.name}.tiles") in bundle.tensors
    assert len(read_moe_goldens(bundle)) == len(bundle.plan.moe_modules())


def test_packed_weights_are_the_checkpoints_weights(compiled, tiny_checkpoint) -> None:
    """Dequantised tiles against the tensors on disk, read by safetensors itself."""
    checkpoint = tiny_checkpoint("deepseek_v3", dtype="fp32")
    bundle = open_bundle(compiled("deepseek_v3", "int8", dtype="fp32"))
    (module,) = bundle.plan.moe_modules()
    moe = module.moe
    assert moe is not None
    with safe_open(next(checkpoint.glob("*.safetensors")), "np") as shard:
        for e in (0, 5, moe.experts - 1):
            expert = read_expert(bundle.tensors, module.name, moe, e)
            for matrix, names in ((expert.gate_up, ("gate", "up")), (expert.down, ("down",))):
                layout = matrix.layout
                factors = np.repeat(weight_scales(matrix), moe.group or layout.k_pad, axis=1)[:, : layout.k_pad]
                dense = stored_values(matrix, 0, layout.blocks) * factors
                for i, name in enumerate(names):
                    original = shard.get_tensor(f"{module.name}.experts.{e}.{name}_proj.weight")
                    rows = (
                        dense.reshape(-1, 2, 16, layout.k_pad)[:, i].reshape(-1, layout.k_pad)
                        if len(names) > 1
                        else dense
                    )
                    n, k = original.shape
                    error = np.linalg.norm(rows[:n, :k] - original) / np.linalg.norm(original)
                    assert error < 0.02, (e, name, error)
                    assert not rows[n:].any() and not rows[:, k:].any()


@pytest.mark.parametrize(
    ("family", "fmt"), [("deepseek_v3", "fp8"), ("deepseek_v3", "int4"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8")]
)
@pytest.mark.parametrize("recipe", ["int4", "bf16"])
def test_packed_bytes_are_those_of_the_dequantised_twin(tiny_checkpoint, tmp_path: Path, family, fmt, recipe) -> None:
    """Failures C1, C4, C6: any input format gives the bytes that its exact fp32 form gives."""
    checkpoint = tiny_checkpoint(family, fmt=fmt)
    made = {}
    for name, path in (("packed", checkpoint), ("twin", twin_of(checkpoint))):
        compile_checkpoint(path, recipe, tmp_path / name, variants=())
        made[name] = open_bundle(tmp_path / name)
    experts = [{p: e["sha256"] for p, e in b.files.items() if e["role"] == "experts"} for b in made.values()]
    assert experts[0] == experts[1] and experts[0]
    compared = 0
    for (node, name), ref in made["packed"].tensors.items():
        if node is None and name.endswith((".tiles", ".scale", ".mult")):
            np.testing.assert_array_equal(ref.array(), made["twin"].tensors[node, name].array())
            compared += 1
    assert compared


@pytest.mark.parametrize("options", [{"fmt": "fused"}, {"shards": 3}])
def test_the_way_tensors_lie_on_disk_does_not_matter(compiled, options: dict) -> None:
    # failure C6: fused [E, 2I, H] against per-expert names.
    bundles = [open_bundle(compiled("deepseek_v3")), open_bundle(compiled("deepseek_v3", **options))]
    packed = [{p: e["sha256"] for p, e in b.files.items() if p.startswith("weights/")} for b in bundles]
    assert packed[0] == packed[1]


def test_s10_gate_and_up_of_different_types_are_widened_exactly(compiled, tiny_checkpoint, tmp_path: Path) -> None:
    # failure S10: gate and up of different data types in one fused operator. Both go through exact fp32.
    from safetensors.torch import load_file, save_file

    source = Path(shutil.copytree(tiny_checkpoint("deepseek_v3"), tmp_path / "mixed"))
    file = next(source.glob("*.safetensors"))
    tensors = {n: t.float() if "up_proj" in n and "experts." in n else t for n, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    made = open_bundle(compile_checkpoint(source, "int4", tmp_path / "x.ktc", variants=()).path)
    packed = [
        {p: e["sha256"] for p, e in b.files.items() if e["role"] == "experts"}
        for b in (made, open_bundle(compiled("deepseek_v3")))
    ]
    assert packed[0] == packed[1] and packed[0]


def test_without_a_compiler_the_way_out_is_named(tiny_checkpoint, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    with pytest.raises(BuildError) as error:
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "x.ktc")
    assert "--no-kernels" in (error.value.hint or "")
    assert list(tmp_path.iterdir()) == []  # kernels come before packing: nothing was lost


def test_nodes_change_the_split_and_nothing_else(compiled) -> None:
    """Failure M3 starts here: the manifest says how many nodes there are, and every node has every expert."""
    big = {"moe_intermediate_size": 192, "hidden_size": 96}
    bundles = {n: open_bundle(compiled("deepseek_v3", nodes=n, **big)) for n in (1, 2, 3)}
    for nodes, bundle in bundles.items():
        assert bundle.nodes == nodes
        assert {int(p.split("node")[1].split("/")[0]) for p in bundle.files if "/experts/" in p} == set(range(nodes))
        for module in bundle.plan.moe_modules():
            base = next(m for m in bundles[1].plan.moe_modules() if m.name == module.name)
            assert module.moe is not None and base.moe is not None
            for e in range(module.moe.experts):
                a = read_expert(bundle.tensors, module.name, module.moe, e)
                b = read_expert(bundles[1].tensors, base.name, base.moe, e)
                for x, y in ((a.gate_up, b.gate_up), (a.down, b.down)):
                    np.testing.assert_array_equal(x.tiles, y.tiles)
                    np.testing.assert_array_equal(x.scale, y.scale)
                    np.testing.assert_array_equal(x.mult, y.mult)
        device = {p: e["sha256"] for p, e in bundle.files.items() if e["role"] == "device"}
        assert device == {p: e["sha256"] for p, e in bundles[1].files.items() if e["role"] == "device"}
        golden, first = read_moe_goldens(bundle), read_moe_goldens(bundles[1])
        assert all(np.array_equal(a.y, b.y) for a, b in zip(golden, first, strict=True))


def test_a_node_count_that_cannot_be_is_refused_before_output(tiny_checkpoint, tmp_path: Path) -> None:
    # failure S4: an intermediate size that cannot be split so far.
    with pytest.raises(UsageError, match="cannot be split over 4 nodes"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "x.ktc", nodes=4, variants=())
    assert list(tmp_path.iterdir()) == []


def test_the_same_input_gives_the_same_bundle(compiled, tiny_checkpoint, tmp_path: Path) -> None:
    made = compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "again", variants=(), jobs=1)
    assert tree(made.path) == tree(compiled("deepseek_v3"))


def test_q6_bytes_do_not_depend_on_the_isa(compiled, tiny_checkpoint, tmp_path: Path) -> None:
    # failure Q6: quantised bytes differed between compile hosts. Here numpy, OpenBLAS and libm are held
    # to the oldest x86-64 code they have; the native packer is built without ISA flags anyway.
    env = {
        **os.environ,
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3",
        "OPENBLAS_CORETYPE": "PRESCOTT",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-FMA,-AVX",
        "ATEN_CPU_CAPABILITY": "default",
    }
    for key in ("NPY_DISABLE_CPU_FEATURES",):  # names differ between numpy versions: keep those it accepts
        probe = subprocess.run([sys.executable, "-c", "import numpy"], env=env, capture_output=True, text=True)
        if probe.returncode:
            env[key] = "AVX512F AVX2"
    command = [sys.executable, "-m", "ktc", "compile", str(tiny_checkpoint("deepseek_v3")), "-r", "int4"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "x.ktc"), "--no-kernels"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    here = {k: v for k, v in tree(compiled("deepseek_v3")).items() if k.startswith("weights/")}
    assert {k: v for k, v in tree(tmp_path / "x.ktc").items() if k.startswith("weights/")} == here


def test_c10_memory_is_bounded_by_a_few_experts(tiny_checkpoint, tmp_path: Path) -> None:
    # failures C10, M1: a conversion was killed for memory. 16 experts x 5 layers of 384 KiB each.
    checkpoint = tiny_checkpoint(
        "deepseek_v3", num_hidden_layers=6, hidden_size=256, moe_intermediate_size=256, n_routed_experts=16
    )
    compile_checkpoint(checkpoint, "int4", tmp_path / "warm", variants=(), jobs=2)  # imports are not what is measured
    tracemalloc.start()
    try:
        compile_checkpoint(checkpoint, "int4", tmp_path / "x.ktc", variants=(), jobs=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expert = 3 * 256 * 256 * 2
    size = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    assert size > 70 * expert
    assert peak < 16 * expert + (4 << 20), f"{peak / 1e6:.1f} MB"


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight",
                                    "model.layers.0.self_attn.o_proj.weight"])  # fmt: skip
def test_q3_nan_in_the_checkpoint(tiny_checkpoint, tmp_path: Path, tensor: str) -> None:
    # failure Q3: refused with tensor and index; packed only on request.
    checkpoint = damage(tiny_checkpoint("deepseek_v3"), tmp_path / "bad", tensor, 0x7FC0)
    with pytest.raises(CheckpointError, match=rf"{tensor}: NaN or infinity at \[") as error:
        compile_checkpoint(checkpoint, "int4", tmp_path / "x.ktc", variants=(), jobs=1)
    assert "--allow-nonfinite" in (error.value.hint or "")
    assert not (tmp_path / "x.ktc").exists()
    if (tmp_path / "x.ktc.partial").exists():  # only finished, whole shards are kept for the next run
        assert not (tmp_path / "x.ktc.partial/bundle/manifest.json").exists()
    made = compile_checkpoint(
        checkpoint, "int4", tmp_path / "x.ktc", variants=(), allow_nonfinite=True
    )  # the same command, continued
    open_bundle(made.path)
    assert not (tmp_path / "x.ktc.partial").exists()


def damage(checkpoint: Path, copy: Path, tensor: str, bits: int) -> Path:
    """A copy of a bf16 checkpoint with one element of a tensor replaced."""
    shutil.copytree(checkpoint, copy)
    for file in copy.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        entry = json.loads(raw[8 : 8 + length]).get(tensor)
        if entry:
            assert entry["dtype"] == "BF16"
            where = 8 + length + entry["data_offsets"][0] + 2 * 7
            raw[where : where + 2] = bits.to_bytes(2, "little")
            file.write_bytes(raw)
            return copy
    raise AssertionError(tensor)


def test_c9_a_finished_bundle_is_replaced_only_on_request_and_at_once(
    compiled, tiny_checkpoint, tmp_path: Path
) -> None:
    # failure C9: what is at the output is either the old bundle, whole, or the new one.
    out = Path(shutil.copytree(compiled("deepseek_v3"), tmp_path / "x.ktc"))
    before = tree(out)
    with pytest.raises(UsageError, match=r"x\.ktc already exists") as error:
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int8", out, variants=())
    assert "--force" in (error.value.hint or "")
    assert tree(out) == before and [p.name for p in tmp_path.iterdir()] == ["x.ktc"]
    compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int8", out, variants=(), force=True)
    assert tree(out) == tree(compiled("deepseek_v3", "int8"))
    assert [p.name for p in tmp_path.iterdir()] == ["x.ktc"]


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_what_is_no_bundle_is_never_replaced(tiny_checkpoint, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "precious"
    if kind == "file":
        out.write_text("data")
    elif kind == "folder":
        out.mkdir()
        (out / "thesis.tex").write_text("data")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists and is not a bundle"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", out, variants=(), force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_a_manifest_of_something_else_makes_no_bundle(tiny_checkpoint, tmp_path: Path) -> None:
    # A web project has a manifest.json too: --force must not delete it.
    out = tmp_path / "extension"
    out.mkdir()
    (out / "manifest.json").write_text('{"manifest_version": 3}')
    with pytest.raises(UsageError, match="exists and is not a bundle"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", out, variants=(), force=True)
    assert [p.name for p in out.iterdir()] == ["manifest.json"]


def test_no_output_inside_a_bundle_or_below_a_file(compiled, tiny_checkpoint, tmp_path: Path) -> None:
    out = Path(shutil.copytree(compiled("deepseek_v3"), tmp_path / "x.ktc"))
    before = tree(out)
    with pytest.raises(UsageError, match=r"would lie inside the bundle .*x\.ktc"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", out / "deep" / "y.ktc", variants=())
    assert tree(out) == before
    (tmp_path / "file").write_text("data")
    with pytest.raises(DiskError, match="file is not a directory"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "file" / "y.ktc", variants=())
    with pytest.raises(DiskError, match="File name too long"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / ("y" * 300), variants=())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "x.ktc"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("tokenizer.json", '{"added_tokens": [', "is not what it should be"),
        ("tokenizer_config.json", "[]", "holds a JSON list, not an object"),
        ("generation_config.json", "", "is not what it should be"),
    ],
)
def test_a_damaged_side_file_is_found_before_packing(
    tiny_checkpoint, tmp_path: Path, name: str, content: str, message: str
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint("deepseek_v3", tokenizer="byte"), tmp_path / "model"))
    (source / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        compile_checkpoint(source, "int4", tmp_path / "x.ktc", variants=())
    assert str(source / name) in error.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_c11_disk_full_in_the_middle_then_continued(compiled, tiny_checkpoint, tmp_path: Path, monkeypatch) -> None:
    # failure C11: the disk is full half way: a clear error, no bundle, and nothing lost.
    real, left = os.pwrite, 120_000

    def pwrite(fd: int, data, offset: int) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(DiskError, match="No space left on device") as error:
            compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "x.ktc", variants=(), jobs=1)
    assert "same command" in (error.value.hint or "")
    assert [p.name for p in tmp_path.iterdir()] == ["x.ktc.partial"]
    with pytest.raises(BundleError, match="is not a bundle"):
        open_bundle(tmp_path / "x.ktc.partial")
    with pytest.raises(BundleError, match="is not a bundle"):
        open_bundle(tmp_path / "x.ktc.partial" / "bundle")
    made = compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "x.ktc", variants=())
    assert made.resumed and tree(made.path) == tree(compiled("deepseek_v3"))


def test_c11_a_real_full_file_system(tiny_checkpoint, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        with pytest.raises(DiskError):
            compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", disk / "x.ktc", variants=())
        assert list(disk.iterdir()) == []  # found before the first byte
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_too_full_a_disk_is_found_before_kernels_are_built(tiny_checkpoint, tmp_path: Path, monkeypatch) -> None:
    built: list[object] = []
    monkeypatch.setattr("ktc.bundle.kernels.build_kernels", lambda *a: built.append(a))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 10))
    with pytest.raises(DiskError, match=r"the bundle needs .* more on the disk"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "x.ktc")
    assert not built and list(tmp_path.iterdir()) == []


def test_another_recipe_does_not_continue_the_work_of_this_one(tiny_checkpoint, tmp_path: Path, monkeypatch) -> None:
    from ktc import compile as passes

    def stop(*_: object, **__: object) -> None:
        raise KtcError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(passes, "finish_bundle", stop)
        with pytest.raises(KtcError, match="stopped"):
            compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "x.ktc", variants=())
    with pytest.raises(UsageError, match="unfinished compile with another plan and recipe"):
        compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int8", tmp_path / "x.ktc", variants=())
    said: list[str] = []
    made = compile_checkpoint(
        tiny_checkpoint("deepseek_v3"), "int8", tmp_path / "x.ktc", variants=(), force=True, say=said.append
    )
    assert any("discarding" in line for line in said) and not made.resumed


def test_nothing_executable_and_no_foreign_config_travels(tiny_checkpoint, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_checkpoint("deepseek_v3", tokenizer="byte"), tmp_path / "model"))
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_evil.Evil"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "LICENSE").write_text("MIT")
    (source / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\nhello\n")
    bundle = open_bundle(compile_checkpoint(source, "int4", tmp_path / "x.ktc", variants=()).path)
    assert not [name for name in bundle.files if name.endswith(".py")]
    assert "auto_map" not in json.loads(bundle.read("model/config.json"))
    assert bundle.read("LICENSES/LICENSE") == b"MIT"
    assert bundle.manifest["source"]["licence"] == "mit"
    assert "model/tokenizer.json" in bundle.files


def test_an_unmatched_block_keeps_its_experts_as_hugging_face_has_them(tiny_checkpoint, tmp_path: Path) -> None:
    recipe = tmp_path / "one.yaml"
    recipe.write_text(
        "rules:\n"
        "  - match: {name: '^model\\.layers\\.1\\.mlp$'}\n"
        "    replace: {class: ktc.FusedMoE, kwargs: {data_type: Int8, group: channel}}\n"
    )
    checkpoint = tiny_checkpoint("qwen3_moe", dtype="fp32")
    bundle = open_bundle(compile_checkpoint(checkpoint, recipe, tmp_path / "x.ktc", variants=()).path)
    with safe_open(next(checkpoint.glob("*.safetensors")), "np") as shard:
        parts = [shard.get_tensor(f"model.layers.0.mlp.experts.2.{n}_proj.weight") for n in ("gate", "up", "down")]
    gate_up = bundle.tensors[None, "model.layers.0.mlp.experts.gate_up_proj"].array()
    np.testing.assert_array_equal(gate_up[2], np.concatenate(parts[:2]))
    np.testing.assert_array_equal(bundle.tensors[None, "model.layers.0.mlp.experts.down_proj"].array()[2], parts[2])
