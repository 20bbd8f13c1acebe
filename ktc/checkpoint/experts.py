"""The routed experts of one MoE block, one expert at a time, as three plain matrices.

Hides how they lie on disk: one tensor per projection or all experts fused, [out, in] or transposed,
gate and up apart, stacked or alternating. Matrices are views wherever the encoding allows; the packer
takes their strides. Presence and shapes of all experts are checked when the reader is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.checkpoint.checkpoint import Checkpoint
from ktc.checkpoint.tensors import Dtype, TensorData
from ktc.errors import CheckpointError
from ktc.models.family import ExpertNames, ExpertShape, Family
from ktc.models.names import tree_to_disk

Matrix = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert. `dtype` is that of the three matrices ("bf16" = bits in uint16); biases are fp32 or None.

    The matrices may be strided views: element strides are `array.strides[i] // array.itemsize`.
    """

    gate: Matrix  # [I, H]
    up: Matrix  # [I, H]
    down: Matrix  # [H, I]
    dtype: Dtype
    gate_bias: NDArray[np.float32] | None = None  # [I]
    up_bias: NDArray[np.float32] | None = None  # [I]
    down_bias: NDArray[np.float32] | None = None  # [H]


def to_fp32(data: TensorData) -> NDArray[np.float32]:
    """Exact widening to fp32 (no copy if it is fp32 already)."""
    if data.dtype == "bf16":
        return (np.asarray(data.array, dtype=np.uint32) << 16).view(np.float32)
    return np.asarray(data.array, dtype=np.float32)


class ExpertReader:
    """Reads expert after expert of the MoE block `module` (module-tree name, `model.layers.3.mlp`).

    Args:
        checkpoint: an open checkpoint.
        family: its family; the spellings it lists are tried in order.
        shape: expected shapes, from the config.
        names: module-tree name -> disk name, if the caller has it (`tree_to_disk`); made here otherwise.
    Raises:
        CheckpointError: an expert's tensor is missing, or has another shape or orientation than declared.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        module: str,
        shape: ExpertShape,
        names: dict[str, str] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.shape = shape
        self.module = module
        self._disk = tree_to_disk(family, checkpoint.names()) if names is None else names
        self.spelling = self._choose(family)
        self._check()

    def tensors(self) -> list[str]:
        """Module-tree names of every tensor this reader reads."""
        s = self.spelling
        if s.kind == "fused":
            relative = [s.gate_up, s.down, *(n for n in (s.gate_up_bias, s.down_bias) if self.shape.bias and n)]
        else:
            relative = [p.format(e=e) for e in range(self.shape.experts) for p in (s.gate, s.up, s.down)]
        return [f"{self.module}.{name}" for name in relative]

    def nbytes(self) -> int:
        """Bytes on disk of all experts of the block."""
        return sum(self.checkpoint.info(self._disk[name]).nbytes for name in self.tensors())

    def _choose(self, family: Family) -> ExpertNames:
        for spelling in family.experts:
            patterns = (spelling.gate_up, spelling.down) if spelling.kind == "fused" else (spelling.gate, spelling.up)
            if any(f"{self.module}.{p.format(e=0)}" in self._disk for p in patterns):
                return spelling
        first = family.experts[0]
        wanted = first.gate_up if first.kind == "fused" else first.gate.format(e=0)
        raise CheckpointError(
            f"{self.checkpoint.path}: no routed experts of {self.module}: tensor '{self.module}.{wanted}' is missing",
            hint=f"the checkpoint does not hold this layer, or spells its experts in a way {family.model_type} does not"
            " know; see docs/adding-a-model.md",
        )

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Relative name pattern -> shape; for per-expert spellings of one expert."""
        s, sh = self.spelling, self.shape
        if s.kind == "per_expert":
            wide, tall = (sh.intermediate, sh.hidden), (sh.hidden, sh.intermediate)
            return {s.gate: wide, s.up: wide, s.down: tall}
        gate_up, down = (2 * sh.intermediate, sh.hidden), (sh.hidden, sh.intermediate)
        if s.transposed:
            gate_up, down = gate_up[::-1], down[::-1]
        out: dict[str, tuple[int, ...]] = {s.gate_up: (sh.experts, *gate_up), s.down: (sh.experts, *down)}
        if sh.bias:
            out[s.gate_up_bias] = (sh.experts, 2 * sh.intermediate)
            out[s.down_bias] = (sh.experts, sh.hidden)
        return out

    def _check(self) -> None:
        experts = range(self.shape.experts) if self.spelling.kind == "per_expert" else range(1)
        for pattern, expected in self._expected().items():
            for e in experts:
                name = f"{self.module}.{pattern.format(e=e)}"
                if name not in self._disk:
                    raise CheckpointError(
                        f"{self.checkpoint.path}: expert tensor {name!r} is missing",
                        hint=f"{self.module} should have {self.shape.experts} experts",
                    )
                info = self.checkpoint.info(self._disk[name])
                if info.shape != expected:
                    turned = (*expected[:-2], expected[-1], expected[-2])
                    why = " (it is transposed)" if info.shape == turned and len(expected) > 1 else ""
                    raise CheckpointError(
                        f"{info.file}: expert tensor {self._disk[name]!r} is {list(info.shape)}{why};"
                        f" the config asks for {list(expected)}",
                        hint="config.json and weights do not belong together, or the family's ExpertNames is wrong",
                    )

    def _read(self, relative: str, index: int | None = None) -> TensorData:
        return self.checkpoint.read(self._disk[f"{self.module}.{relative}"], index)

    def read(self, e: int) -> ExpertWeights:
        """Expert e. Peak memory is this one expert (decoded, if it is quantised)."""
        if not 0 <= e < self.shape.experts:
            raise IndexError(f"{self.module} has {self.shape.experts} experts; there is no expert {e}")
        s = self.spelling
        if s.kind == "per_expert":
            parts = [self._read(pattern.format(e=e)) for pattern in (s.gate, s.up, s.down)]
            arrays, dtype = _same_dtype(parts)
            return ExpertWeights(arrays[0], arrays[1], arrays[2], dtype)
        (gate_up, down), dtype = _same_dtype([self._read(s.gate_up, e), self._read(s.down, e)])
        if s.transposed:
            gate_up, down = gate_up.T, down.T
        gate, up = self._halves(gate_up)
        if not self.shape.bias:
            return ExpertWeights(gate, up, down, dtype)
        gate_bias, up_bias = self._halves(to_fp32(self._read(s.gate_up_bias, e)))
        return ExpertWeights(gate, up, down, dtype, gate_bias, up_bias, to_fp32(self._read(s.down_bias, e)))

    def _halves(self, gate_up: Matrix) -> tuple[Matrix, Matrix]:
        """Gate and up rows of [2I, ..]."""
        if self.spelling.interleaved:
            return gate_up[0::2], gate_up[1::2]
        return gate_up[: self.shape.intermediate], gate_up[self.shape.intermediate :]


def _same_dtype(parts: list[TensorData]) -> tuple[list[Matrix], Dtype]:
    """The arrays and their common data type; mixed types are widened to fp32, which is exact."""
    if len({part.dtype for part in parts}) == 1:
        return [part.array for part in parts], parts[0].dtype
    return [to_fp32(part) for part in parts], "fp32"
