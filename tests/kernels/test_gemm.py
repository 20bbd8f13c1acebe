"""The product itself, for every kernel of every variant: odd shapes, ranges, padding, ranges of values.

Integer formats without fp32 group scales must equal the reference to the last bit; what is left to rounding is
compared between variants in test_variants.py.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from ktc.layout import QuantScheme, round_up
from tests.kernels.conftest import SCHEMES, SPECIAL_K
from tests.kernels.native import KernelLibrary
from tests.kernels.reference import Weights, codebook_level, gemm, pack_tiles, random_weights

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 33, 100)
SHAPES = ((32, 64), (40, 100), (96, 320))
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def assert_close(out: np.ndarray, ref: np.ndarray, w: Weights, what: str) -> None:
    if w.scheme.scale in ("channel", "integer", "codebook"):
        assert np.array_equal(out, ref.astype(np.float32)), what
    else:
        scale = np.abs(ref).max(initial=1e-30)
        assert np.abs(out - ref).max(initial=0) <= 2e-6 * scale, what


@each_scheme
def test_s5_every_row_count_and_shape(library: KernelLibrary, scheme: QuantScheme) -> None:
    # failure S5: rows per expert that are no multiple of 16 (or of anything).
    rng = np.random.default_rng(1)
    kernels = library.find(scheme, "store")
    assert len(kernels) == (2 if library.lib.thread_init and scheme.data_type != "fp32" else 1)
    for n, k in SHAPES:
        w = random_weights(n, k, scheme, rng)
        x = rng.standard_normal((max(ROWS), k)).astype(np.float32)
        ref = gemm(x, w)[:, :n]
        for kernel in kernels:
            for m in ROWS:
                act = kernel.quantize(x[:m], scheme)
                out = np.full((m + 1, n + 5), np.nan, np.float32)
                kernel.gemm(act, w, out)
                assert_close(out[:m, :n], ref[:m], w, f"{kernel.name} M={m} N={n} K={k}")
                assert np.isnan(out[m:]).all() and np.isnan(out[:, n:]).all(), f"{kernel.name} wrote past its columns"


@each_scheme
def test_tasks_cover_the_whole_and_nothing_else(library: KernelLibrary, scheme: QuantScheme) -> None:
    """Row ranges and block ranges compose; the bits do not depend on how the work was cut."""
    rng = np.random.default_rng(2)
    m, n, k = 70, 130, 192
    w = random_weights(n, k, scheme, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    for kernel in library.find(scheme, "store"):
        act = kernel.quantize(x, scheme)
        whole = np.full((m, n), np.nan, np.float32)
        kernel.gemm(act, w, whole)
        parts = np.full((m, n), np.nan, np.float32)
        for rows in ((0, 16), (16, 64), (64, 70)):
            for blocks in ((0, 1), (1, 4), (4, 5)):
                before = np.isnan(parts).sum()
                kernel.gemm(act, w, parts, rows=rows, blocks=blocks)
                columns = min(n, 32 * blocks[1]) - 32 * blocks[0]
                assert before - np.isnan(parts).sum() == (rows[1] - rows[0]) * columns
        assert np.array_equal(whole, parts), kernel.name
        nothing = np.full((m, n), np.nan, np.float32)
        kernel.gemm(act, w, nothing, rows=(32, 32))
        kernel.gemm(act, w, nothing, blocks=(2, 2))
        assert np.isnan(nothing).all()


@pytest.mark.parametrize("n,k", [(64, 1408), (32, 2880), (96, 704), (32, 1856), (32, 4160)])
@pytest.mark.parametrize(
    "scheme", [SCHEMES[1], SCHEMES[2], QuantScheme("int4", "integer", 64), QuantScheme("int4", "group", 32)], ids=str
)
def test_s1_s2_s3_real_widths(library: KernelLibrary, scheme: QuantScheme, n: int, k: int) -> None:
    # failures S1, S2, S3: K of real models that are no multiple of 128 or 256 (1408, 2880, 1856); several K chunks.
    rng = np.random.default_rng(3)
    w = random_weights(n, k, scheme, rng)
    x = rng.standard_normal((35, k)).astype(np.float32)
    ref = gemm(x, w)[:, :n]
    for kernel in library.find(scheme, "store"):
        for m in (1, 35):
            out = np.full((m, n), np.nan, np.float32)
            kernel.gemm(kernel.quantize(x[:m], scheme), w, out)
            assert_close(out, ref[:m], w, f"{kernel.name} M={m} K={k}")


def test_many_rows_cross_the_row_groups(library: KernelLibrary) -> None:
    """More rows than one L2-sized group of the tile kernels (512), for a channel and a group scale."""
    rng = np.random.default_rng(4)
    for scheme in (SCHEMES[2], QuantScheme("int4", "integer", 64), QuantScheme("int4", "group", 128)):
        w = random_weights(64, 192, scheme, rng)
        x = rng.standard_normal((1045, 192)).astype(np.float32)
        ref = gemm(x, w)
        for kernel in library.find(scheme, "store"):
            out = np.full((1045, 64), np.nan, np.float32)
            kernel.gemm(kernel.quantize(x, scheme), w, out)
            assert_close(out, ref, w, kernel.name)


def test_specialised_k(library: KernelLibrary) -> None:
    """Kernels compiled for one K give the bits of the general ones, and refuse any other K."""
    rng = np.random.default_rng(5)
    seen = 0
    for scheme in SCHEMES:
        w = random_weights(64, SPECIAL_K, scheme, rng)
        x = rng.standard_normal((37, SPECIAL_K)).astype(np.float32)
        for kernel in library.find(scheme, "store", SPECIAL_K):
            general = library.find(scheme, "store", label=kernel.name.split(":")[0] + ":")[0]
            out, expected = np.full((2, 37, 64), np.nan, np.float32)
            act = kernel.quantize(x, scheme)
            kernel.gemm(act, w, out)
            general.gemm(act, w, expected)
            assert np.array_equal(out, expected), kernel.name
            other = random_weights(64, 256, scheme, rng)
            with pytest.raises(AssertionError):
                kernel.gemm(general.quantize(x[:, :1].repeat(256, 1), scheme), other, out)
            seen += 1
    assert seen == (10 if library.lib.thread_init else 5)


def test_every_codebook_level(library: KernelLibrary) -> None:
    """All 16 selectors times 16 nibbles in both halves of a block, read off one column at a time."""
    scheme = QuantScheme("int4", "codebook", 16)
    w = random_weights(32, 256, scheme, np.random.default_rng(10))
    assert w.q is not None and w.mult is not None and w.product is not None and w.scale is not None
    w.scale[:] = 1 / 127
    for kernel in library.find(scheme, "store"):
        seen = set()
        for turn in range(16):
            w.q[:] = np.arange(16)[:, None].repeat(256, 1).repeat(2, 0).reshape(32, 256) - 8  # nibble by row pair
            selector = (np.arange(32)[:, None] * 5 + np.arange(16)[None, :] + turn) % 16  # [row, group]
            w.mult[:] = np.ascontiguousarray((selector[:16] | selector[16:] << 4).T).reshape(-1)
            w.product = codebook_level(selector.repeat(16, 1), w.q + 8)
            w.tiles = pack_tiles(w.q, "int4")
            x = np.zeros((16, 256), np.float32)
            x[np.arange(16), np.arange(16) * 16 + turn] = 1  # row m reads one column of group m
            out = np.full((16, 32), np.nan, np.float32)
            kernel.gemm(kernel.quantize(x, scheme), w, out)
            assert np.array_equal(out, gemm(x, w).astype(np.float32)), kernel.name
            seen |= {(int(s), int(c)) for s, c in zip(selector.T.reshape(-1), np.tile(w.q[:, 0] + 8, 16), strict=True)}
        assert len(seen) == 256


@each_scheme
def test_s13_extreme_values(library: KernelLibrary, scheme: QuantScheme) -> None:
    # failure S13: -8 in int4 (-128 in int8) against activations of both signs, at full scale, without saturation.
    k = 256
    w = random_weights(32, k, scheme, np.random.default_rng(6))
    if scheme.scale == "codebook":
        assert w.q is not None and w.mult is not None and w.scale is not None
        w.q[:] = -8
        w.mult[:] = 0x7F  # rows 0-15: level 126, rows 16-31: level -126
        w.product = np.repeat([126, -126], 16)[:, None] * np.ones((1, k), np.int64)
        w.dense = w.scale[:, None].astype(np.float64) * w.product
        w.tiles = pack_tiles(w.q, scheme.data_type)
    elif w.q is not None:
        w.dense = w.dense / np.where(w.q == 0, 1, w.q) * np.where(w.q == 0, 0, 1)
        w.q[:] = -128 if scheme.data_type == "int8" else -8
        if w.mult is not None:
            w.mult[:] = 16
            w.product = 16 * w.q
            w.dense = np.broadcast_to(np.asarray(w.scale)[:, None] * 16.0, w.q.shape) * w.q
        elif scheme.scale == "group":
            per_group = np.asarray(w.scale).reshape(-1, 32).T
            w.dense = np.repeat(per_group, scheme.group, axis=1).astype(np.float64) * w.q
        else:
            w.dense = np.asarray(w.scale)[:, None].astype(np.float64) * w.q
        w.tiles = pack_tiles(w.q, scheme.data_type)
    x = np.ones((20, k), np.float32)
    x[1::2] = -1
    x[7, ::3] = 1
    ref = gemm(x, w)
    for kernel in library.find(scheme, "store"):
        out = np.full((20, 32), np.nan, np.float32)
        kernel.gemm(kernel.quantize(x, scheme), w, out)
        assert_close(out, ref, w, kernel.name)


@each_scheme
def test_s6_s9_rows_are_independent(library: KernelLibrary, scheme: QuantScheme) -> None:
    # failures S6, S9: a NaN or infinity in one row changes that row only; an all-zero row gives exact zeros.
    rng = np.random.default_rng(7)
    m, n, k = 40, 40, 100
    w = random_weights(n, k, scheme, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    poisoned = x.copy()
    poisoned[3, 99] = np.nan
    poisoned[17, 0] = np.inf
    poisoned[21, 50] = -np.inf
    poisoned[38] = 0
    bad = [3, 17, 21]
    good = [i for i in range(m) if i not in (*bad, 38)]
    for kernel in library.find(scheme, "store"):
        clean, out = np.full((2, m, n), np.nan, np.float32)
        kernel.gemm(kernel.quantize(x, scheme), w, clean)
        kernel.gemm(kernel.quantize(poisoned, scheme), w, out)
        assert np.array_equal(clean[good], out[good]), kernel.name
        assert (out[38] == 0).all(), kernel.name
        assert not np.isfinite(out[bad]).any() if w.q is not None else np.isnan(out[3]).all(), kernel.name


@pytest.mark.parametrize("scheme", [SCHEMES[1], SCHEMES[2]], ids=str)
def test_s7_offsets_beyond_31_bits(library: KernelLibrary, scheme: QuantScheme) -> None:
    # failure S7: element offsets above 2^31. 9 GB of address space, of which a few pages are touched.
    rng = np.random.default_rng(8)
    row = 2**31 // 32 + 7
    space = mmap.mmap(
        -1, 4 * 32 * (row + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    )
    out = np.frombuffer(space, np.float32).reshape(-1, 32)
    w = random_weights(32, 64, scheme, rng)
    x = rng.standard_normal((1, 64)).astype(np.float32)
    ref = gemm(x, w)
    for kernel in library.find(scheme, "scatter_add"):
        out[row] = 0
        index, weight = np.array([row], np.int64), np.ones(1, np.float32)
        kernel.gemm(kernel.quantize(x, scheme), w, out, row_index=index, row_weight=weight)
        assert_close(out[row : row + 1], ref, w, kernel.name)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[2], QuantScheme("int4", "group", 128)], ids=str)
def test_large_outputs_past_the_caches(library: KernelLibrary, scheme: QuantScheme) -> None:
    """Outputs above 256 KB in aligned rows may be stored past the caches: the same bits, and no column more."""
    m, n, stride = 150, 520, 528
    rng = np.random.default_rng(12)
    w = random_weights(n, 192, scheme, rng)
    x = rng.standard_normal((m, 192)).astype(np.float32)
    space = np.empty(m * stride + 32, np.float32)
    start = -space.ctypes.data % 64 // 4
    for kernel in library.find(scheme, "store"):
        act = kernel.quantize(x, scheme)
        outs = []
        for offset in (0, 1):  # the second is not aligned
            space.fill(np.nan)
            out = space[start + offset :][: m * stride].reshape(m, stride)
            kernel.gemm(act, w, out)
            assert np.isnan(out[:, n:]).all() and np.isnan(space).sum() == space.size - m * n, kernel.name
            outs.append(out[:, :n].copy())
        assert np.array_equal(*outs), kernel.name
        assert_close(outs[0], gemm(x, w)[:, :n], w, kernel.name)


def test_outputs_need_no_padding(library: KernelLibrary) -> None:
    """n_out cuts a block anywhere; nothing past it is touched, for STORE and SCATTER_ADD."""
    rng = np.random.default_rng(9)
    for scheme in (SCHEMES[1], SCHEMES[6]):
        w = random_weights(96, 64, scheme, rng)
        x = rng.standard_normal((18, 64)).astype(np.float32)
        ref = gemm(x, w)
        for n_out in (1, 15, 16, 17, 31, 32, 33, 63, 64, 95, 96):
            for kernel in library.find(scheme, "store") + library.find(scheme, "scatter_add"):
                out = np.zeros((18, n_out + 3), np.float32)
                out[:, n_out:] = np.nan
                args = {"row_index": np.arange(18), "row_weight": np.ones(18, np.float32)}
                kernel.gemm(kernel.quantize(x, scheme), w, out, n_out=n_out, **args)  # type: ignore[arg-type]
                assert_close(out[:, :n_out], ref[:, :n_out], w, f"{kernel.name} n_out={n_out}")
                assert np.isnan(out[:, n_out:]).all()


def test_k_is_padded_with_zero_weights() -> None:
    assert round_up(100, 64) == 128  # the shapes above do exercise a tail
