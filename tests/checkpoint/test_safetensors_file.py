"""The header reader believes nothing, and reads what the safetensors library reads."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktc.checkpoint.safetensors_file import RawTensor, read_array, read_header, same_bytes
from ktc.errors import CheckpointError
from tests.checkpoint.files import array, f32, header_bytes, write_raw


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f16": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "f64": rng.standard_normal(4),
        "i64": np.arange(6, dtype=np.int64).reshape(2, 3),
        "i32": np.arange(5, dtype=np.int32),
        "u8": np.arange(7, dtype=np.uint8),
        "scalar": np.array(2.5, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "np"})
    raw = read_header(tmp_path / "a.safetensors")
    assert set(raw) == set(tensors)
    for name, value in tensors.items():
        assert raw[name].shape == value.shape
        got = read_array(raw[name])
        assert got.dtype == value.dtype and np.array_equal(got, value)
    assert np.array_equal(read_array(raw["f16"], 1), tensors["f16"][1])
    with pytest.raises(IndexError):
        read_array(raw["f16"], 2)


def test_bf16_and_fp8_come_as_their_bits(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    values = torch.tensor([1.5, -2.0, 0.0, 3.0])
    save_file({"b": values.bfloat16(), "q": values.to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    raw = read_header(tmp_path / "a.safetensors")
    assert raw["b"].dtype == "BF16" and raw["q"].dtype == "F8_E4M3"
    assert read_array(raw["b"]).tolist() == values.bfloat16().view(torch.uint16).tolist()
    assert read_array(raw["q"]).tolist() == values.to(torch.float8_e4m3fn).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x10\x00\x00", "truncated: 3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
        ((2**62).to_bytes(8, "little") + b"{}", "header would be 4611686018427387904 bytes"),
        ((500).to_bytes(8, "little") + b"{}", "header needs 508 bytes and the file has 10"),
        (header_bytes(b"\x80\x81{}"), "header is damaged"),
        (header_bytes(b"[1, 2]"), "header is damaged: it is not an object"),
        (header_bytes(b'{"a": 1'), "header is damaged"),
        (header_bytes(b"[" * 100_000), "header is damaged"),
        (header_bytes(b'{"a": {}, "a": {}}'), "key 'a' appears twice"),
        (header_bytes({"a": 7}), "'a' has no dtype, shape or data_offsets"),
        (header_bytes({"a": entry("F4")}) + bytes(8), "'a' has data type 'F4', which ktc does not know"),
        (header_bytes({"a": entry("Q9_X")}) + bytes(8), "'a' has data type 'Q9_X'"),
        (header_bytes({"a": entry(shape=[-2])}) + bytes(8), r"'a' has shape \[-2\]"),
        (header_bytes({"a": entry(shape=[True])}) + bytes(8), "'a' has shape"),
        (header_bytes({"a": entry(shape="2")}) + bytes(8), "'a' has shape '2'"),
        (header_bytes({"a": entry(offsets=[8, 0])}) + bytes(8), "'a' lies at bytes 8 to 0"),
        (header_bytes({"a": entry(offsets=[0])}) + bytes(8), "'a' has data_offsets"),
        (header_bytes({"a": entry(offsets=[0, 2**80])}) + bytes(8), "but the file holds 8"),
        (header_bytes({"a": entry(shape=[3])}) + bytes(8), r"'a' is F32 \[3\], 12 bytes, but takes up 8 bytes"),
        (header_bytes({"a": entry()}) + bytes(4), "lies at bytes 0 to 8 of the data, but the file holds 4"),
        (header_bytes({"a": entry()}) + bytes(9), "the tensors end at byte"),
        (header_bytes({"a": entry(offsets=[4, 12])}) + bytes(12), "'a' leaves a hole before it"),
        (header_bytes({"a": entry(), "b": entry(offsets=[4, 12])}) + bytes(12), "'b' overlaps the one before it"),
    ],
)
def test_c8_damaged_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    # failure C8: truncated, LFS-pointer or otherwise damaged shard; the error names the file
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in caught.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: No such file"):
        read_header(tmp_path / "gone.safetensors")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 60))
def test_any_flipped_byte_or_cut_is_read_or_refused(tmp_path: Path, position: int, value: int, cut: int) -> None:
    """Never another exception, and never a tensor that runs out of its file."""
    path = write_raw(tmp_path / "a.safetensors", {"first": f32(1, 2, 3), "second": f32(4), "third.weight": f32(5, 6)})
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    del data[len(data) - cut :]
    path.write_bytes(data)
    try:
        tensors = read_header(path)
    except CheckpointError as error:
        assert "a.safetensors" in error.message
    else:
        assert sum(t.nbytes for t in tensors.values()) + min(t.begin for t in tensors.values()) == len(data)
        for tensor in tensors.values():
            read_array(tensor)


def test_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.safetensors", {"w": f32(*range(100))})
    tensor = read_header(path)["w"]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"is truncated: tensor 'w' ends 40 bytes past the end"):
        read_array(tensor)


def test_a_slice_reads_only_its_own_bytes(tmp_path: Path) -> None:
    big = np.arange(64 * 1000, dtype=np.float32).reshape(64, 1000)
    tensor = read_header(write_raw(tmp_path / "a.safetensors", {"w": array("F32", big)}))["w"]
    tracemalloc.start()
    try:
        row = read_array(tensor, 63)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(row, big[63])
    assert peak < 3 * big[63].nbytes  # not the whole tensor, which is 64 times as large


def test_same_bytes(tmp_path: Path) -> None:
    raw = read_header(write_raw(tmp_path / "a.safetensors", {"a": f32(1, 2, 3), "b": f32(1, 2, 3), "c": f32(1, 2, 4)}))
    assert same_bytes(raw["a"], raw["b"], chunk=5)
    assert not same_bytes(raw["a"], raw["c"], chunk=5)
    wrong = RawTensor("a", "I32", (3,), raw["a"].file, raw["a"].begin, 12)
    assert not same_bytes(raw["a"], wrong)


def test_metadata_is_not_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(header_bytes({"__metadata__": {"format": "pt"}, "a": entry()}) + bytes(8))
    assert list(read_header(path)) == ["a"]
    assert json.loads(path.read_bytes()[8:-8])["__metadata__"]
