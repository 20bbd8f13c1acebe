"""Activations -> packed tiles: bit for bit against the naive reference, and where each row goes."""

from __future__ import annotations

import numpy as np
import pytest

from ktc.layout import QuantScheme, round_up
from tests.kernels.conftest import SCHEMES
from tests.kernels.native import Kernel, KernelLibrary, Packed
from tests.kernels.reference import act_tiles, quantize_rows, to_bf16

INTEGER = [s for s in SCHEMES if s.data_type in ("int8", "int4")]


def kernel_of(library: KernelLibrary, scheme: QuantScheme) -> Kernel:
    return library.find(scheme, "store")[-1]


def check_rows(packed: Packed, x: np.ndarray, source: np.ndarray, amax: np.ndarray | None = None) -> None:
    """Destination row d of `packed` holds source row source[d] (or was left alone if that is -1)."""
    scheme, k_pad = packed.scheme, packed.k_pad
    tiles, scale, values = act_tiles(x, k_pad, scheme.data_type, amax)
    steps = tiles.shape[1]
    got = packed.tiles.reshape(-1, steps, 16, 64)
    for d, s in enumerate(source):
        row = got[d // 16, :, d % 16]
        if s < 0:
            assert (row == 0xFF).all()
            continue
        assert np.array_equal(row, tiles[s // 16, :, s % 16])
        if scheme.data_type in ("int8", "int4"):
            assert np.array_equal(packed.scale[d], scale[s], equal_nan=True)
            span = scheme.group if scheme.scale == "group" else k_pad
            sums = [values[s, i : i + span].sum() for i in range(0, k_pad, span)]
            assert np.array_equal(packed.sums[d], sums)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("k", [64, 100, 1, 192, 65])
def test_rows_equal_the_reference(library: KernelLibrary, scheme: QuantScheme, k: int) -> None:
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((19, k)) * 10.0 ** rng.integers(-6, 6, (19, 1))).astype(np.float32)
    x[3] = 0
    packed = kernel_of(library, scheme).quantize(x, scheme)
    check_rows(packed, x, np.arange(19))


@pytest.mark.parametrize("scheme", [SCHEMES[1], SCHEMES[2], SCHEMES[-1]], ids=str)
def test_destinations_copies_and_skips(library: KernelLibrary, scheme: QuantScheme) -> None:
    """One source row per routed slot, anywhere in the destination; entries below zero are skipped."""
    rng = np.random.default_rng(1)
    m, copies, rows = 9, 3, 40
    x = rng.standard_normal((m, 100)).astype(np.float32)
    where = rng.permutation(rows)[: m * copies].astype(np.int64)
    where[[0, 7, 12, 13, 14]] = -1  # the last three: a source row that nobody wants
    packed = kernel_of(library, scheme).quantize(x, scheme, dst_row=where, copies=copies, rows=rows)
    source = np.full(rows, -1)
    for i, d in enumerate(where):
        if d >= 0:
            source[d] = i // copies
    check_rows(packed, x, source)
    plain = kernel_of(library, scheme).quantize(x, scheme, copies=copies)
    check_rows(plain, x, np.arange(m * copies) // copies)


@pytest.mark.parametrize("scheme", INTEGER[:1] + INTEGER[-1:], ids=str)
def test_a_known_maximum_sets_the_scale(library: KernelLibrary, scheme: QuantScheme) -> None:
    """Slices of one row on different nodes share the scale of the whole row; a NaN maximum poisons the row."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, 128)).astype(np.float32)
    amax = np.abs(x).max(axis=1) * np.float32(1.7)
    amax[4] = np.nan
    packed = kernel_of(library, scheme).quantize(x, scheme, amax=amax)
    check_rows(packed, x, np.arange(6), amax)
    assert np.isnan(packed.scale[4]) and (packed.sums[4] == 0).all()
    where = np.array([5, 3, 1, 0, 2, 4])
    moved = kernel_of(library, scheme).quantize(x, scheme, amax=amax[np.argsort(where)], dst_row=where)
    assert np.array_equal(moved.scale[where], packed.scale, equal_nan=True)


@pytest.mark.parametrize("scheme", INTEGER[:1] + INTEGER[-1:], ids=str)
def test_s6_q1_q2_poison_overflow_and_zero_rows(library: KernelLibrary, scheme: QuantScheme) -> None:
    # failures S6, Q1, Q2: NaN and infinity poison their own scale; huge and tiny rows neither overflow nor divide by 0.
    x = np.random.default_rng(3).standard_normal((8, 100)).astype(np.float32)
    x[0, 99], x[1, 0], x[2, 50] = np.nan, np.inf, -np.inf
    x[3] = 0
    x[4] *= np.float32(1e38) / np.abs(x[4]).max()
    x[5] *= np.float32(1e-40)
    x[6] *= np.float32(1e-30)
    packed = kernel_of(library, scheme).quantize(x, scheme)
    assert np.isnan(packed.scale[:3]).all() and (packed.sums[:3] == 0).all()
    assert packed.scale[3] == 0 and packed.scale[5] == 0
    assert np.isfinite(packed.scale[3:]).all()
    q, scale = quantize_rows(x[4:5])
    assert packed.scale[4] == scale[0] and packed.sums[4].sum() == q.sum()
    assert abs(int(packed.sums[6].sum())) <= 127 * 100


def test_bf16_rounding(library: KernelLibrary) -> None:
    """Nearest even at every boundary; NaN stays NaN, an overflow becomes infinity."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800001, 0xFFC00000, 0x7F800000,
                     0x80000000, 0x00000001, 0x7FFFFFFF, 0xFF800000], np.uint32)  # fmt: skip
    x = np.resize(bits, 64).view(np.float32)[None, :]
    packed = kernel_of(library, QuantScheme("bf16")).quantize(x, QuantScheme("bf16"))
    got = packed.tiles.reshape(2, 16, 64)[:, 0].reshape(-1).view(np.uint16)
    expected = to_bf16(x[0])
    nan = np.isnan(x[0])
    assert np.array_equal(got[~nan], expected[~nan])
    assert ((got[nan] & 0x7F80) == 0x7F80).all() and ((got[nan] & 0x7F) != 0).all()


def test_only_the_asked_rows(library: KernelLibrary) -> None:
    import ctypes

    from tests.kernels.native import QuantArgs, ptr

    scheme = SCHEMES[2]
    x = np.random.default_rng(4).standard_normal((20, 64)).astype(np.float32)
    packed = Packed(scheme, 20, 64)
    args = QuantArgs(struct_size=ctypes.sizeof(QuantArgs), k_valid=64, k=64, m_begin=5, m_end=7, x=ptr(x), ld_x=64,
                     copies=1, act=packed.struct)  # fmt: skip
    assert kernel_of(library, scheme).quantize_raw(args) == 0
    check_rows(packed, x, np.array([i if 5 <= i < 7 else -1 for i in range(20)]))
    assert round_up(20, 16) == 32
