"""The oracle: packed modules computed in plain torch, from the unpacked weights and quantised activations.

For tests. int8 and int4 kernels must equal it up to fp32 rounding, because integer products are exact;
bf16 and fp32 modules use the unpacked weights and unquantised activations. Slow on purpose: one
expert at a time, no blocking, no threads.
Letters: M rows, N outputs, K columns, T tokens, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ktc.engine.build import expert_addresses, set_module
from ktc.engine.linear import KtcLinear
from ktc.engine.moe import KtcFusedMoE
from ktc.engine.weights import WeightStore
from ktc.layout import MatrixLayout
from ktc.plan.ir import MoePlan


def unpack(layout: MatrixLayout, tiles: int, scale: int = 0, mult: int = 0) -> Tensor:
    """Dequantised W [n_pad, k_pad] fp32 in stored row order; arguments are addresses."""
    from ktc import _runtime

    out = np.empty((layout.n_pad, layout.k_pad), np.float32)
    s = layout.scheme
    _runtime.unpack_matrix(
        tiles, scale, mult, layout.n_pad, layout.k_pad, s.data_type, s.scale, s.group, out.ctypes.data
    )
    return torch.from_numpy(out)


def quantise_rows(x: Tensor, amax: Tensor | None = None) -> Tensor:
    """x [M, K] rounded as the integer kernels round activations (abi.h), and back to fp32.

    Args:
        amax: known largest magnitude per row [M] (the whole row's, where x is one node's slice).
    """
    a = x.abs().amax(dim=1) if amax is None else amax
    top = torch.full_like(a, 127.0)  # a tensor: torch computes `127 / a` as a reciprocal and a product
    inverse = torch.where(a > 1e-36, top / a, torch.zeros_like(a))  # below, 127 / a overflows
    q = torch.clamp(torch.round(x * inverse[:, None]), -127, 127)
    return q * (a / top)[:, None]


def activate(plan: MoePlan, gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of abi.h."""
    if plan.activation == "silu_mul":
        return nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=plan.limit), up.clamp(-plan.limit, plan.limit)
    if plan.activation == "silu_clamp":
        return nn.functional.silu(gate) * up
    return (up + 1) * gate * torch.sigmoid(plan.alpha * gate)


def rows_of_gate(i_pad: int) -> tuple[Tensor, Tensor]:
    """Stored rows of gate and of up for a slice of i_pad: blocks of 16 gate, then 16 up (abi.h)."""
    stored = torch.arange(2 * i_pad).view(-1, 32)
    return stored[:, :16].reshape(-1), stored[:, 16:].reshape(-1)


def unpack_expert(plan: MoePlan, nodes: list[dict[str, int]]) -> tuple[Tensor, ...]:
    """One expert, dequantised, all its nodes together: gate, up [I_pad, H], down [H, I_pad] and the bias of each, fp32.

    Args:
        nodes: per node the addresses that `_runtime.Moe` takes.
    """
    p, gates, ups, downs = plan, [], [], []
    gate_bias, up_bias, down_bias = [], [], torch.zeros(p.hidden)
    for node, at in enumerate(nodes):
        layout, down_layout = p.gate_up_layout(node), p.down_layout(node)
        w = unpack(layout, at["gate_up"], at["gate_up_scale"], at["gate_up_mult"])[:, : p.hidden]
        width = p.splits[node][1] - p.splits[node][0]
        g, u = rows_of_gate(width)
        gates.append(w[g])
        ups.append(w[u])
        d = unpack(down_layout, at["down"], at["down_scale"], at["down_mult"])
        downs.append(d[: p.hidden, :width])
        bias = _floats(at["gate_up_bias"], layout.n_pad)
        gate_bias.append(bias[g])
        up_bias.append(bias[u])
        if at["down_bias"]:
            down_bias = _floats(at["down_bias"], down_layout.n_pad)[: p.hidden]
    return (
        torch.cat(gates),
        torch.cat(ups),
        torch.cat(downs, 1),
        torch.cat(gate_bias),
        torch.cat(up_bias),
        down_bias,
    )


