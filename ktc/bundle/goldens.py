"""Goldens: small inputs and what must come out, so that a bundle can prove itself on any machine.

For every MoE layer a few tokens through a few experts, worked out at compile time from the packed
bytes by the naive numpy path (reference.py); and, where a whole model was run, the logits of a short
prompt. `ktc verify` repeats them with this machine's kernels. Running the model is the engine's work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.bundle.reader import Bundle, TensorTable
from ktc.bundle.reference import run_moe
from ktc.errors import BundleError
from ktc.layout import MatrixLayout
from ktc.pack.experts import PackedExpert, join_expert
from ktc.pack.matrix import PackedMatrix
from ktc.pack.writer import FileDigest, ShardLayout, ShardWriter, TensorSpec
from ktc.plan.ir import MoePlan

GOLDENS = "goldens.safetensors"
TOKENS, SLOTS = 3, 2
# Relative L2 distance allowed to a kernel. The integer and bf16 formats round the hidden activations: a value
# close to a rounding boundary may fall on either side, which moves it by one step of its format.
TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3, "int8": 1e-3, "int4": 1e-3}
LOGITS_TOLERANCE = 2e-2


@dataclass(frozen=True)
class MoeGolden:
    """One layer's case: x [T, H], ids [T, k] (expert ids of the model), weights [T, k], expected y [T, H]."""

    module: str
    x: NDArray[np.float32]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    y: NDArray[np.float32]
    tolerance: float


def uniform(count: int, seed: str) -> NDArray[np.float64]:
    """`count` numbers in [-1, 1), the same with every version of everything."""
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.asarray((z >> np.uint64(11)).astype(np.float64) / 2**52 - 1)


