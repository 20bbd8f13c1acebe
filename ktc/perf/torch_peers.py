"""PyTorch's experts as contestants: bf16 `grouped_mm` (what Hugging Face runs), int4 and int8 weight-only.

Each does what a user would write with that operation and no more: sort by expert, multiply, silu * up, weighted sum.
Imports torch; only the benchmark imports this file.
Letters: E experts, H hidden, I expert intermediate size, T tokens, S = T * k rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktc.errors import KtcError
from ktc.perf.dense_experts import DenseExpert
from ktc.perf.routing import Routing
from ktc.perf.shapes import MoeShape

INT4_GROUP = 128


class TorchExperts:
    """What the peers share: layers, inputs, routing, the weighted sum."""

    data_type = "bf16"
    settle = 0.03  # libgomp's threads spin after a parallel region unless told otherwise
    bits: float
    expert_bytes: float

    def __init__(self, name: str, shape: MoeShape, layers: int) -> None:
        self.name, self.shape, self.layers = name, shape, layers
        self.experts = shape.experts
        self._out: Tensor = torch.zeros(0, shape.hidden)

    def prepare(self, layer: int, x: NDArray[np.float32], routing: Routing) -> Callable[[], None]:
        xt = torch.from_numpy(x).to(torch.bfloat16)
        ids, weights = torch.from_numpy(routing.ids), torch.from_numpy(routing.weights)

        def call() -> None:
            with torch.inference_mode():
                self._out = self._forward(layer, xt, ids, weights)

        return call

    def _forward(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        k = ids.shape[1]
        sorted_ids, order = torch.sort(ids.reshape(-1))
        counts = torch.bincount(sorted_ids, minlength=self.shape.experts)
        rows = x[order // k]  # [S, H]
        y = self._experts(layer, rows, counts)  # [S, H]
        y = y * weights.reshape(-1)[order].unsqueeze(1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return y[inverse].view(x.shape[0], k, -1).sum(dim=1)

    def _experts(self, layer: int, rows: Tensor, counts: Tensor) -> Tensor:
        raise NotImplementedError

    def output(self) -> NDArray[np.float32]:
        return self._out.float().numpy()

    def about(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "threads": torch.get_num_threads()}


def _require_multiples(name: str, shape: MoeShape, of: int) -> None:
    if shape.hidden % of or shape.intermediate % of:
        raise KtcError(f"{name} needs dimensions that are multiples of {of}")


class GroupedMM(TorchExperts):
    """bf16 weights, one `grouped_mm` for gate and up of all experts and one for down.

    Raises:
        KtcError: this torch has no such operation, or a dimension is not a multiple of 8 (16 bytes).
    """

    def __init__(self, shape: MoeShape, experts: list[DenseExpert], layers: int) -> None:
        super().__init__("torch bf16 grouped_mm", shape, layers)
        self._mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if self._mm is None:
            raise KtcError("this torch has no grouped_mm")
        _require_multiples(self.name, shape, 8)
        self.bits = 16.0
        self.expert_bytes = 2.0 * shape.expert_params
        e, h, i = shape.experts, shape.hidden, shape.intermediate
        self._gate_up = [torch.empty(e, 2 * i, h, dtype=torch.bfloat16) for _ in range(layers)]
        self._down = [torch.empty(e, h, i, dtype=torch.bfloat16) for _ in range(layers)]
        for number, dense in enumerate(experts):
            gate_up = torch.from_numpy(np.concatenate([dense.gate, dense.up])).to(torch.bfloat16)
            down = torch.from_numpy(dense.down).to(torch.bfloat16)
            for layer in range(layers):
                self._gate_up[layer][number :: len(experts)] = gate_up
                self._down[layer][number :: len(experts)] = down

    def _experts(self, layer: int, rows: Tensor, counts: Tensor) -> Tensor:
        assert self._mm is not None
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate_up = self._mm(rows, self._gate_up[layer].transpose(-2, -1), offs=offsets)
        gate, up = gate_up.chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate) * up
        y: Tensor = self._mm(h, self._down[layer].transpose(-2, -1), offs=offsets)
        return y


class _Loop(TorchExperts):
    """One weight-only multiplication per matrix of each active expert."""

    def _experts(self, layer: int, rows: Tensor, counts: Tensor) -> Tensor:
        out = torch.empty(rows.shape[0], self.shape.hidden, dtype=rows.dtype)
        begin = 0
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            part = rows[begin : begin + count]
            gate, up = self._multiply(layer, expert, "gate_up", part).chunk(2, dim=-1)
            h = torch.nn.functional.silu(gate) * up
            out[begin : begin + count] = self._multiply(layer, expert, "down", h)
            begin += count
        return out

    def _multiply(self, layer: int, expert: int, matrix: str, x: Tensor) -> Tensor:
        raise NotImplementedError


class Int4Pack(_Loop):
    """`aten::_weight_int4pack_mm_for_cpu`, groups of 128, bf16 activations.

    Raises:
        KtcError: this torch has no such operation, or a dimension is not a multiple of the group.
    """

    def __init__(self, shape: MoeShape, experts: list[DenseExpert], layers: int) -> None:
        super().__init__(f"torch int4pack g{INT4_GROUP}", shape, layers)
        if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
            raise KtcError("this torch has no _weight_int4pack_mm_for_cpu")
        _require_multiples(self.name, shape, INT4_GROUP)
        packed = [{"gate_up": _int4(np.concatenate([d.gate, d.up])), "down": _int4(d.down)} for d in experts]
        self.expert_bytes = float(sum(t.nbytes for pair in packed[0].values() for t in pair))
        self.bits = 8 * self.expert_bytes / shape.expert_params
        self._weights = _replicate(packed, shape.experts, layers)

    def _multiply(self, layer: int, expert: int, matrix: str, x: Tensor) -> Tensor:
        weight, scales = self._weights[layer][expert][matrix]
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, INT4_GROUP, scales)
        return y


class Int8Pack(_Loop):
    """`aten::_weight_int8pack_mm`, one scale per output row, bf16 activations.

    Raises:
        KtcError: this torch has no such operation, or a dimension is not a multiple of 16 (it then reads past its
            operands and may end the process).
    """

    def __init__(self, shape: MoeShape, experts: list[DenseExpert], layers: int) -> None:
        super().__init__("torch int8pack", shape, layers)
        if not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
            raise KtcError("this torch has no _weight_int8pack_mm")
        _require_multiples(self.name, shape, 16)
        packed = [{"gate_up": _int8(np.concatenate([d.gate, d.up])), "down": _int8(d.down)} for d in experts]
        self.expert_bytes = float(sum(t.nbytes for pair in packed[0].values() for t in pair))
        self.bits = 8 * self.expert_bytes / shape.expert_params
        self._weights = _replicate(packed, shape.experts, layers)

    def _multiply(self, layer: int, expert: int, matrix: str, x: Tensor) -> Tensor:
        weight, scales = self._weights[layer][expert][matrix]
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x, weight, scales)
        return y


Pair = tuple[Tensor, Tensor]


def _int4(w: NDArray[np.float32]) -> Pair:
    """Asymmetric int4 per group of the row, as torch's own weight-only quantisation does it. w is [N, K]."""
    n, k = w.shape
    groups = torch.from_numpy(w).reshape(n, k // INT4_GROUP, INT4_GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6).to(torch.bfloat16).float()
    q = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).reshape(n, k)
    zero = low + 8 * scale
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    scales = torch.stack([scale.squeeze(-1), zero.squeeze(-1)], dim=-1).transpose(0, 1).contiguous()  # [K/g, N, 2]
    return packed, scales.to(torch.bfloat16)


def _int8(w: NDArray[np.float32]) -> Pair:
    t = torch.from_numpy(w)
    scale = t.abs().amax(1, keepdim=True) / 127
    return (t / scale).round().to(torch.int8), scale.squeeze(1).to(torch.bfloat16)


def _replicate(packed: list[dict[str, Pair]], experts: int, layers: int) -> list[list[dict[str, Pair]]]:
    """[layer][expert] with memory of its own for each."""
    return [
        [{name: (a.clone(), b.clone()) for name, (a, b) in packed[e % len(packed)].items()} for e in range(experts)]
        for _ in range(layers)
    ]
