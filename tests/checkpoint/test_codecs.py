"""FP8, int4 and MXFP4 decode to exactly the numbers their definitions give; anything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktc.checkpoint import open_checkpoint
from ktc.checkpoint.codecs import parse_quantization
from ktc.checkpoint.fp8 import E4M3, decode_scales
from ktc.errors import CheckpointError
from tests.checkpoint.files import array, bf16_bits, f32, write_checkpoint

FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
INT4 = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
            }
        },
    }
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def weights(**changes: Any) -> dict[str, Any]:
    """The int4 section with changes in its group's `weights`, or in the section for keys that start with `_`."""
    section = INT4["quantization_config"]
    inner = {k: v for k, v in changes.items() if not k.startswith("_")}
    outer = {k[1:]: v for k, v in changes.items() if k.startswith("_")}
    group = {"weights": {**section["config_groups"]["group_0"]["weights"], **inner}}  # type: ignore[index]
    return {"quantization_config": {**section, "config_groups": {"group_0": group}, **outer}}


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    codes = rng.integers(0, 256, size=shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # no NaN
    return codes


def torch_fp8(codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()


def spread(scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    rows = np.arange(shape[0]) // block[0]
    columns = np.arange(shape[1]) // block[1]
    return scales[rows[:, None], columns[None, :]]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


def test_every_e4m3_code() -> None:
    assert same(E4M3, torch_fp8(np.arange(256, dtype=np.uint8)))


def test_e8m0_scales() -> None:
    bits = np.array([0, 1, 127, 128, 254, 255], dtype=np.uint8)
    expected = np.array([2.0**-127, 2.0**-126, 1, 2, 2.0**127, np.nan], dtype=np.float32)
    assert same(decode_scales(bits, "U8"), expected)
    assert same(decode_scales(bits, "F8_E8M0"), expected)


@pytest.mark.parametrize("shape", [(576, 448), (128, 128), (1, 1), (130, 256), (127, 129)])
def test_c1_fp8_partial_last_blocks_are_exact(tmp_path: Path, shape: tuple[int, int]) -> None:
    # failure C1: 128x128 blocks over a 576-row tensor, whose fifth block row covers 64 rows
    rng = np.random.default_rng(1)
    codes = random_codes(rng, *shape)
    scales = rng.uniform(1e-4, 1e-2, size=(-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    tensors = {"a.weight": array("F8_E4M3", codes), "a.weight_scale_inv": array("F32", scales)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, FP8))
    assert checkpoint.names() == ["a.weight"]
    info = checkpoint.info("a.weight")
    assert (info.dtype, info.shape, info.nbytes) == ("fp8", shape, codes.nbytes + scales.nbytes)
    data = checkpoint.read("a.weight")
    assert data.dtype == "fp32"
    assert same(data.array, torch_fp8(codes) * spread(scales, shape, (128, 128)))


@pytest.mark.parametrize("shape", [(24, 32), (24, 64)])
def test_c2_block_size_is_never_guessed(tmp_path: Path, shape: tuple[int, int]) -> None:
    # failure C2: rows // scale_rows gives 12 for 24 rows in blocks of 16; a grid that 16 does not explain is refused
    rng = np.random.default_rng(2)
    codes = random_codes(rng, *shape)
    scales = rng.uniform(0.5, 2, size=(2, shape[1] // 16)).astype(np.float32)
    tensors = {"a.weight": array("F8_E4M3", codes), "a.weight_scale_inv": array("F32", scales)}
    sixteen = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "16", tensors, sixteen))
    assert same(checkpoint.read("a.weight").array, torch_fp8(codes) * spread(scales, shape, (16, 16)))
    other = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 16]}}
    with pytest.raises(CheckpointError, match=r"'a.weight_scale_inv' are \[2, .*weight_block_size \[8, 16\] asks for"):
        open_checkpoint(write_checkpoint(tmp_path / "8", tensors, other))
    none = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(CheckpointError, match="a config without weight_block_size asks for"):
        open_checkpoint(write_checkpoint(tmp_path / "none", tensors, none))


@pytest.mark.parametrize("kind", ["bf16", "e8m0", "u8", "f16"])
def test_fp8_scale_types(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(3)
    codes = random_codes(rng, 200, 130)
    exact = np.exp2(rng.integers(-9, 2, size=(2, 2))).astype(np.float32)  # powers of two: every type holds them
    stored = {
        "bf16": array("BF16", bf16_bits(exact)),
        "e8m0": array("F8_E8M0", (np.log2(exact) + 127).astype(np.uint8)),
        "u8": array("U8", (np.log2(exact) + 127).astype(np.uint8)),
        "f16": array("F16", exact.astype(np.float16)),
    }[kind]
    tensors = {"a.weight": array("F8_E4M3", codes), "a.weight_scale_inv": stored}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, FP8))
    assert same(checkpoint.read("a.weight").array, torch_fp8(codes) * spread(exact, (200, 130), (128, 128)))


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_fp8_scale_per_row_or_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    codes = random_codes(rng, 6, 40)
    scales = rng.uniform(0.1, 1, size=shape).astype(np.float32)
    tensors = {"a.weight": array("F8_E4M3", codes), "a.weight_scale": ("F32", shape, scales.tobytes())}
    config = weights(
        num_bits=8, type="float", strategy="channel" if len(shape) else "tensor", _format="float-quantized"
    )
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, config))
    expected = torch_fp8(codes) * np.broadcast_to(scales.reshape(-1, 1), (6, 40))
    assert same(checkpoint.read("a.weight").array, expected)


