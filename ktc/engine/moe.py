"""`KtcFusedMoE`: the MoE block with its routed experts in the native runtime.

The router stays Hugging Face's module (or the family's `route`), so routing is theirs to the bit
(failures R1-R5). Routed experts are submitted, the shared expert runs on the lane meanwhile, then both are
added. What this file is not: the experts' arithmetic (runtime/src) or loading them (experts.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktc.engine import ops
from ktc.models.family import Family
from ktc.plan.ir import MoePlan


class KtcFusedMoE(nn.Module):
    """Takes over every child, buffer and parameter of the block it replaces except its experts, under their names.

    Input and output [..., H] of one type (sums in f32); any leading shape. Blocks that return their router's scores
    (gpt-oss) still do.
    """

    def __init__(self, block: nn.Module, family: Family, plan: MoePlan) -> None:
        super().__init__()
        self.plan, self.family = plan, family
        for name, child in block.named_children():
            if name != "experts":
                self.add_module(name, child)
        for name, buffer in block.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in block._non_persistent_buffers_set)
        for name, parameter in block.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.native: Any = None
        self._handle = 0

    def attach(self, native: Any) -> None:
        """`native`: the `_runtime.Moe` of this layer."""
        self.native = native
        self._handle = ops.register(native)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (weights [T, top_k] with every scale applied, ids [T, top_k] in no particular order)."""
        if self.family.route is not None:
            return self.family.route(self, x)
        _, weights, ids = getattr(self, self.family.router)(x)
        return weights, ids

    def shared_output(self, x: Tensor) -> Tensor | None:
        """The shared expert on x [T, H], through its sigmoid gate where there is one (failure R6)."""
        if self.family.shared is None:
            return None
        shared = getattr(self, self.family.shared, None)
        if shared is None:
            return None
        out: Tensor = shared(x)
        if self.family.shared_gate is not None:
            out = torch.sigmoid(getattr(self, self.family.shared_gate)(x)) * out
        return out

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]
        weights, ids = self.route(x)
        ticket = ops.moe_submit(x, ids, weights, self._handle)
        try:
            shared = self.shared_output(x)
        except BaseException:
            ops.moe_collect(ticket, x, self._handle)  # a ticket left open would be the next layer's surprise
            raise
        out = ops.moe_collect(ticket, x, self._handle)
        if shared is not None:
            out = out.add_(shared)
        out = out.view(hidden_states.shape).to(hidden_states.dtype)
        return (out, weights) if self.family.returns_scores else out

    def extra_repr(self) -> str:
        p = self.plan
        return f"experts={p.experts}, top_k={p.top_k}, {p.hidden} -> {p.intermediate}, {p.scheme}, {p.activation}"
