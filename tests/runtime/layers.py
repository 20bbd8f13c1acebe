"""A random MoE layer, packed for any number of nodes, and what numpy says about it.

The reference dequantises the packed weights and quantises activations as abi.h defines, in float64, so it
checks the runtime (and a kernel library), not the error of quantisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ktc.layout import MatrixLayout, QuantScheme, intermediate_pad, round_up, split_intermediate, split_unit
from ktc.pack.tiles import bf16_bits, bf16_values

F32 = np.ndarray


def aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


@dataclass
class Packed:
    tiles: np.ndarray
    scale: np.ndarray
    mult: np.ndarray
    dense: np.ndarray  # dequantised, stored rows, [n_pad, k_pad]

    def pointers(self, prefix: str) -> dict[str, int]:
        return {
            prefix: self.tiles.ctypes.data,
            f"{prefix}_scale": self.scale.ctypes.data if self.scale.size else 0,
            f"{prefix}_mult": self.mult.ctypes.data if self.mult.size else 0,
        }


def pack(w: F32, rows: np.ndarray, scheme: QuantScheme) -> Packed:
    from ktc import _runtime

    w = np.ascontiguousarray(w, np.float32)
    layout = MatrixLayout(len(rows), w.shape[1], scheme)
    tiles, scale = aligned(layout.tile_bytes), np.zeros(layout.scale_count, np.float32)
    mult, dense = np.zeros(layout.mult_bytes, np.uint8), np.zeros((layout.n_pad, layout.k_pad), np.float32)
    kind = (scheme.data_type, scheme.scale, scheme.group)
    out = (tiles.ctypes.data, scale.ctypes.data, mult.ctypes.data)
    _runtime.pack_matrix(w.ctypes.data, "fp32", rows, w.shape[1], w.shape[1], 1, *kind, *out)
    _runtime.unpack_matrix(*out, layout.n_pad, layout.k_pad, *kind, dense.ctypes.data)
    return Packed(tiles, scale, mult, dense)


def plain_rows(n: int) -> np.ndarray:
    rows = np.full(round_up(n, 32), -1, np.int64)
    rows[:n] = np.arange(n)
    return rows


def columns(p: Packed, scheme: QuantScheme, begin: int, end: int) -> Packed:
    """The part of a packed matrix that a node with k in [begin, end) has: whole tiles, never requantised."""
    n_pad, k_pad = p.dense.shape
    layout = MatrixLayout(n_pad, k_pad, scheme)
    per_step = layout.block_bytes // layout.steps
    step = k_pad // layout.steps
    cut = p.tiles.reshape(n_pad // 32, layout.steps, per_step)[:, begin // step : end // step]
    tiles = aligned(cut.size)
    tiles[:] = cut.reshape(-1)
    scale, mult = p.scale, p.mult
    if scheme.group:
        groups = slice(begin // scheme.group, -(-end // scheme.group))
        of = scheme.groups(k_pad)
        if scheme.scale == "group":
            scale = np.ascontiguousarray(scale.reshape(n_pad // 32, of, 32)[:, groups]).reshape(-1)
        else:
            mult = np.ascontiguousarray(mult.reshape(n_pad // 32, of, -1)[:, groups]).reshape(-1)
    return Packed(tiles, scale, mult, p.dense[:, begin:end])


def quantized_activations(x: np.ndarray, data_type: str) -> np.ndarray:
    """[M, K] float64 as the kernels see it."""
    if data_type == "fp32":
        return x.astype(np.float32).astype(np.float64)
    if data_type == "bf16":
        return bf16_values(bf16_bits(x.astype(np.float32))).astype(np.float64)
    amax = np.abs(x).max(axis=1, keepdims=True)
    safe = np.where(amax > 0, amax, 1)
    return np.clip(np.rint(x * (127 / safe)), -127, 127) * (amax / 127)


def activate(kind: str, gate: np.ndarray, up: np.ndarray, alpha: float, limit: float) -> np.ndarray:
    if kind != "silu_mul":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if kind == "swiglu_oai":
        return (up + 1) * gate / (1 + np.exp(-alpha * gate))
    return gate / (1 + np.exp(-gate)) * up


@dataclass
class Layer:
    """E experts [H -> I -> H] with random weights, quantised once."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    scheme: QuantScheme
    activation: str = "silu_mul"
    alpha: float = 0.0
    limit: float = 0.0
    bias: bool = False
    seed: int = 0
    keep: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        h, i, e = self.hidden, self.intermediate, self.experts
        self.i_pad = intermediate_pad(i)
        gate_up = rng.standard_normal((e, 2 * i, h)).astype(np.float32) / np.float32(np.sqrt(h))
        down = rng.standard_normal((e, h, i)).astype(np.float32) / np.float32(np.sqrt(i))
        self.gate_up = [pack(w, self.interleaved(0, self.i_pad), self.scheme) for w in gate_up]
        self.down = [pack(w, plain_rows(h), self.scheme) for w in down]
        self.gate_up_bias = np.zeros((e, 2 * self.i_pad), np.float32)  # stored order
        self.down_bias = np.zeros((e, round_up(h, 32)), np.float32)
        if self.bias:
            b = rng.standard_normal((e, 2 * i)).astype(np.float32)
            rows = self.interleaved(0, self.i_pad)
            self.gate_up_bias[:, rows >= 0] = b[:, rows[rows >= 0]]
            self.down_bias[:, :h] = rng.standard_normal((e, h))

    def interleaved(self, begin: int, end: int) -> np.ndarray:
        """Stored row -> row of [gate; up]: 16 gate rows, then the 16 up rows of the same columns."""
        i = np.arange(begin, end).reshape(-1, 16)
        real = i < self.intermediate
        rows = np.stack([np.where(real, i, -1), np.where(real, i + self.intermediate, -1)], axis=1)
        return rows.reshape(-1).astype(np.int64)

    def node_weights(self, nodes: int) -> tuple[list[tuple[int, int]], list[list[dict[str, int]]]]:
        splits = split_intermediate(self.intermediate, nodes, split_unit(self.scheme))
        weights = []
        for node, (begin, end) in enumerate(splits):
            experts = []
            for e in range(self.experts):
                gate_up = rows_of(self.gate_up[e], self.scheme, 2 * begin, 2 * end)
                down = columns(self.down[e], self.scheme, begin, end)
                bias = np.ascontiguousarray(self.gate_up_bias[e, 2 * begin : 2 * end])
                self.keep += [gate_up, down, bias]
                pointers = {**gate_up.pointers("gate_up"), **down.pointers("down")}
                if self.bias:
                    pointers["gate_up_bias"] = bias.ctypes.data
                    if node == 0:
                        pointers["down_bias"] = self.down_bias[e].ctypes.data
                experts.append(pointers)
            weights.append(experts)
        return splits, weights

    def build(self, lib: Any, pool: Any, **options: Any) -> Any:
        from ktc import _runtime

        splits, weights = self.node_weights(pool.nodes)
        arguments: dict[str, Any] = {
            "experts": self.experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "activation": self.activation,
            "alpha": self.alpha,
            "limit": self.limit,
            "data_type": self.scheme.data_type,
            "scale": self.scheme.scale,
            "group": self.scheme.group,
            "splits": splits,
            "weights": weights,
        }
        return _runtime.Moe(lib, pool, **{**arguments, **options})

    def route(self, tokens: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x [T, H], ids [T, k] (distinct per row), weights [T, k]."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((tokens, self.hidden)).astype(np.float32)
        order = [rng.permutation(self.experts)[: self.top_k] for _ in range(tokens)]
        ids = np.array(order, np.int64).reshape(tokens, self.top_k)
        return x, ids, rng.random((tokens, self.top_k)).astype(np.float32)

    def reference(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        kind = self.scheme.data_type
        out = np.zeros((len(x), self.hidden))
        rows = self.interleaved(0, self.i_pad)
        at = np.argsort(np.where(rows < 0, 1 << 30, rows), kind="stable")[: 2 * self.intermediate]
        for e in np.unique(ids):
            token, slot = np.nonzero(ids == e)
            xq = np.zeros((len(token), round_up(self.hidden, 64)))
            xq[:, : self.hidden] = quantized_activations(x[token].astype(np.float64), kind)
            y = xq @ self.gate_up[e].dense[at].astype(np.float64).T + self.gate_up_bias[e, at]
            gate, up = y[:, : self.intermediate], y[:, self.intermediate :]
            h = np.zeros((len(token), self.i_pad))
            h[:, : self.intermediate] = activate(self.activation, gate, up, self.alpha, self.limit)
            h = quantized_activations(h, kind)
            y = h @ self.down[e].dense[: self.hidden].astype(np.float64).T + self.down_bias[e, : self.hidden]
            np.add.at(out, token, weights[token, slot, None] * y)
        return out


def rows_of(p: Packed, scheme: QuantScheme, begin: int, end: int) -> Packed:
    """Stored rows [begin, end), whole blocks."""
    n_pad, k_pad = p.dense.shape
    layout = MatrixLayout(n_pad, k_pad, scheme)
    tiles = aligned((end - begin) // 32 * layout.block_bytes)
    tiles[:] = p.tiles[begin // 32 * layout.block_bytes : end // 32 * layout.block_bytes]
    per_row = scheme.groups(k_pad) if scheme.scale == "group" else 1
    scale = np.ascontiguousarray(p.scale[begin * per_row : end * per_row]) if p.scale.size else p.scale
    per_block = p.mult.size // (n_pad // 32)
    mult = np.ascontiguousarray(p.mult[begin // 32 * per_block : end // 32 * per_block])
    return Packed(tiles, scale, mult, p.dense[begin:end])


def run(moe: Any, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`forward` into a poisoned output."""
    out = np.full(x.shape, np.nan, np.float32)
    args = (x.ctypes.data, x.shape[1], len(x), ids.ctypes.data, weights.ctypes.data)
    moe.forward(*args, out.ctypes.data, out.shape[1])
    return out
