"""Opening a checkpoint: every file is checked up front, nothing but safetensors is opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ktc.checkpoint import open_checkpoint, read_config
from ktc.errors import CheckpointError
from tests.checkpoint.files import f32, write_checkpoint, write_raw

INDEX = "model.safetensors.index.json"


def sharded(path: Path, weight_map: dict[str, str] | None = None) -> Path:
    """Two shards: a and b in the first, c in the second."""
    write_checkpoint(path, {})
    (path / "model.safetensors").unlink()
    write_raw(path / "one.safetensors", {"a": f32(1), "b": f32(2, 3)})
    write_raw(path / "two.safetensors", {"c": f32(4)})
    weight_map = weight_map or {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_single_file_and_shards_are_the_same(tmp_path: Path) -> None:
    one = open_checkpoint(write_checkpoint(tmp_path / "1", {"a": f32(1), "b": f32(2, 3), "c": f32(4)}))
    many = open_checkpoint(sharded(tmp_path / "2"))
    assert one.names() == many.names() == ["a", "b", "c"]
    assert [f.name for f in many.files] == ["one.safetensors", "two.safetensors"]
    assert many.info("c").file.name == "two.safetensors"
    for name in one.names():
        assert np.array_equal(one.read(name).array, many.read(name).array)
    assert "a" in many and "z" not in many


def test_one_file_of_another_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"a": f32(1)})
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert open_checkpoint(path).names() == ["a"]


def test_c8_missing_shard_is_named(tmp_path: Path) -> None:
    # failure C8: a shard that the index names is missing; refused before any work
    path = sharded(tmp_path)
    (path / "one.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"one\.safetensors is missing: .* holds 'a' and 1 more tensors"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"), (None, "lies at bytes 0 to 4 of the data")],
)
def test_c8_lfs_pointer_or_truncated_shard_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    # failure C8: a shard is an LFS pointer, or was cut short
    file = sharded(tmp_path) / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    with pytest.raises(CheckpointError, match=rf"two\.safetensors.*{message}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "file", ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..\\one.safetensors", "one.bin", 7]
)
def test_index_must_not_name_other_places(tmp_path: Path, file: str) -> None:
    path = sharded(tmp_path / "model", {"a": file})
    write_raw(tmp_path / "one.safetensors", {"a": f32(1)})  # what a traversal would reach
    with pytest.raises(CheckpointError, match=r"'a' is said to be in .* not the name of a safetensors file"):
        open_checkpoint(path)


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'z' is said to be in one\.safetensors, which does not hold it"):
        open_checkpoint(sharded(tmp_path / "1", {"a": "one.safetensors", "z": "one.safetensors"}))
    with pytest.raises(CheckpointError, match=r"'c' is said to be in one\.safetensors but is in two\.safetensors"):
        open_checkpoint(sharded(tmp_path / "2", {"c": "one.safetensors", "a": "two.safetensors"}))
    with pytest.raises(CheckpointError, match="has no weight_map"):
        path = sharded(tmp_path / "3")
        (path / INDEX).write_text("{}")
        open_checkpoint(path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    write_raw(path / "two.safetensors", {"c": f32(4), "b": f32(2, 3)})
    with pytest.raises(CheckpointError, match=r"'b' is in two files: .*one\.safetensors and .*two\.safetensors"):
        open_checkpoint(path)


def test_shards_without_index(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {})
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=f"no {INDEX}"):
        open_checkpoint(path)


def test_pickle_is_never_opened(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {})
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        open_checkpoint(path)
    (path / "pytest.bin").write_bytes(b"cos\nsystem\n(S'touch /nonexistent'\ntR.")
    with pytest.raises(CheckpointError, match=r"no safetensors files, only pytest\.bin") as caught:
        open_checkpoint(path)
    assert "never opens pickle" in str(caught.value)


def test_modelopt_is_refused_by_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"a": f32(1)})
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match=r"modelopt \(NVFP4\)"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ("version https://git-lfs", "is a Git LFS pointer"),
        ('{"routed_scaling_factor": NaN}', "is not valid JSON: NaN is not a JSON number"),
    ],
)
def test_config_faults(tmp_path: Path, content: str, message: str) -> None:
    path = write_checkpoint(tmp_path, {"a": f32(1)})
    (path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"config\.json {message}"):
        open_checkpoint(path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "file").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_checkpoint(tmp_path / "file")


def test_a_bundle_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("manifest.json", "plan.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match="is a bundle, not a checkpoint") as caught:
        open_checkpoint(tmp_path)
    assert "ktc run" in (caught.value.hint or "")


def test_a_pipe_in_place_of_a_shard_is_refused_at_once(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"a": f32(1)})
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a regular file"):
        open_checkpoint(path)


def test_aliases_are_rewritten(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"a": f32(1)}, {"model_type": "kimi_k2"})
    assert open_checkpoint(path).model_type == "deepseek_v3"
    assert read_config(path)["model_type"] == read_config(path / "config.json")["model_type"] == "deepseek_v3"


def test_read_config_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert read_config(tmp_path) == {"model_type": "mixtral"}


def test_side_files(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint("qwen3_moe", tokenizer="chat"), path)
    for name in ("LICENSE", "LICENSE.py", "modeling_evil.py", "README.md"):
        (path / name).write_text("x")
    names = {p.name for p in open_checkpoint(path).side_files}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"} <= names
    assert not {n for n in names if n.endswith((".py", ".safetensors"))} and "README.md" not in names


def test_threads_read_the_same(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("deepseek_v3", fmt="fp8", shards=3))
    names = checkpoint.names()
    expected = {n: checkpoint.read(n).array.tobytes() for n in names}
    wrong: list[str] = []

    def work(order: list[str]) -> None:
        wrong.extend(n for n in order if checkpoint.read(n).array.tobytes() != expected[n])

    threads = [threading.Thread(target=work, args=(names[i:] + names[:i],)) for i in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_reading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import ktc.checkpoint.audit, ktc.models.registry, ktc.models.roles\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
