"""The shard writer: what it writes is safetensors, aligned, whole or not there at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ktc.errors import DiskError
from ktc.pack.writer import DATA_ALIGN, TENSOR_ALIGN, ShardLayout, ShardWriter, TensorSpec, hash_file, write_atomic

DTYPES = {"U8": np.uint8, "F32": np.float32, "F16": np.float16, "I64": np.int64}


def header_of(path: Path) -> tuple[int, dict[str, object]]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return 8 + length, json.loads(raw[8 : 8 + length])


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 7), max_size=3)), min_size=1, max_size=6
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_through_safetensors(tmp_path_factory: pytest.TempPathFactory, shapes, seed) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    rng = np.random.default_rng(seed)
    specs = [TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(shapes)]
    values = {s.name: rng.integers(0, 100, s.shape).astype(DTYPES[s.dtype]) for s in specs}
    layout = ShardLayout(specs, {"format": "ktc"})
    writer = ShardWriter(path, layout)
    for spec in reversed(specs):  # any order of tensors, and of rows
        value = values[spec.name]
        if spec.shape:
            for row in rng.permutation(spec.shape[0]):
                writer.write(spec.name, np.ascontiguousarray(value[row]), int(row))
        else:
            writer.write(spec.name, value)
    digest = writer.finish()
    assert digest.size == layout.size == path.stat().st_size
    assert digest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with safe_open(path, "np") as shard:
        assert shard.metadata() == {"format": "ktc"}
        for name, value in values.items():
            np.testing.assert_array_equal(shard.get_tensor(name), value)
    for name, offset in layout.offsets.items():
        assert offset % TENSOR_ALIGN == 0, name
    data, header = header_of(path)
    assert data % DATA_ALIGN == 0
    assert set(header) - {"__metadata__"} == {s.name for s in specs} | {n for n in header if n.startswith("__pad__.")}


def test_gaps_are_tensors_and_the_file_is_a_function_of_its_contents(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "U8", (5,)), TensorSpec("b", "F32", (3,)), TensorSpec("c", "U8", (1,))]
    written = []
    for name in ("x", "y"):
        writer = ShardWriter(tmp_path / name, ShardLayout(specs))
        writer.write("b", np.ones(3, np.float32))
        writer.write("a", np.arange(5, dtype=np.uint8))
        writer.write("c", b"\7")
        writer.finish()
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    _, header = header_of(tmp_path / "x")
    assert header["__pad__.0"] == {"dtype": "U8", "shape": [59], "data_offsets": [5, 64]}
    assert header["__pad__.1"] == {"dtype": "U8", "shape": [52], "data_offsets": [76, 128]}


def test_c9_a_shard_with_a_row_missing_is_never_given_its_name(tmp_path: Path) -> None:
    # failure C9: a truncated file was written and success reported.
    writer = ShardWriter(tmp_path / "a.safetensors", ShardLayout([TensorSpec("t", "U8", (4, 8))]))
    for row in range(3):
        writer.write("t", bytes(8), row)
    with pytest.raises(ValueError, match="8 bytes were never written"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_shard_has_a_temporary_name_and_abort_removes_it(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.safetensors", ShardLayout([TensorSpec("t", "U8", (4,))]))
    assert [p.name for p in tmp_path.iterdir()] == [".a.safetensors.tmp"]
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("data", "row"), [(bytes(7), 0), (bytes(8), 4), (bytes(16), 3)])
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, data: bytes, row: int) -> None:
    writer = ShardWriter(tmp_path / "a", ShardLayout([TensorSpec("t", "U8", (4, 8))]))
    with pytest.raises(ValueError, match="do not fit tensor t"):
        writer.write("t", data, row)
    writer.abort()


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        ShardLayout([TensorSpec("t", "U8", (1,)), TensorSpec("t", "U8", (2,))])


def test_s7_offsets_are_64_bit() -> None:
    # failure S7: tensors beyond 2^31 elements; nothing is written here, only laid out.
    layout = ShardLayout([TensorSpec("big", "F32", (1 << 20, 1 << 12)), TensorSpec("next", "U8", (1,))])
    assert layout.offsets["next"] == len(layout.header) + (1 << 34)


def test_c11_a_real_file_size_limit_is_one_clear_error(tmp_path: Path) -> None:
    # failure C11: the disk is full half way. RLIMIT_FSIZE makes the kernel refuse the bytes.
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(DiskError, match=r"cannot write .*a\.safetensors.*[Ff]ile too large") as error:
            ShardWriter(tmp_path / "a.safetensors", ShardLayout([TensorSpec("t", "U8", (4 << 20,))]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert "same command" in (error.value.hint or "")
    assert list(tmp_path.iterdir()) == []


def test_c11_no_space_at_a_row_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path / "a", ShardLayout([TensorSpec("t", "U8", (4,))]))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DiskError, match="No space left"):
            writer.write("t", bytes(4))
    writer.write("t", bytes(4))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="No space left"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, memoryview(data)[:3], offset))
    writer = ShardWriter(tmp_path / "a", ShardLayout([TensorSpec("t", "U8", (10,))]))
    writer.write("t", bytes(range(10)))
    writer.finish()
    with safe_open(tmp_path / "a", "np") as shard:
        assert shard.get_tensor("t").tolist() == list(range(10))


def test_write_atomic_and_hash(tmp_path: Path) -> None:
    digest = write_atomic(tmp_path / "sub" / "a.json", b"{}")
    assert hash_file(tmp_path / "sub" / "a.json") == digest
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["a.json"]
