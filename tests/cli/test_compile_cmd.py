"""`ktc compile`: what it prints, its default name, and its exit codes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ktc.bundle import open_bundle
from ktc.host import this_host
from tests.cli.runner import ktc

Capture = pytest.CaptureFixture[str]


def test_default_name_and_what_is_said(tiny_checkpoint, tmp_path: Path, monkeypatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_checkpoint("deepseek_v3", tokenizer="byte"), tmp_path / "my model")
    capsys.readouterr()  # what transformers says while it writes the checkpoint
    assert ktc("compile", "my model", "-r", "int8.yaml", "--no-kernels") == 0
    out, err = capsys.readouterr()
    name = "my-model-int8.ktc"
    assert out.startswith(f"{name}: ") and "1 MoE layer in int8" in out
    assert "peak memory" in out and "GB/s" in out and " s in all\n" in out
    assert out.splitlines()[-1] == f'next: ktc run {name} -p "Once upon a time"'
    assert err == ""
    assert open_bundle(tmp_path / name).plan.recipe == "int8"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my model", name]
    assert ktc("compile", "my model", "-r", "int8", "--no-kernels") == 2
    assert f"{name} already exists\n  hint: --force" in capsys.readouterr().err


def test_the_default_name_has_the_recipes_name(tiny_checkpoint, tmp_path: Path, monkeypatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).resolve().parents[2] / "recipes" / "int8.yaml").read_text()
    assert "name: int8\n" in text
    (tmp_path / "mine.yaml").write_text(text.replace("name: int8\n", "name: my/best one\n"))
    source = tiny_checkpoint("deepseek_v3")
    assert ktc("compile", source, "-r", "mine.yaml", "--no-kernels", "--no-logits") == 0
    assert (tmp_path / f"{source.name}-my-best-one.ktc").is_dir()
    assert "RECIPE being the recipe's name:" in " ".join(help_of("compile", capsys).split())


def help_of(command: str, capsys: Capture) -> str:
    capsys.readouterr()
    assert ktc(command, "--help") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("here", [False, True])
def test_a_bundle_for_cuda_says_where_it_runs(
    tiny_checkpoint, tmp_path: Path, monkeypatch, capsys: Capture, here: bool
) -> None:
    from ktc.cli import compile_cmd

    host = replace(this_host(), cuda=here)
    monkeypatch.setattr(compile_cmd, "this_host", lambda: host)
    out = tmp_path / "g.ktc"
    assert ktc("compile", tiny_checkpoint("qwen3_moe"), "-r", "int4-cuda", "-o", out, "--no-kernels") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    where = "" if here else " on a machine with a CUDA device, which this one is not"
    assert last == f'next{where}: ktc run {out} -p "Once upon a time"'


@pytest.mark.parametrize(("made", "here"), [(2, 1), (1, 2), (2, 2)])
def test_a_bundle_for_other_nodes_says_where_it_runs(
    tiny_checkpoint, tmp_path: Path, monkeypatch, capsys: Capture, made: int, here: int
) -> None:
    from ktc.cli import compile_cmd

    host = replace(this_host(), nodes=((0,),) * here)
    monkeypatch.setattr(compile_cmd, "this_host", lambda: host)
    source = tiny_checkpoint("deepseek_v3", moe_intermediate_size=192, hidden_size=96)
    out = tmp_path / "x.ktc"
    assert ktc("compile", source, "-o", out, "--no-kernels", "--no-logits", "--nodes", made) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    nodes = f"{made} NUMA node{'s' * (made > 1)}"
    where = f" on a machine with {nodes} (this one has {here}: add --emulate-nodes to try it here, slower)"
    assert last == f'next{where * (made != here)}: ktc run {out} -p "Once upon a time"'


def test_json(tiny_checkpoint, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "x.ktc"
    assert ktc("compile", tiny_checkpoint("deepseek_v3"), "-o", out, "--no-kernels", "--json", "-j", 1) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["bundle"] == str(out) and made["variants"] == [] and made["bytes"] > 0 and not made["resumed"]


def test_every_command_counts_the_same_bytes(tiny_checkpoint, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "x.ktc"
    assert ktc("compile", tiny_checkpoint("deepseek_v3"), "-o", out, "--no-kernels", "--json") == 0
    made = json.loads(capsys.readouterr().out)["bytes"]
    assert ktc("verify", out, "--hashes-only", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == made
    assert ktc("inspect", out, "--json") == 0
    assert sum(json.loads(capsys.readouterr().out)["sizes"].values()) == made


def test_an_uneven_split_is_said(tiny_checkpoint, tmp_path: Path, capsys: Capture) -> None:
    source = tiny_checkpoint("deepseek_v3", tokenizer="byte", moe_intermediate_size=192, hidden_size=96)
    capsys.readouterr()
    assert ktc("compile", source, "-o", tmp_path / "x.ktc", "--no-kernels", "--no-logits", "--nodes", 2) == 0
    assert "ktc: note: experts are split unevenly: 192 columns as 64, 128; a layer waits" in capsys.readouterr().err
    assert ktc("compile", source, "-o", tmp_path / "y.ktc", "--no-kernels", "--no-logits", "--nodes", 3) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kept", [(), ("tokenizer_config.json",), ("tokenizer.json",)])
def test_a_checkpoint_without_a_tokenizer_is_said(
    tiny_checkpoint, tmp_path: Path, capsys: Capture, kept: tuple[str, ...]
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint("deepseek_v3", tokenizer="byte"), tmp_path / "model"))
    for file in (*source.glob("tokenizer*"), *source.glob("special_tokens*")):
        if file.name not in kept:
            file.unlink()
    capsys.readouterr()
    assert ktc("compile", source, "-o", tmp_path / "x.ktc", "--no-kernels", "--no-logits") == 0
    has = "tokenizer.json" in kept
    assert ("note: the checkpoint has no tokenizer (tokenizer.json)" in capsys.readouterr().err) == (not has)
    if not has:
        assert ktc("run", tmp_path / "x.ktc", "-p", "x") == 6
        error = capsys.readouterr().err
        assert "no tokenizer in" in error and "the checkpoint had none" in error


def test_building_kernels_is_said_when_it_begins_and_ends(
    tiny_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Also where no bar is drawn; with everything in the cache there is nothing to say."""
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / "cache"))
    source = tiny_checkpoint("deepseek_v3", tokenizer="byte")
    options = ("--variants", "portable", "--no-logits")
    capsys.readouterr()
    assert ktc("compile", source, "-o", tmp_path / "x.ktc", *options) == 0
    begun, ended = capsys.readouterr().err.splitlines()
    assert begun == "ktc: building kernels: portable (once; this can take minutes)"
    assert ended.startswith("ktc: kernels built in ")
    assert ktc("compile", source, "-o", tmp_path / "y.ktc", *options) == 0
    assert capsys.readouterr().err == ""


