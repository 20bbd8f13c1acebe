"""Native quantise + pack gives the bytes of the naive reference, and unpacking inverts it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktc.layout import MatrixLayout, QuantScheme, round_up
from ktc.pack import tiles
from ktc.pack.tiles import PackedMatrix

_runtime = pytest.importorskip("ktc._runtime")

SCHEMES = [
    QuantScheme("fp32"),
    QuantScheme("bf16"),
    QuantScheme("int8", "channel"),
    *(QuantScheme("int8", "group", g) for g in (32, 64, 128)),
    *(QuantScheme("int4", "group", g) for g in (16, 32, 64, 128)),
    *(QuantScheme("int4", "integer", g) for g in (16, 32, 64, 128)),
    *(QuantScheme("int4", "codebook", g) for g in (16, 32, 64, 128)),
]
SHAPES = [(1, 1), (17, 70), (32, 64), (65, 200), (96, 448)]


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes: zeros, subnormal, tiny, huge, one outlier, all at the largest level."""
    rng = np.random.default_rng(seed)
    w = rng.standard_t(4, (n, k)).astype(np.float32) * np.float32(0.02)
    special = [
        lambda r: r * 0,
        lambda r: r * np.float32(1e-38),
        lambda r: r * np.float32(1e-33),
        lambda r: r * np.float32(1e-25),
        lambda r: r * np.float32(1e37),
        lambda r: np.sign(r) * np.float32(0.5),
        lambda r: -np.abs(r),
    ]
    for i, change in enumerate(special):
        if 2 * i + 1 < n:
            w[2 * i + 1] = change(w[2 * i + 1])
    w[n // 2, k // 2] = 3.0
    w[n - 1, : k // 3] = 0
    return w


def native_pack(
    source: np.ndarray, dtype: str, rows: np.ndarray, k: int, ld: int, col_stride: int, scheme: QuantScheme
) -> tuple[PackedMatrix, int]:
    layout = MatrixLayout(len(rows), k, scheme)
    packed = PackedMatrix(
        np.full(layout.tile_bytes, 0xAA, np.uint8),
        np.full(layout.scale_count, np.nan, np.float32),
        np.full(layout.mult_bytes, 0xAA, np.uint8),
    )
    bad = _runtime.pack_matrix(
        source.ctypes.data,
        dtype,
        rows,
        k,
        ld,
        col_stride,
        scheme.data_type,
        scheme.scale,
        scheme.group,
        packed.tiles.ctypes.data,
        packed.scale.ctypes.data,
        packed.mult.ctypes.data,
    )
    return packed, bad


def native_unpack(packed: PackedMatrix, n_pad: int, k_pad: int, scheme: QuantScheme) -> np.ndarray:
    out = np.full((n_pad, k_pad), np.nan, np.float32)
    pointers = (packed.tiles.ctypes.data, packed.scale.ctypes.data, packed.mult.ctypes.data)
    _runtime.unpack_matrix(*pointers, n_pad, k_pad, scheme.data_type, scheme.scale, scheme.group, out.ctypes.data)
    return out


def assert_same(a: PackedMatrix, b: PackedMatrix) -> None:
    assert np.array_equal(a.tiles, b.tiles)
    assert np.array_equal(a.scale.view(np.uint32), b.scale.view(np.uint32))
    assert np.array_equal(a.mult, b.mult)


def identity_rows(n: int) -> np.ndarray:
    rows = np.full(round_up(n, 32), -1, np.int64)
    rows[:n] = np.arange(n)
    return rows


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("n,k", SHAPES)
def test_q2_q6_native_bytes_equal_reference(n: int, k: int, scheme: QuantScheme) -> None:
    """failures.md Q2 (zero and near-zero rows), Q6 (bytes must not depend on the host)."""
    w = weights(n, k)
    rows = identity_rows(n)
    packed, bad = native_pack(w, "fp32", rows, k, k, 1, scheme)
    reference = tiles.pack(w, rows, scheme)
    assert bad == -1
    assert_same(packed, reference)
    n_pad, k_pad = len(rows), round_up(k, 64)
    unpacked = native_unpack(packed, n_pad, k_pad, scheme)
    assert np.array_equal(unpacked, tiles.unpack(reference, n_pad, k_pad, scheme))
    assert not unpacked[n:].any() and not unpacked[:, k:].any()
    if n > 3 and scheme.data_type.startswith("int"):
        assert not unpacked[1].any() and not unpacked[3].any()  # all-zero and subnormal rows


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.group in (0, 32)], ids=str)
def test_source_types_and_row_order(scheme: QuantScheme) -> None:
    """bf16, fp16 and transposed sources, gate and up interleaved by `rows`, equal the same values in fp32."""
    n, k = 48, 100
    exact = tiles.bf16_values(tiles.bf16_bits(weights(n, k)))
    exact[np.abs(exact) > 60000] = 1.0
    rows = np.stack([np.arange(24).reshape(-1, 8), 24 + np.arange(24).reshape(-1, 8)], axis=1).reshape(-1)
    rows = np.concatenate([rows, np.full(16, -1)]).astype(np.int64)
    reference = tiles.pack(exact, rows, scheme)

    bits = tiles.bf16_bits(exact)
    assert_same(native_pack(bits, "bf16", rows, k, k, 1, scheme)[0], reference)
    wide = np.zeros((n, k + 13), np.uint16)
    wide[:, :k] = bits
    assert_same(native_pack(wide, "bf16", rows, k, k + 13, 1, scheme)[0], reference)
    turned = np.ascontiguousarray(exact.T)  # [k, n]
    assert_same(native_pack(turned, "fp32", rows, k, 1, n, scheme)[0], reference)

    half = exact.astype(np.float16)
    as_half = tiles.pack(half.astype(np.float32), rows, scheme)
    assert_same(native_pack(half, "fp16", rows, k, k, 1, scheme)[0], as_half)