class ReferenceMoE(nn.Module):
    """Routed experts [T, H] -> [T, H] of one layer, all nodes.

    Args:
        plan: of the layer.
        weights: per node and expert, the addresses that `_runtime.Moe` takes.
    """

    def __init__(self, plan: MoePlan, weights: list[list[dict[str, int]]]) -> None:
        super().__init__()
        self.plan = plan
        self.integer = plan.data_type in ("int8", "int4")
        gates, ups, downs, biases = [], [], [], []
        for expert in range(plan.experts):
            gate, up, down, gate_bias, up_bias, down_bias = unpack_expert(plan, [node[expert] for node in weights])
            gates.append(gate)
            ups.append(up)
            downs.append(down)
            biases.append((gate_bias, up_bias, down_bias))
        self.gate, self.up, self.down, self.biases = gates, ups, downs, biases

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids [T, k], weights [T, k] -> [T, H]; summed in the order of expert ids."""
        out = torch.zeros_like(x)
        for expert, token, slot, h in self._hidden(x, ids):
            h = quantise_rows(h) if self.integer else h
            y = h @ self.down[expert].T + self.biases[expert][2]
            out.index_add_(0, token, weights[token, slot, None].float() * y)
        return out

    def undecided(self, x: Tensor, ids: Tensor, margin: float = 2e-4) -> Tensor:
        """Tokens [T] (bool) with a hidden activation within `margin` steps of a rounding boundary.

        There a last-bit difference in the activation function moves a whole quantisation step.
        """
        out = torch.zeros(x.shape[0], dtype=torch.bool)
        for _, token, _, h in self._hidden(x, ids) if self.integer else ():
            steps = (h * (127.0 / h.abs().amax(1, keepdim=True).clamp(min=1e-36))).abs()
            out[token] |= ((steps - steps.floor() - 0.5).abs() < margin).any(1)
        return out

    def _hidden(self, x: Tensor, ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """(expert, its tokens [M], their slots [M], activations h [M, I]) in the order of expert ids."""
        xq = quantise_rows(x) if self.integer else x
        for expert in sorted({int(i) for i in ids.flatten()}):
            token, slot = torch.where(ids == expert)
            gate_bias, up_bias, _ = self.biases[expert]
            gate = xq[token] @ self.gate[expert].T + gate_bias
            up = xq[token] @ self.up[expert].T + up_bias
            yield expert, token, slot, activate(self.plan, gate, up)


class ReferenceLinear(nn.Module):
    """y [..., n] of a packed linear, from its addresses."""

    def __init__(self, layout: MatrixLayout, n: int, tiles: int, scale: int = 0, mult: int = 0, bias: int = 0) -> None:
        super().__init__()
        self.weight = unpack(layout, tiles, scale, mult)[:n, : layout.k]
        self.bias = _floats(bias, layout.n_pad)[:n]
        self.integer = layout.scheme.data_type in ("int8", "int4")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        rows = quantise_rows(rows) if self.integer else rows
        return (rows @ self.weight.T + self.bias).view(*x.shape[:-1], -1)


class _ReferenceBlock(nn.Module):
    """A MoE block whose routed experts are the reference's; everything else is the ktc block's own."""

    def __init__(self, block: KtcFusedMoE, experts: ReferenceMoE) -> None:
        super().__init__()
        self.block, self.experts = block, experts

    def forward(self, hidden_states: Tensor) -> Any:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self.block.route(x)
        out = self.experts(x, ids, weights)
        shared = self.block.shared_output(x)
        if shared is not None:
            out = out + shared
        out = out.view(hidden_states.shape)
        return (out, weights) if self.block.family.returns_scores else out


def reference_modules(model: Any) -> dict[str, nn.Module]:
    """The oracle of every native operator of a loaded model: module name -> ReferenceMoE or ReferenceLinear."""
    store = model.ktc_store
    temporary = WeightStore(store.bundle, store.pool)  # the model's own copy is not touched
    out: dict[str, nn.Module] = {}
    for planned in model.ktc_plan.modules:
        if planned.moe is not None:
            nodes = range(len(planned.moe.splits))
            weights = [expert_addresses(temporary, planned.name, planned.moe, node) for node in nodes]
            out[planned.name] = ReferenceMoE(planned.moe, weights)
        elif planned.linear is not None:
            keys = [
                k for k in ("tiles", "scale", "mult", "bias") if (None, f"{planned.name}.{k}") in store.bundle.tensors
            ]
            at = temporary.read([(key, store.ref(f"{planned.name}.{key}")) for key in keys])
            out[planned.name] = ReferenceLinear(planned.linear.layout, planned.linear.n, **at)
    return out


def reference_model(model: Any) -> Any:
    """A copy of a loaded model (`ktc.load`) in which every native operator is the oracle's. Shares nothing native."""
    held = {name: model.__dict__.pop(name) for name in ("ktc_store", "ktc_plan", "ktc_report")}
    natives = {n: m for n, m in model.named_modules() if isinstance(m, KtcLinear | KtcFusedMoE)}
    operators = {name: module.__dict__.pop("native") for name, module in natives.items()}
    try:
        twin = copy.deepcopy(model)
    finally:
        model.__dict__.update(held)
        for name, operator in operators.items():
            natives[name].native = operator
    oracle = reference_modules(model)
    blocks = [name for name, module in oracle.items() if isinstance(module, ReferenceMoE)]
    for name, module in oracle.items():
        if not isinstance(module, ReferenceMoE):
            set_module(twin, name, module)
    for name in blocks:
        experts: Any = oracle[name]
        set_module(twin, name, _ReferenceBlock(twin.get_submodule(name), experts))
    return twin


def _floats(address: int, count: int) -> Tensor:
    import ctypes

    if not address:
        return torch.zeros(count)
    raw = (ctypes.c_float * count).from_address(address)
    return torch.from_numpy(np.array(np.ctypeslib.as_array(raw)))