def test_fp8_stack_of_experts_reads_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    codes = random_codes(rng, 3, 130, 140)
    scales = rng.uniform(0.1, 1, size=(3, 2, 2)).astype(np.float32)
    tensors = {"m.experts.down_proj": array("F8_E4M3", codes), "m.experts.down_proj_scale_inv": array("F32", scales)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, FP8))
    expected = [torch_fp8(codes[e]) * spread(scales[e], (130, 140), (128, 128)) for e in range(3)]
    assert same(checkpoint.read("m.experts.down_proj", 2).array, expected[2])
    assert same(checkpoint.read("m.experts.down_proj").array, np.stack(expected))


def test_fp8_nan_code_stays_nan(tmp_path: Path) -> None:
    """The packer refuses NaN with its index; the reader must not hide it."""
    codes = np.array([[0x7F, 0x38]], dtype=np.uint8)
    tensors = {"a.weight": array("F8_E4M3", codes), "a.weight_scale_inv": array("F32", np.ones((1, 1), np.float32))}
    got = open_checkpoint(write_checkpoint(tmp_path, tensors, FP8)).read("a.weight").array
    assert np.isnan(got[0, 0]) and got[0, 1] == 1.0


def test_c4_int4_nibble_order(tmp_path: Path) -> None:
    # failure C4: packed int4 read with reversed nibbles. -8..7 packs to 0x76543210, 0xfedcba98 (element 0 lowest)
    words = np.tile(np.array([0x76543210, 0xFEDCBA98], dtype=np.uint32), (1, 2)).view(np.int32)
    tensors = {
        "a.weight_packed": array("I32", words),
        "a.weight_scale": array("BF16", bf16_bits([[0.5]])),
        "a.weight_shape": array("I64", np.array([1, 32], dtype=np.int64)),
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, INT4))
    assert checkpoint.names() == ["a.weight"] and checkpoint.info("a.weight").dtype == "int4"
    expected = np.tile(np.arange(-8, 8, dtype=np.float32), 2)[None] * np.float32(0.5)
    assert same(checkpoint.read("a.weight").array, expected)