def test_fp16_values_are_exact() -> None:
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16).reshape(1024, 64)
    packed, bad = native_pack(every, "fp16", np.arange(1024), 64, 64, 1, QuantScheme("fp32"))
    got = native_unpack(packed, 1024, 64, QuantScheme("fp32"))
    assert np.array_equal(got, every.view(np.float16).astype(np.float32), equal_nan=True)
    assert bad == 0x7C00  # the first infinity


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.group in (0, 64)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_q3_nonfinite_is_reported(scheme: QuantScheme, value: float) -> None:
    """failures.md Q3: NaN or infinity in the checkpoint; the index is row * k + column of the source."""
    w = weights(40, 70)
    w[33, 12] = value
    w[38, 60] = value
    rows = identity_rows(40)[::-1].copy()  # stored order differs from source order: row 38 comes first
    packed, bad = native_pack(w, "fp32", rows, 70, 70, 1, scheme)
    assert bad == 38 * 70 + 60
    assert_same(packed, tiles.pack(w, rows, scheme))


def test_rejects_schemes_that_do_not_exist() -> None:
    w, rows = weights(32, 64), identity_rows(32)
    for scheme, message in [
        (("int8", "integer", 64), "int8' has no scale mode 'integer'"),
        (("bf16", "group", 64), "no scale mode"),
        (("int4", "group", 24), "multiple of 16"),
        (("int4", "integer", 0), "multiple of 16"),
        (("int4", "codebook", 0), "multiple of 16"),
        (("int4", "codebook", 192), "at most 128"),
        (("int8", "codebook", 16), "int8' has no scale mode 'codebook'"),
        (("int8", "channel", 64), "others 0"),
        (("int3", "group", 64), "unknown data type 'int3'"),
    ]:
        with pytest.raises(ValueError, match=message):
            _runtime.pack_matrix(w.ctypes.data, "fp32", rows, 64, 64, 1, *scheme, 1 << 20, 1 << 20, 1 << 20)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        _runtime.pack_matrix(w.ctypes.data, "fp32", rows[:31], 64, 64, 1, "fp32", "none", 0, 1 << 20, 0, 0)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 70), k=st.integers(1, 300), seed=st.integers(0, 2**31), scheme=st.sampled_from(SCHEMES))
def test_round_trip(n: int, k: int, seed: int, scheme: QuantScheme) -> None:
    """Packing what was unpacked changes nothing for exact formats, and little for the others."""
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    rows = identity_rows(n)
    packed, _ = native_pack(w, "fp32", rows, k, k, 1, scheme)
    got = native_unpack(packed, len(rows), round_up(k, 64), scheme)[:n, :k]
    limit = {"fp32": 0.0, "bf16": 0.005, "int8": 0.02, "int4": 0.2}[scheme.data_type]
    assert np.linalg.norm(got - w) <= limit * np.linalg.norm(w)
    assert_same(packed, tiles.pack(w, rows, scheme))