def test_other_commands_say_it_too(compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    bundle = compiled("deepseek_v3", tokenizer="byte")
    small = ("bench", "kernels", "--shape", "4x128x128:2", "--tokens", 1, "--format", "int8", "--peers", "none")
    for number, command in enumerate(
        (
            ("run", bundle, "-p", "x", "--max-tokens", 1, "--variant", "portable"),
            ("repack", bundle, "-n", 1, "-o", tmp_path / "1.ktc", "--variants", "portable", "--force"),
            (*small, "--seconds", 0, "--variant", "portable"),
        )
    ):
        monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / f"cache{number}"))
        for built in (True, False):
            capsys.readouterr()
            assert ktc(*command) == 0
            said = capsys.readouterr().err
            assert said.count("ktc: building kernels: portable (once") == built, command
            assert said.count("ktc: kernels built in ") == built, command


def test_a_built_variant_is_in_the_bundle(with_kernels: Path) -> None:
    assert [k["variant"] for k in open_bundle(with_kernels).manifest["kernels"]] == ["portable"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--variants", "sse9"], 2, "no kernel variant 'sse9'; there are amx"),
        (["--variants", ","], 2, "no kernel variant"),
        (["--variants", "amx", "--no-kernels"], 2, "either --variants or --no-kernels"),
        (["--nodes", "0"], 2, "--nodes"),
        (["-r", "int5"], 4, "no recipe file 'int5'"),
        (["--nodes", "4", "--no-kernels"], 2, "cannot be split over 4 nodes"),
    ],
)
def test_what_is_refused_leaves_nothing(tiny_checkpoint, tmp_path: Path, capsys: Capture, options, code, said) -> None:
    assert ktc("compile", tiny_checkpoint("deepseek_v3"), "-o", tmp_path / "x.ktc", *options) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_c8_damaged_checkpoints_are_refused_before_output(tiny_checkpoint, tmp_path: Path, capsys: Capture) -> None:
    # failure C8: a missing, truncated or LFS-pointer shard.
    for damage in ("missing", "truncated", "pointer"):
        source = Path(shutil.copytree(tiny_checkpoint("deepseek_v3", shards=3), tmp_path / damage))
        shard = sorted(source.glob("*.safetensors"))[1]
        if damage == "missing":
            shard.unlink()
        elif damage == "truncated":
            shard.write_bytes(shard.read_bytes()[:-100])
        else:
            shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert ktc("compile", source, "-o", tmp_path / "x.ktc", "--no-kernels") == 3
        assert shard.name in capsys.readouterr().err
        assert not (tmp_path / "x.ktc").exists() and not (tmp_path / "x.ktc.partial").exists()


def test_c3_a_tensor_that_nothing_reads_is_an_error(tiny_checkpoint, tmp_path: Path, capsys: Capture) -> None:
    from safetensors.numpy import save_file

    source = Path(shutil.copytree(tiny_checkpoint("deepseek_v3", dtype="fp32"), tmp_path / "model"))
    from safetensors import safe_open

    file = next(source.glob("*.safetensors"))
    with safe_open(file, "np") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (not a dict)
    tensors["model.layers.1.mlp.tid2eid"] = tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    assert ktc("compile", source, "-o", tmp_path / "x.ktc", "--no-kernels") == 3
    assert "model.layers.1.mlp.tid2eid" in capsys.readouterr().err


def test_a_dense_model_is_refused(tmp_path: Path, capsys: Capture) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    source = tmp_path / "dense"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    save_file({"model.norm.weight": np.ones(4, np.float32)}, source / "model.safetensors")
    assert ktc("compile", source, "-o", tmp_path / "x.ktc") == 5
    assert "dense model" in capsys.readouterr().err
