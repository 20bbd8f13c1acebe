"""Routed experts: every family and encoding gives exactly the matrices that Hugging Face's model holds."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktc.checkpoint import TensorData, open_checkpoint
from ktc.checkpoint.experts import ExpertReader, to_fp32
from ktc.errors import CheckpointError
from ktc.models.family import ExpertShape
from ktc.models.registry import FAMILIES, family_for, hf_config
from tests.checkpoint.files import array, bf16_bits, write_checkpoint
from tests.tiny import TINY, twin_of

# Sizes that are no multiple of 128, or not even of 64 (H, I).
ODD = ((64, 96), (128, 192), (192, 320))
SIZE_KEY = {"mixtral": "intermediate_size", "olmoe": "intermediate_size", "gpt_oss": "intermediate_size",
            "minimax_m2": "intermediate_size", "granitemoe": "intermediate_size"}  # fmt: skip


def formats(family: str) -> list[str]:
    if family == "gpt_oss":
        return ["plain", "mxfp4"]
    if family == "granitemoe":
        return ["plain", "fused"]
    return ["plain", "fused", "fp8", "int4"]


def reference(path: Path) -> dict[str, tuple[Any, bool]]:
    """MoE block -> (experts container of the model that transformers loads in fp32, gpt-oss layout?)."""
    import torch
    from transformers import AutoModelForCausalLM

    twin = twin_of(path)
    model = AutoModelForCausalLM.from_pretrained(twin if twin.exists() else path, dtype=torch.float32)
    return {n.removesuffix(".experts"): m for n, m in model.named_modules() if hasattr(m, "_apply_gate")}


def reader(path: Path, module: str) -> ExpertReader:
    checkpoint = open_checkpoint(path)
    config = hf_config(checkpoint.config)
    family = family_for(config)
    return ExpertReader(checkpoint, family, module, family.shape(config))


def matrices(experts: Any, e: int) -> list[np.ndarray]:
    """gate [I, H], up [I, H], down [H, I] of transformers' container."""
    gate_up, down = experts.gate_up_proj[e].detach().numpy(), experts.down_proj[e].detach().numpy()
    if experts.is_transposed:
        gate_up, down = gate_up.T, down.T
    if not experts.is_concatenated:
        return [gate_up[0::2], gate_up[1::2], down]
    return [*np.split(gate_up, 2), down]


@pytest.mark.parametrize(("family", "fmt"), [(f, fmt) for f in TINY for fmt in formats(f)])
def test_experts_equal_hugging_face(tiny_checkpoint: Callable[..., Path], family: str, fmt: str) -> None:
    hidden, intermediate = ODD[sorted(TINY).index(family) % len(ODD)]
    sizes = {"hidden_size": hidden, SIZE_KEY.get(family, "moe_intermediate_size"): intermediate}
    path = tiny_checkpoint(family, fmt=fmt, shards=3 if fmt != "fused" else None, **sizes)
    blocks = reference(path)
    assert blocks
    for module, experts in blocks.items():
        read = reader(path, module)
        assert read.spelling.kind == ("per_expert" if read.spelling.gate else "fused")
        assert read.shape.experts == experts.num_experts
        for e in range(read.shape.experts):
            got = read.read(e)
            assert got.dtype == ("bf16" if fmt in ("plain", "fused") else "fp32")
            for ours, theirs in zip((got.gate, got.up, got.down), matrices(experts, e), strict=True):
                assert np.array_equal(to_fp32(TensorData(ours, got.dtype)), theirs)
            if family == "gpt_oss":
                bias = experts.gate_up_proj_bias[e].detach().numpy()
                assert np.array_equal(got.gate_bias, bias[0::2]) and np.array_equal(got.up_bias, bias[1::2])
                assert np.array_equal(got.down_bias, experts.down_proj_bias[e].detach().numpy())
                assert np.abs(bias).min() > 0
            else:
                assert got.gate_bias is got.up_bias is got.down_bias is None


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_float_types(tiny_checkpoint: Callable[..., Path], dtype: str) -> None:
    path = tiny_checkpoint("qwen3_moe", dtype=dtype)
    experts = reference(path)["model.layers.1.mlp"]
    got = reader(path, "model.layers.1.mlp").read(3)
    assert got.dtype == dtype
    for ours, theirs in zip((got.gate, got.up, got.down), matrices(experts, 3), strict=True):
        assert np.array_equal(ours.astype(np.float32), theirs)


def test_views_not_copies(tiny_checkpoint: Callable[..., Path]) -> None:
    """The packer takes strides, so de-interleaving and transposing cost nothing."""
    got = reader(tiny_checkpoint("gpt_oss"), "model.layers.0.mlp").read(0)
    assert got.gate.base is not None and np.shares_memory(got.gate, got.gate.base)
    two_i, itemsize = 192, got.gate.itemsize
    assert got.gate.strides == got.up.strides == (2 * itemsize, two_i * itemsize)
    assert got.down.strides == (itemsize, 64 * itemsize)
    got = reader(tiny_checkpoint("mixtral", fmt="fused"), "model.layers.0.mlp").read(0)
    assert np.shares_memory(got.gate.base, got.up.base) and got.gate.flags.c_contiguous