@pytest.mark.parametrize(("shape_dtype", "strategy"), [("I32", "group"), ("I64", "group"), ("I64", "channel")])
def test_int4_groups(tmp_path: Path, shape_dtype: str, strategy: str) -> None:
    rng = np.random.default_rng(6)
    q = rng.integers(-8, 8, size=(5, 96))
    groups = 3 if strategy == "group" else 1
    scales = rng.integers(1, 200, size=(5, groups)).astype(np.float32) / 128
    words = np.zeros((5, 12), dtype=np.uint32)
    for i in range(8):
        words |= (q[:, i::8] + 8).astype(np.uint32) << (4 * i)
    tensors = {
        "a.weight_shape": array(shape_dtype, np.array([5, 96], dtype={"I32": np.int32, "I64": np.int64}[shape_dtype])),
        "a.weight_scale": array("BF16", bf16_bits(scales)),
        "a.weight_packed": array("I32", words.view(np.int32)),
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, weights(strategy=strategy)))
    assert same(checkpoint.read("a.weight").array, q.astype(np.float32) * np.repeat(scales, 96 // groups, axis=1))


def test_int4_shapes_that_contradict(tmp_path: Path) -> None:
    good = {
        "a.weight_packed": array("I32", np.zeros((2, 4), dtype=np.int32)),
        "a.weight_scale": array("F32", np.ones((2, 1), dtype=np.float32)),
        "a.weight_shape": array("I64", np.array([2, 32])),
    }
    bad_scale = {**good, "a.weight_scale": array("F32", np.ones((2, 2), dtype=np.float32))}
    with pytest.raises(CheckpointError, match=r"has scales \[2, 2\], which does not fit groups of 32"):
        open_checkpoint(write_checkpoint(tmp_path / "1", bad_scale, INT4))
    bad_shape = {**good, "a.weight_shape": array("I64", np.array([2, 30]))}
    with pytest.raises(CheckpointError, match=r"holds \[2, 32\] values, but 'a.weight_shape' says \[2, 30\]"):
        open_checkpoint(write_checkpoint(tmp_path / "2", bad_shape, INT4)).read("a.weight")
    for gone in ("_scale", "_shape"):
        left = {k: v for k, v in good.items() if not k.endswith(gone)}
        with pytest.raises(CheckpointError, match=f"has no a.weight{gone} beside it"):
            open_checkpoint(write_checkpoint(tmp_path / gone, left, INT4))
    with pytest.raises(CheckpointError, match=r"config\.json describes no packed int4 weights"):
        open_checkpoint(write_checkpoint(tmp_path / "3", good))


def test_mxfp4_values_and_layout(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
    table = np.concatenate([table, -table])
    nibbles = rng.integers(0, 16, size=(3, 4, 64))  # [E, out, in]
    exponents = rng.integers(100, 150, size=(3, 4, 2))
    blocks = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).astype(np.uint8).reshape(3, 4, 2, 16)
    tensors = {
        "m.down_proj_blocks": array("U8", blocks),
        "m.down_proj_scales": array("U8", exponents.astype(np.uint8)),
        "m.down_proj_bias": f32(1, 2),
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, MXFP4))
    assert checkpoint.names() == ["m.down_proj", "m.down_proj_bias"]
    assert checkpoint.info("m.down_proj").shape == (3, 64, 4)
    expected = table[nibbles] * np.repeat(np.exp2(exponents - 127.0), 32, axis=-1)
    got = checkpoint.read("m.down_proj", 1).array
    assert got.T.flags.c_contiguous  # a view of the decoded matrix, not a transposed copy
    assert same(got, expected[1].T.astype(np.float32))
    assert same(checkpoint.read("m.down_proj").array, expected.swapaxes(1, 2).astype(np.float32))


def test_mxfp4_faults(tmp_path: Path) -> None:
    blocks = array("U8", np.zeros((1, 2, 1, 16), dtype=np.uint8))
    scales = array("U8", np.zeros((1, 2, 1), dtype=np.uint8))
    with pytest.raises(CheckpointError, match="has no m_scales beside it"):
        open_checkpoint(write_checkpoint(tmp_path / "1", {"m_blocks": blocks}, MXFP4))
    with pytest.raises(CheckpointError, match=r"its scales are U8 \[1, 1\]"):
        wrong = array("U8", np.zeros((1, 1), dtype=np.uint8))
        open_checkpoint(write_checkpoint(tmp_path / "2", {"m_blocks": blocks, "m_scales": wrong}, MXFP4))
    with pytest.raises(CheckpointError, match="does not say quant_method mxfp4"):
        open_checkpoint(write_checkpoint(tmp_path / "3", {"m_blocks": blocks, "m_scales": scales}))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "'modelopt'"),
        ({"quantization_config": {"quant_method": None}}, "None"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "'e5m2'"),
        (weights(symmetric=False), "asymmetric"),
        (weights(actorder="group"), "actorder: 'group'"),
        (weights(num_bits=8), "8-bit 'int'"),
        (weights(strategy="token"), "'token'"),
        (weights(_format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (weights(_format="mxfp4-pack-quantized"), "'mxfp4-pack-quantized'"),
        (weights(_config_groups={}), "without config_groups"),
    ],
)
def test_other_quantisations_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_quantization(config)
    assert named in caught.value.message
    assert "ktc reads" in (caught.value.hint or "") and "int4" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a.qweight", "GPTQ or AWQ"),
        ("a.weight_scale_2", "NVFP4"),
        ("a.weight_zero_point", "asymmetric"),
        ("a.weight_g_idx", "activation ordering"),
    ],
)
def test_foreign_tensors_are_refused_by_name(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}.*{what}"):
        open_checkpoint(write_checkpoint(tmp_path, {name: f32(1)}))


def test_fp8_faults(tmp_path: Path) -> None:
    codes = array("F8_E4M3", np.zeros((2, 2), dtype=np.uint8))
    with pytest.raises(CheckpointError, match=r"has no a\.weight_scale_inv or a\.weight_scale beside it"):
        open_checkpoint(write_checkpoint(tmp_path / "1", {"a.weight": codes}, FP8))
    with pytest.raises(CheckpointError, match="F8_E5M2; of FP8, ktc reads F8_E4M3 only"):
        e5m2 = ("F8_E5M2", *codes[1:])
        open_checkpoint(write_checkpoint(tmp_path / "2", {"a.weight": e5m2}, FP8))
    bad = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}}
    with pytest.raises(CheckpointError, match=r"weight_block_size is \[128, 0\]"):
        open_checkpoint(write_checkpoint(tmp_path / "3", {"a": f32(1)}, bad))


def test_plain_types_that_are_no_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, {"a": array("F64", np.ones(2))}))
    with pytest.raises(CheckpointError, match="'a' has data type F64, which is not a weight type"):
        checkpoint.read("a")
    with pytest.raises(CheckpointError, match="has no tensor 'b'"):
        checkpoint.read("b")
