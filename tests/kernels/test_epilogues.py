"""What happens after the product: bias, scatter, gated activations, the running row maximum."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ktc.layout import QuantScheme
from tests.kernels.conftest import SCHEMES
from tests.kernels.native import KernelLibrary
from tests.kernels.reference import gated, gemm, random_weights

SOME = [SCHEMES[0], SCHEMES[1], SCHEMES[2], QuantScheme("int4", "integer", 64), QuantScheme("int4", "group", 32)]
GATED = ("silu_mul", "silu_clamp", "swiglu_oai")
some_schemes = pytest.mark.parametrize("scheme", SOME, ids=str)


@some_schemes
@pytest.mark.parametrize("with_bias", [False, True])
def test_r7_gated_activations(library: KernelLibrary, scheme: QuantScheme, with_bias: bool) -> None:
    # failure R7: gpt-oss's clamp and expert bias are applied, exactly once, to the right half.
    rng = np.random.default_rng(1)
    m, inter, k = 35, 64, 100
    w = random_weights(2 * inter, k, scheme, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    bias = rng.standard_normal(2 * inter).astype(np.float32) if with_bias else None
    y = gemm(x, w) + (0 if bias is None else bias)
    limit = float(np.quantile(np.abs(y), 0.7))
    for epilogue in GATED:
        ref = gated(y, epilogue, 1.702, limit)
        for kernel in library.find(scheme, epilogue):
            out = np.full((m, inter + 1), np.nan, np.float32)
            amax = np.zeros(m, np.float32)
            kernel.gemm(kernel.quantize(x, scheme), w, out, bias=bias, alpha=1.702, limit=limit, row_amax=amax)
            assert np.abs(out[:, :inter] - ref).max() <= 3e-6 * np.abs(ref).max(), kernel.name
            assert np.isnan(out[:, inter:]).all()
            assert np.array_equal(amax, np.abs(out[:, :inter]).max(axis=1)), kernel.name


def test_activation_over_its_whole_range(library: KernelLibrary) -> None:
    """silu from -200 to 200 against float64: relative error below 1e-6 where the result is above 1e-30."""
    scheme = QuantScheme("fp32")
    values = np.concatenate([np.linspace(-200, 200, 4001), np.linspace(-1, 1, 399), [0.0, -0.0, 1e-30, -1e-30]])
    values = values.astype(np.float32)
    x = np.zeros((len(values), 64), np.float32)
    x[:, 0], x[:, 1] = values, 1
    w = random_weights(32, 64, scheme, np.random.default_rng(2))
    dense = np.zeros((32, 64), np.float32)
    dense[0, 0] = dense[16, 1] = 1  # gate = value, up = 1
    from tests.kernels.reference import pack_tiles

    w.tiles = pack_tiles(dense, "fp32")
    kernel = library.find(scheme, "silu_mul")[0]
    out = np.full((len(values), 16), np.nan, np.float32)
    kernel.gemm(kernel.quantize(x, scheme), w, out)
    wide = values.astype(np.float64)
    ref = wide / (1 + np.exp(-wide))
    big = np.abs(ref) > 1e-30
    assert np.abs(out[big, 0] / ref[big] - 1).max() < 1e-6
    assert np.abs(out[~big, 0]).max() < 1e-29
    assert (out[:, 1:] == 0).all()


@some_schemes
def test_scatter_add(library: KernelLibrary, scheme: QuantScheme) -> None:
    """out[row_index[m]] += row_weight[m] * (y + bias), added to what is there; other rows are left alone."""
    rng = np.random.default_rng(3)
    m, n, k = 21, 40, 64
    w = random_weights(n, k, scheme, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    bias = rng.standard_normal(w.layout.n_pad).astype(np.float32)
    index = rng.permutation(50)[:m].astype(np.int64)
    weight = rng.standard_normal(m).astype(np.float32)
    y = weight[:, None] * (gemm(x, w) + bias)[:, :n]
    for kernel in library.find(scheme, "scatter_add"):
        out = rng.standard_normal((50, n)).astype(np.float32)
        ref = out.astype(np.float64)
        ref[index] += y
        kernel.gemm(kernel.quantize(x, scheme), w, out, bias=bias, row_index=index, row_weight=weight)
        assert np.abs(out - ref).max() <= 2e-6 * np.abs(ref).max(), kernel.name


@some_schemes
def test_scatter_into_one_row_is_in_row_order(library: KernelLibrary, scheme: QuantScheme) -> None:
    """Several rows may go to the same output row; they are added one after the other, in order."""
    rng = np.random.default_rng(4)
    w = random_weights(32, 64, scheme, rng)
    x = rng.standard_normal((19, 64)).astype(np.float32)
    index, weight = np.full(19, 2, np.int64), rng.standard_normal(19).astype(np.float32)
    for store, scatter in zip(library.find(scheme, "store"), library.find(scheme, "scatter_add"), strict=True):
        act = store.quantize(x, scheme)
        y = np.full((19, 32), np.nan, np.float32)
        store.gemm(act, w, y)
        ref = np.zeros(32, np.float32)
        for i in range(19):
            ref += weight[i] * y[i]
        out = np.zeros((4, 32), np.float32)
        scatter.gemm(act, w, out, row_index=index, row_weight=weight)
        assert np.array_equal(out[2], ref), scatter.name
        assert (out[[0, 1, 3]] == 0).all()


@pytest.mark.parametrize("scheme", SOME[1:], ids=str)
def test_s6_row_amax_keeps_a_nan(library: KernelLibrary, scheme: QuantScheme) -> None:
    # failure S6: the row maximum of a poisoned row is NaN for good, whatever other blocks say; other rows are not.
    rng = np.random.default_rng(5)
    w = random_weights(192, 64, scheme, rng)
    x = rng.standard_normal((18, 64)).astype(np.float32)
    x[4, 10], x[17, 0] = np.nan, np.inf
    for kernel in library.find(scheme, "silu_mul"):
        out = np.full((18, 96), np.nan, np.float32)
        amax = np.zeros(18, np.float32)
        kernel.gemm(kernel.quantize(x, scheme), w, out, row_amax=amax)
        assert np.isnan(amax[[4, 17]]).all(), kernel.name
        good = [i for i in range(18) if i not in (4, 17)]
        assert np.array_equal(amax[good], np.abs(out[good]).max(axis=1))
        amax[0] = np.nan  # raised from NaN: stays
        kernel.gemm(kernel.quantize(x, scheme), w, out, row_amax=amax)
        assert np.isnan(amax[0])


def test_row_amax_is_raised_by_threads_at_once(library: KernelLibrary) -> None:
    """Blocks of one row are computed by several threads; the maximum over all of them survives."""
    rng = np.random.default_rng(6)
    scheme = SOME[2]
    w = random_weights(2 * 512, 64, scheme, rng)
    x = rng.standard_normal((33, 64)).astype(np.float32)
    kernel = library.find(scheme, "silu_mul")[0]
    act = kernel.quantize(x, scheme)
    out = np.full((33, 512), np.nan, np.float32)
    amax = np.zeros(33, np.float32)
    threads = [
        threading.Thread(target=kernel.gemm, args=(act, w, out), kwargs={"blocks": (b, b + 4), "row_amax": amax})
        for b in range(0, 32, 4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert np.array_equal(amax, np.abs(out).max(axis=1))