def golden_input(module: str, moe: MoePlan) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """x, ids and weights of a layer's case: a few tokens, a few experts from all over the layer."""
    x = (uniform(TOKENS * moe.hidden, f"{module} x") * 2).astype(np.float32).reshape(TOKENS, moe.hidden)
    spread = sorted({0, moe.experts // 2, moe.experts - 1})
    slots = min(SLOTS, len(spread))
    ids = np.array([[spread[(t + s) % len(spread)] for s in range(slots)] for t in range(TOKENS)], np.int64)
    weights = (0.5 + 0.25 * uniform(TOKENS * slots, f"{module} w")).astype(np.float32).reshape(TOKENS, slots)
    return x, ids, weights


def read_expert(tensors: TensorTable, module: str, moe: MoePlan, expert: int) -> PackedExpert:
    """One expert, whole, from the shards of all its nodes."""
    slices = [_read_slice(tensors, module, moe, node, expert) for node in range(len(moe.splits))]
    return join_expert(slices)


def _read_slice(tensors: TensorTable, module: str, moe: MoePlan, node: int, expert: int) -> PackedExpert:
    stem, first = tensors.part_of(module, node, expert)

    def matrix(name: str, layout: MatrixLayout) -> PackedMatrix:
        def row(suffix: str, dtype: Any) -> NDArray[Any]:
            ref = tensors.get((node, f"{stem}.{name}.{suffix}"))
            return np.empty(0, dtype) if ref is None else np.array(ref.array()[expert - first])

        bias = row("bias", np.float32)
        return PackedMatrix(
            layout,
            row("tiles", np.uint8),
            row("scale", np.float32),
            row("mult", np.uint8),
            bias if bias.size else None,
        )

    return PackedExpert(matrix("gate_up", moe.gate_up_layout(node)), matrix("down", moe.down_layout(node)))


def make_moe_golden(tensors: TensorTable, module: str, moe: MoePlan) -> MoeGolden:
    """Work out a layer's case from the packed bytes."""
    x, ids, weights = golden_input(module, moe)
    used = sorted(set(ids.ravel().tolist()))
    experts = [read_expert(tensors, module, moe, e) for e in used]
    local = np.searchsorted(used, ids)
    y = np.stack(list(run_moe(moe, experts, x.astype(np.float64), local, weights.astype(np.float64))))
    return MoeGolden(module, x, ids, weights, y.astype(np.float32), TOLERANCE[moe.data_type])


def write_goldens(
    path: Path, cases: Iterable[MoeGolden], logits: tuple[NDArray[np.int64], NDArray[np.float32]] | None
) -> tuple[FileDigest, dict[str, Any], list[dict[str, Any]]]:
    """Write goldens.safetensors.

    Args:
        logits: (input ids [T], logits [T, V]) of a short prompt, or None.
    Returns:
        the file's digest, the manifest's `goldens` field, and tensor table entries.
    """
    values: dict[str, NDArray[Any]] = {}
    listed = []
    for case in cases:
        for name in ("x", "ids", "weights", "y"):
            values[f"{case.module}.golden.{name}"] = np.ascontiguousarray(getattr(case, name))
        listed.append(
            {
                "module": case.module,
                "experts": sorted(set(case.ids.ravel().tolist())),
                "tolerance": case.tolerance,
            }
        )
    if logits is not None:
        values["golden.input_ids"], values["golden.logits"] = map(np.ascontiguousarray, logits)
    names = {np.dtype(np.float32): "F32", np.dtype(np.int64): "I64"}
    layout = ShardLayout(
        [TensorSpec(name, names[value.dtype], value.shape) for name, value in values.items()], {"format": "ktc"}
    )
    writer = ShardWriter(path, layout)
    for name, value in values.items():
        writer.write(name, value)
    digest = writer.finish()
    field = {
        "file": GOLDENS,
        "moe": listed,
        "logits": None if logits is None else {"tolerance": LOGITS_TOLERANCE},
    }
    table = [
        {
            "name": name,
            "file": GOLDENS,
            "offset": layout.offsets[name],
            "nbytes": spec.nbytes,
            "layout": "plain",
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "logical_shape": list(spec.shape),
            "node": None,
        }
        for name, spec in layout.tensors.items()
    ]
    return digest, field, table


def read_moe_goldens(bundle: Bundle) -> list[MoeGolden]:
    """The layer cases of a bundle.

    Raises:
        BundleError: the manifest names a case that goldens.safetensors does not hold.
    """
    goldens = bundle.manifest["goldens"]
    out = []
    for entry in goldens["moe"] if goldens else ():
        names = [f"{entry['module']}.golden.{name}" for name in ("x", "ids", "weights", "y")]
        if missing := [name for name in names if (None, name) not in bundle.tensors]:
            raise BundleError(f"{bundle.path}: goldens of {entry['module']}: no tensor {missing[0]}")
        x, ids, weights, y = (np.array(bundle.tensors[None, name].array()) for name in names)
        out.append(MoeGolden(entry["module"], x, ids, weights, y, float(entry["tolerance"])))
    return out


def golden_fault(case: MoeGolden, moe: MoePlan) -> str | None:
    """What keeps a stored case from being run through its layer, or None: arrays of other shapes or types, or experts
    that the layer does not have."""
    tokens, slots = case.ids.shape if case.ids.ndim == 2 else (0, 0)
    rows, routes = (tokens, moe.hidden), (tokens, slots)
    for name, dtype, shape in (
        ("ids", np.int64, routes),
        ("weights", np.float32, routes),
        ("x", np.float32, rows),
        ("y", np.float32, rows),
    ):
        value: NDArray[Any] = getattr(case, name)
        if not value.size or value.dtype != dtype or value.shape != shape:
            return f"{name} is {value.dtype} {list(value.shape)}, which does not fit the layer"
    if case.ids.min() < 0 or case.ids.max() >= moe.experts:
        return f"an expert is not one of the layer's {moe.experts}"
    if any(len(set(row)) < slots for row in case.ids.tolist()):
        return "a token has an expert twice"
    return None


def relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """L2 distance over L2 norm; infinite if they are not finite at the same places."""
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)):
        return float("inf")
    a, e = actual[finite].astype(np.float64), expected[finite].astype(np.float64)
    norm = float(np.linalg.norm(e))
    distance = float(np.linalg.norm(a - e))
    return distance / norm if norm > 0 else distance