def test_memory_is_one_expert(tiny_checkpoint: Callable[..., Path]) -> None:
    for family, fmt in (("granitemoe", "plain"), ("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")):
        sizes = {"hidden_size": 256, SIZE_KEY.get(family, "moe_intermediate_size"): 256}
        read = reader(tiny_checkpoint(family, fmt=fmt, **sizes), next(iter(reference_names(family))))
        read.read(0)
        tracemalloc.start()
        try:
            got = read.read(1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # Decoded matrices, and while the last is decoded its codes and temporaries.
        assert peak < 3 * (got.gate.nbytes + got.up.nbytes + got.down.nbytes), family


def reference_names(family: str) -> list[str]:
    block = "block_sparse_moe" if family == "granitemoe" else "mlp"
    return [f"model.layers.1.{block}"]


# ---- wrong checkpoints ------------------------------------------------------------------------------------------
E, H, I = 2, 8, 4  # noqa: E741 - the letters of the field
SHAPE = ExpertShape(E, 1, H, I)
QWEN = FAMILIES["qwen3_moe"]


def per_expert(**changed: tuple[int, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for e in range(E):
        for name, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I))):
            shape = changed.get(f"{name}{e}", shape)
            out[f"m.experts.{e}.{name}.weight"] = array("F32", np.zeros(shape, dtype=np.float32))
    return out


def test_missing_expert_tensor_is_named(tmp_path: Path) -> None:
    tensors = per_expert()
    del tensors["m.experts.1.up_proj.weight"]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors))
    with pytest.raises(CheckpointError, match=r"'m\.experts\.1\.up_proj\.weight' is missing") as caught:
        ExpertReader(checkpoint, QWEN, "m", SHAPE)
    assert "should have 2 experts" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"no routed experts of n: tensor 'n\.experts\.0\.gate_proj\.weight'"):
        ExpertReader(checkpoint, QWEN, "n", SHAPE)


@pytest.mark.parametrize(("name", "shape"), [("gate_proj1", (H, I)), ("down_proj0", (I, H))])
def test_c6_transposed_expert_is_an_error(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    # failure C6: [in, out] where the family declares [out, in]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, per_expert(**{name: shape})))
    with pytest.raises(CheckpointError, match=rf"m\.experts\.{name[-1]}\.{name[:-1]}\.weight' .*it is transposed"):
        ExpertReader(checkpoint, QWEN, "m", SHAPE)


def test_c6_fused_orientation_is_checked(tmp_path: Path) -> None:
    # failure C6: fused [E, 2I, H] against [E, H, 2I]
    wide = array("F32", np.zeros((E, H, 2 * I + 2), dtype=np.float32))
    turned = array("F32", np.zeros((E, H, 2 * I), dtype=np.float32))
    down = array("F32", np.zeros((E, H, I), dtype=np.float32))
    shape = ExpertShape(E, 1, H, I)
    square = open_checkpoint(
        write_checkpoint(tmp_path / "1", {"m.experts.gate_up_proj": turned, "m.experts.down_proj": down})
    )
    ExpertReader(square, QWEN, "m", shape)  # 2I == H here: nothing to tell by
    other = ExpertShape(E, 1, H, 3)
    turned = array("F32", np.zeros((E, H, 6), dtype=np.float32))
    checkpoint = open_checkpoint(
        write_checkpoint(tmp_path / "2", {"m.experts.gate_up_proj": turned, "m.experts.down_proj": down})
    )
    with pytest.raises(CheckpointError, match=r"'m\.experts\.gate_up_proj' is \[2, 8, 6\] \(it is transposed\)"):
        ExpertReader(checkpoint, QWEN, "m", other)
    checkpoint = open_checkpoint(
        write_checkpoint(tmp_path / "3", {"m.experts.gate_up_proj": wide, "m.experts.down_proj": down})
    )
    with pytest.raises(CheckpointError, match=r"is \[2, 8, 10\]; the config asks for \[2, 8, 8\]"):
        ExpertReader(checkpoint, QWEN, "m", shape)


def test_c6_gpt_oss_orientation(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    # failure C6: gpt-oss declares [E, in, out] with alternating gate and up; [E, out, in] must not pass
    path = tiny_checkpoint("gpt_oss")
    checkpoint = open_checkpoint(path)
    config = json.loads((path / "config.json").read_text())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    data = checkpoint.read(name).array.swapaxes(1, 2)
    tensors = {name: array("BF16", data)} | {
        n: array("BF16", checkpoint.read(n).array)
        for n in checkpoint.names()
        if n.startswith("model.layers.0.mlp.experts") and n != name
    }
    with pytest.raises(CheckpointError, match=r"gate_up_proj' is \[4, 192, 64\] \(it is transposed\)"):
        reader(write_checkpoint(tmp_path, tensors, config), "model.layers.0.mlp")


def test_mixed_types_widen_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gate = rng.integers(-8, 8, size=(I, H)).astype(np.float32)
    tensors = per_expert()
    tensors["m.experts.0.gate_proj.weight"] = array("BF16", bf16_bits(gate))
    got = ExpertReader(open_checkpoint(write_checkpoint(tmp_path, tensors)), QWEN, "m", SHAPE).read(0)
    assert got.dtype == "fp32" and np.array_equal(got.gate, gate)
    with pytest.raises(IndexError):
        ExpertReader(open_checkpoint(tmp_path), QWEN, "m", SHAPE).read(E)
