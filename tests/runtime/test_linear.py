"""The dense linear against numpy, over the reference kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktc.layout import QuantScheme, round_up
from tests.runtime.layers import pack, plain_rows, quantized_activations

_runtime = pytest.importorskip("ktc._runtime")

SCHEMES = [
    QuantScheme("fp32"),
    QuantScheme("bf16"),
    QuantScheme("int8", "channel"),
    QuantScheme("int8", "group", 128),
    QuantScheme("int4", "group", 128),
    QuantScheme("int4", "integer", 64),
    QuantScheme("int4", "codebook", 16),
]


class Dense:
    def __init__(self, n: int, k: int, scheme: QuantScheme, bias: bool = True) -> None:
        rng = np.random.default_rng(n * k)
        self.n, self.k, self.scheme = n, k, scheme
        self.packed = pack(rng.standard_normal((n, k)).astype(np.float32), plain_rows(n), scheme)
        self.bias = np.zeros(round_up(n, 32), np.float32)
        self.bias[:n] = rng.standard_normal(n) if bias else 0

    def build(self, lib: Any, pool: Any, force: str = "") -> Any:
        p = self.packed
        scheme = (self.scheme.data_type, self.scheme.scale, self.scheme.group)
        pointers = (p.tiles.ctypes.data, p.scale.ctypes.data, p.mult.ctypes.data, self.bias.ctypes.data)
        return _runtime.Linear(lib, pool, self.n, self.k, *scheme, *pointers, force)

    def reference(self, x: np.ndarray) -> np.ndarray:
        xq = quantized_activations(x.astype(np.float64), self.scheme.data_type)
        return xq @ self.packed.dense[: self.n, : self.k].astype(np.float64).T + self.bias[: self.n]


def run(linear: Any, x: np.ndarray, n: int, pad: int = 3) -> np.ndarray:
    """Into a wider, poisoned output, whose margin must stay as it is."""
    y = np.full((len(x), n + pad), np.nan, np.float32)
    linear.forward(x.ctypes.data, x.strides[0] // 4, len(x), y.ctypes.data, n + pad)
    assert np.isnan(y[:, n:]).all()
    return y[:, :n]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("n,k", [(1, 1), (33, 70), (96, 192)])
def test_s5_matches_numpy(reference_lib: Any, pool: Any, scheme: QuantScheme, n: int, k: int) -> None:
    """failures.md S5: exact for every M from 0 up."""
    dense = Dense(n, k, scheme)
    linear = dense.build(reference_lib, pool)
    for m in (0, 1, 2, 15, 16, 17, 33):
        x = np.random.default_rng(m).standard_normal((m, k + 5)).astype(np.float32)[:, :k]
        want = dense.reference(x)
        assert np.linalg.norm(run(linear, x, n) - want) <= 1e-5 * max(1, np.linalg.norm(want))


@pytest.mark.parametrize("nodes", [[[0]], [[0, 1]], [[0, 1, 0, 1, 0]], [[0], [1, 0], [1]]])
def test_same_bits_for_every_pool(reference_lib: Any, pool: Any, nodes: list[list[int]]) -> None:
    dense = Dense(200, 128, QuantScheme("int4", "integer", 64))
    x = np.random.default_rng(0).standard_normal((70, 128)).astype(np.float32)
    want = run(dense.build(reference_lib, pool), x, 200)
    assert np.array_equal(run(dense.build(reference_lib, _runtime.Pool(nodes, pin=False)), x, 200), want)


def test_rows_in_chunks(reference_lib: Any, pool: Any) -> None:
    dense = Dense(3, 16, QuantScheme("fp32"))
    x = np.random.default_rng(0).standard_normal((9001, 16)).astype(np.float32)
    got = run(dense.build(reference_lib, pool), x, 3)
    assert np.allclose(got, dense.reference(x), rtol=1e-5, atol=1e-5)


def test_report_and_force(reference_lib: Any, pool: Any) -> None:
    dense = Dense(40, 64, QuantScheme("bf16"))
    linear, x = dense.build(reference_lib, pool), np.ones((6, 64), np.float32)
    run(linear, x[:1], 40)
    run(linear, x, 40)
    run(linear, x, 40)
    assert linear.report() == {"kernels": {"reference_few": 1, "reference_many": 2}, "threads": 2, "nodes": 1}
    with pytest.raises(ValueError, match="name contains 'avx512'"):
        dense.build(reference_lib, pool, "avx512")


def test_rejects_missing_weights(reference_lib: Any, pool: Any) -> None:
    good = Dense(32, 64, QuantScheme("int4", "integer", 64)).packed
    tiles, scale = good.tiles.ctypes.data, good.scale.ctypes.data
    for pointers, message in [
        ((0, scale, 1), "64-byte aligned"),
        ((tiles + 16, scale, 1), "64-byte aligned"),
        ((tiles, 0, 1), "needs scales"),
        ((tiles, scale, 0), "need multipliers"),
    ]:
        with pytest.raises(ValueError, match=message):
            _runtime.Linear(reference_lib, pool, 32, 64, "int4", "integer", 64, *pointers, 0)
