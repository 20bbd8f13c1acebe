"""The most used experts of a MoE layer, computed on the device in decode steps while the CPU computes the others.

Which of a token's experts are here is looked up on the device, and what is computed has a fixed size, so a captured
graph holds for any routing: all hot experts where they are few, else the token's top_k through a gather, and a weight
of zero for whatever was not chosen. The weights are those of the bundle, dequantised once at load; activations are
not quantised, as they are on the CPU. Letters: N hot experts, E experts, H hidden, I intermediate, k top_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktc.cuda.mla import bmm_fp32
from ktc.engine.reference import activate, unpack_expert
from ktc.plan.hot import ALL_UP_TO
from ktc.plan.ir import MoePlan

ELSEWHERE = -1
"""In place of the id of a hot expert for the CPU (runtime/src/cuda/exchange.h)."""


class HotExperts:
    """Of one layer, on one device.

    Args:
        addresses: per node and expert, as `_runtime.Moe` takes them.
        dtype: of the weights on the device.
    """

    def __init__(
        self, plan: MoePlan, addresses: Sequence[Sequence[dict[str, int]]], device: Any, dtype: torch.dtype
    ) -> None:
        self.plan, self.dtype, n = plan, dtype, len(plan.hot)
        shape = {"device": device, "dtype": dtype}
        self.gate_up = torch.empty(n, 2 * plan.intermediate, plan.hidden, **shape)  # [N, 2I, H]
        self.down = torch.empty(n, plan.hidden, plan.intermediate, **shape)  # [N, H, I]
        self.biases: tuple[Tensor, Tensor] | None = None
        if plan.bias:
            self.biases = (torch.empty(n, 2 * plan.intermediate, 1, device=device),
                           torch.empty(n, plan.hidden, 1, device=device))  # fmt: skip
        for slot, expert in enumerate(plan.hot):
            self._load(slot, unpack_expert(plan, [node[expert] for node in addresses]))
        slots = torch.full((plan.experts + 2,), n)  # one before and one after, for ids that are none
        slots[torch.tensor(plan.hot) + 1] = torch.arange(n)
        self._slots = slots.to(device)
        self._numbers = torch.arange(n, device=device)[:, None]
        self._earlier = torch.ones(plan.top_k, plan.top_k, dtype=torch.bool).tril(-1).to(device)
        self.gathers = n > ALL_UP_TO * plan.top_k

    def _load(self, slot: int, expert: tuple[Tensor, ...]) -> None:
        gate, up, down, gate_bias, up_bias, down_bias = expert
        size = self.plan.intermediate
        self.gate_up[slot, :size].copy_(gate[:size])
        self.gate_up[slot, size:].copy_(up[:size])
        self.down[slot].copy_(down[:, :size])
        if self.biases is not None:
            self.biases[0][slot, :, 0].copy_(torch.cat((gate_bias[:size], up_bias[:size])))
            self.biases[1][slot, :, 0].copy_(down_bias)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.gate_up, self.down, *(self.biases or ())))

    def slots(self, ids: Tensor, weights: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Where a token's experts are.

        Args:
            ids: i64 [1, k]; weights: f32 [1, k]; kept: i64 [], experts that are not skipped.
        Returns:
            slots i64 [k], N for an expert that is not here; and weights f32 [k], zero where it is not here or skipped.
        """
        slots = self._slots.index_select(0, ids[0].clamp(-1, self.plan.experts) + 1)
        weights = weights[0]
        rank = _ahead(weights, self._earlier).sum(1)  # as the CPU sorts them
        return slots, weights.masked_fill((slots == len(self.plan.hot)) | (rank >= kept), 0.0)

    def compute(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """x [1, H] of any type, and what `slots` returned -> f32 [1, H], the weighted sum of the hot experts."""
        gate_up, down, biases = self.gate_up, self.down, self.biases
        if self.gathers:
            picked = slots.clamp(max=len(self.plan.hot) - 1)
            gate_up, down = gate_up.index_select(0, picked), down.index_select(0, picked)
            biases = biases and (biases[0].index_select(0, picked), biases[1].index_select(0, picked))
        else:
            weights = weights.expand(len(gate_up), -1).masked_fill(slots != self._numbers, 0.0).sum(1)
        column = x.to(self.dtype).t().expand(len(gate_up), -1, 1)  # [n, H, 1]
        hidden = bmm_fp32(gate_up, column)
        hidden = hidden + biases[0] if biases else hidden
        gate, up = hidden.chunk(2, 1)
        out = bmm_fp32(down, activate(self.plan, gate, up).to(self.dtype))
        out = out + biases[1] if biases else out
        out = out[..., 0].masked_fill((weights == 0)[:, None], 0.0)  # an overflow of an unused one is nobody's
        return (weights[:, None] * out).sum(0, keepdim=True)


def _ahead(weights: Tensor, earlier: Tensor) -> Tensor:
    """[k, k]: whether j comes before i when the CPU sorts the weights: descending, stable, NaN first."""
    mine, other = weights[:, None], weights[None, :]
    return _before(other, mine) | (earlier & ~_before(mine, other))


def _before(a: Tensor, b: Tensor) -> Tensor:
    return (a > b) | ((a != a) & (b == b))
