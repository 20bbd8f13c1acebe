"""Planning of expert shards, and one expert's way into them over 1, 2 and 3 nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ktc.bundle.goldens import read_expert
from ktc.bundle.reader import TensorRef, TensorTable
from ktc.checkpoint.experts import ExpertWeights
from ktc.errors import CheckpointError, KtcError
from ktc.layout import split_intermediate, split_unit
from ktc.pack.experts import join_expert, pack_expert, plan_parts, split_expert, write_expert
from ktc.pack.writer import ShardWriter
from ktc.plan.ir import ModulePlan, MoePlan, Plan

NAMES = {kind: kind for kind in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")}


def moe_plan(nodes: int = 1, data_type: str = "int4", scale: str = "integer", group: int = 64, **other) -> MoePlan:
    values = {
        "experts": 6, "top_k": 2, "hidden": 96, "intermediate": 200, "activation": "silu_mul", "alpha": 0.0,
        "limit": 0.0, "bias": False, "data_type": data_type, "scale": scale, "group": group, "backend": "auto",
        "n_deferred_experts": 0, **other,
    }  # fmt: skip
    draft = MoePlan(**values, splits=())
    unit = split_unit(draft.scheme)
    return MoePlan(**values, splits=tuple(split_intermediate(draft.intermediate, nodes, unit)))


def plan_of(*moes: MoePlan, names: list[str] | None = None) -> Plan:
    names = names or [f"model.layers.{i + 1}.mlp" for i in range(len(moes))]
    modules = tuple(
        ModulePlan(name, "x.Moe", "moe", "moe", "cpu", 0, 0, moe=moe) for name, moe in zip(names, moes, strict=True)
    )
    return Plan("deepseek_v3", "X", len(moes) + 1, len(moes[0].splits), modules)


def random_expert(moe: MoePlan, seed: int = 0) -> ExpertWeights:
    rng = np.random.default_rng(seed)

    def make(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    i, h = moe.intermediate, moe.hidden
    biases = (make(i), make(i), make(h)) if moe.bias else (None, None, None)
    return ExpertWeights(make(i, h), make(i, h), make(h, i), "fp32", *biases)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", [("fp32", "none", 0), ("bf16", "none", 0), ("int8", "channel", 0),
                                    ("int8", "group", 32), ("int4", "integer", 64), ("int4", "group", 32),
                                    ("int4", "codebook", 16)])  # fmt: skip
def test_blocks_do_not_depend_on_the_node_count(scheme: tuple[str, str, int], bias: bool) -> None:
    one = moe_plan(1, *scheme, bias=bias)
    packed = pack_expert(one, random_expert(one), NAMES)
    for nodes in (1, 2, 3):
        moe = moe_plan(nodes, *scheme, bias=bias)
        slices = list(split_expert(moe, packed))
        assert len(slices) == nodes
        for node, piece in enumerate(slices):
            for matrix, layout in ((piece.gate_up, moe.gate_up_layout(node)), (piece.down, moe.down_layout(node))):
                assert matrix.tiles.size == layout.tile_bytes
                assert matrix.scale.size == layout.scale_count
                assert matrix.mult.size == layout.mult_bytes
            assert (piece.down.bias is not None) == (bias and node == 0)
        joined = join_expert(slices)
        for a, b in ((joined.gate_up, packed.gate_up), (joined.down, packed.down)):
            np.testing.assert_array_equal(a.tiles, b.tiles)
            np.testing.assert_array_equal(a.scale, b.scale)
            np.testing.assert_array_equal(a.mult, b.mult)
            assert (a.bias is None) == (b.bias is None) and (a.bias is None or np.array_equal(a.bias, b.bias))


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_written_experts_are_read_back(tmp_path: Path, nodes: int) -> None:
    moe = moe_plan(nodes, bias=True)
    parts = plan_parts(plan_of(moe), max_bytes=120_000)  # forces several parts
    assert len(parts) > 1
    assert parts[0].first == 0 and parts[-1].last == 5
    tensors = TensorTable()
    packed = {}
    for part in parts:
        writers = tuple(ShardWriter(tmp_path / f, lay) for f, lay in zip(part.files, part.layouts, strict=True))
        for e in range(part.last, part.first - 1, -1):
            packed[e] = pack_expert(moe, random_expert(moe, e), NAMES)
            write_expert(part, writers, e, packed[e])
        for node, writer in enumerate(writers):
            assert writer.finish().size <= 120_000
            for name, spec in writer.layout.tensors.items():
                where = writer.layout.offsets[name]
                tensors[node, name] = TensorRef(writer.path, where, spec.nbytes, spec.dtype, spec.shape)
    for e, expected in packed.items():
        actual = read_expert(tensors, "model.layers.1.mlp", moe, e)
        np.testing.assert_array_equal(actual.gate_up.tiles, expected.gate_up.tiles)
        np.testing.assert_array_equal(actual.down.tiles, expected.down.tiles)
        np.testing.assert_array_equal(actual.gate_up.bias, expected.gate_up.bias)
        np.testing.assert_array_equal(actual.down.bias, expected.down.bias)
        np.testing.assert_array_equal(actual.down.mult, expected.down.mult)


def test_names_of_shards_and_tensors() -> None:
    (part,) = plan_parts(plan_of(moe_plan(2)))
    assert part.files == ("weights/experts/node0/L001.safetensors", "weights/experts/node1/L001.safetensors")
    assert list(part.layouts[1].tensors) == [
        f"model.layers.1.mlp.experts.0-5.{name}"
        for name in ("gate_up.tiles", "gate_up.scale", "gate_up.mult", "down.tiles", "down.scale", "down.mult")
    ]
    small = plan_parts(plan_of(moe_plan(2)), max_bytes=60_000)
    assert [p.files[0] for p in small] == [f"weights/experts/node0/L001.p{i}.safetensors" for i in range(len(small))]
    assert [e for p in small for e in range(p.first, p.last + 1)] == list(range(6))


def test_an_expert_larger_than_a_shard_is_refused() -> None:
    with pytest.raises(KtcError, match=r"model\.layers\.1\.mlp: one expert of \d+ bytes does not fit"):
        plan_parts(plan_of(moe_plan()), max_bytes=20_000)


def test_modules_that_cannot_be_named_are_refused() -> None:
    with pytest.raises(KtcError, match="no layer number"):
        plan_parts(plan_of(moe_plan(), names=["mlp"]))
    with pytest.raises(KtcError, match="same layer 3"):
        plan_parts(plan_of(moe_plan(), moe_plan(), names=["model.layers.3.mlp", "model.layers.3.mlp2"]))


@pytest.mark.parametrize(("matrix", "where"), [("gate", (7, 5)), ("up", (199, 95)), ("down", (95, 0))])
def test_q3_nonfinite_is_refused_with_name_and_index_or_allowed(matrix: str, where: tuple[int, int]) -> None:
    # failure Q3: NaN in the checkpoint went into the packed file without a word.
    moe = moe_plan()
    weights = random_expert(moe)
    getattr(weights, matrix)[where] = np.nan
    with pytest.raises(CheckpointError, match=rf"{matrix}: NaN or infinity at \[{where[0]}, {where[1]}\]") as error:
        pack_expert(moe, weights, NAMES)
    assert "--allow-nonfinite" in (error.value.hint or "")
    pack_expert(moe, weights, NAMES, allow_nonfinite=True)


def test_q3_nonfinite_bias(bad: float = np.inf) -> None:
    moe = moe_plan(bias=True)
    weights = random_expert(moe)
    assert weights.up_bias is not None
    weights.up_bias[11] = bad
    with pytest.raises(CheckpointError, match=r"up_bias: NaN or infinity at \[11\]"):
        pack_expert(moe, weights, NAMES)


def test_wrong_shapes_and_missing_biases_are_refused() -> None:
    moe = moe_plan()
    weights = random_expert(moe)
    turned = ExpertWeights(weights.gate.T, weights.up, weights.down, "fp32")
    with pytest.raises(CheckpointError, match=r"gate: shape \[96, 200\], but the config says \[200, 96\]"):
        pack_expert(moe, turned, NAMES)
    with pytest.raises(CheckpointError, match="experts have biases"):
        pack_expert(moe_plan(bias=True), weights, NAMES)
