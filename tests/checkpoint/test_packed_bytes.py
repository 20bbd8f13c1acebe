"""Every input format packs to the same bytes as its weights dequantised to fp32 first (by torch, not by ktc)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktc.checkpoint.experts import ExpertReader
from ktc.layout import QuantScheme, intermediate_pad
from ktc.pack.experts import PackedExpert, pack_expert
from ktc.plan.ir import MoePlan
from tests.checkpoint.test_experts import SIZE_KEY, reader
from tests.tiny import twin_of

SCHEMES = (
    QuantScheme("fp32"),
    QuantScheme("bf16"),
    QuantScheme("int8", "channel"),
    QuantScheme("int8", "group", 32),
    QuantScheme("int4", "group", 32),
    QuantScheme("int4", "integer", 32),
    QuantScheme("int4", "codebook", 16),
)
WHERE = {name: name for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")}
CASES = [
    # FP8 blocks of 32 with partial last blocks in both directions.
    ("deepseek_v3", {"fmt": "fp8"}, 136, 80),
    ("minimax_m2", {"fmt": "fp8"}, 64, 96),
    ("qwen3_moe", {"fmt": "int4"}, 192, 320),
    ("gpt_oss", {"fmt": "mxfp4"}, 64, 96),
    ("gpt_oss", {}, 128, 96),
    ("mixtral", {"dtype": "fp16"}, 64, 96),
    ("olmoe", {"fmt": "fused"}, 64, 96),
    ("granitemoe", {}, 64, 96),
]


def widened(path: Path, target: Path) -> Path:
    """The same checkpoint with every tensor stored as fp32, in one file."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(path, target)
    tensors = load_file(target / "model.safetensors")
    save_file({n: t.float() for n, t in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return target


def packed(read: ExpertReader, e: int, scheme: QuantScheme) -> PackedExpert:
    s = read.shape
    moe = MoePlan(
        s.experts, s.top_k, s.hidden, s.intermediate, s.activation, s.alpha, s.limit, s.bias, scheme.data_type,
        scheme.scale, scheme.group, "auto", 0, ((0, intermediate_pad(s.intermediate)),),
    )  # fmt: skip
    return pack_expert(moe, read.read(e), WHERE)


def arrays(expert: PackedExpert) -> dict[str, np.ndarray]:
    out = {}
    for name, matrix in (("gate_up", expert.gate_up), ("down", expert.down)):
        for part in ("tiles", "scale", "mult", "bias"):
            value = getattr(matrix, part)
            if value is not None:
                out[f"{name}.{part}"] = np.asarray(value)
    return out


@pytest.mark.parametrize(("family", "options", "hidden", "intermediate"), CASES)
def test_packed_bytes_do_not_depend_on_the_input_format(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    options: dict[str, Any],
    hidden: int,
    intermediate: int,
) -> None:
    sizes = {"hidden_size": hidden, SIZE_KEY.get(family, "moe_intermediate_size"): intermediate}
    path = tiny_checkpoint(family, **options, **sizes)
    other = twin_of(path) if twin_of(path).exists() else widened(path, tmp_path / "fp32")
    module = "model.layers.1." + ("block_sparse_moe" if family == "granitemoe" else "mlp")
    ours, theirs = reader(path, module), reader(other, module)
    assert theirs.read(0).dtype == "fp32"
    for scheme in SCHEMES:
        for e in (0, ours.shape.experts - 1):
            got, expected = arrays(packed(ours, e, scheme)), arrays(packed(theirs, e, scheme))
            assert got.keys() == expected.keys() and len(got) >= 2
            for name in got:
                assert got[name].tobytes() == expected[name].tobytes(), (scheme, e, name)


def test_another_expert_packs_to_other_bytes(tiny_checkpoint: Callable[..., Path]) -> None:
    """The comparison above can fail."""
    read = reader(tiny_checkpoint("mixtral"), "model.layers.1.mlp")
    one, two = packed(read, 0, SCHEMES[0]), packed(read, 1, SCHEMES[0])
    assert arrays(one)["down.tiles"].tobytes() != arrays(two)["down.tiles"].tobytes()
