"""Packing one matrix: any strides, whole blocks cut and joined without a changed byte."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktc._runtime import cpu_features
from ktc.layout import QuantScheme, round_up, split_intermediate, split_unit
from ktc.pack.matrix import PackedMatrix, interleaved_rows, join_columns, join_rows, pack_sources

SCHEMES = [
    QuantScheme("fp32"),
    QuantScheme("bf16"),
    QuantScheme("int8", "channel"),
    QuantScheme("int8", "group", 32),
    QuantScheme("int8", "group", 128),
    QuantScheme("int4", "group", 64),
    QuantScheme("int4", "integer", 32),
    QuantScheme("int4", "integer", 128),
    QuantScheme("int4", "codebook", 16),
    QuantScheme("int4", "codebook", 128),
]


def pack(array: np.ndarray, scheme: QuantScheme, dtype: str = "fp32") -> PackedMatrix:
    rows = np.arange(round_up(array.shape[0], 32), dtype=np.int64)
    rows[array.shape[0] :] = -1
    packed, bad = pack_sources([array], dtype, np.zeros_like(rows), rows, scheme)
    assert bad is None
    return packed


def same(a: PackedMatrix, b: PackedMatrix) -> None:
    np.testing.assert_array_equal(a.tiles, b.tiles)
    np.testing.assert_array_equal(a.scale.view(np.uint32), b.scale.view(np.uint32))
    np.testing.assert_array_equal(a.mult, b.mult)
    assert a.layout.n_pad == b.layout.n_pad and a.layout.k_pad == b.layout.k_pad


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SCHEMES), st.integers(1, 9), st.integers(65, 700), st.integers(1, 4), st.integers(0, 99))
def test_columns_cut_and_joined_are_the_whole(scheme, blocks, k, nodes, seed) -> None:
    array = np.random.default_rng(seed).normal(size=(32 * blocks, k)).astype(np.float32)
    whole = pack(array, scheme)
    try:
        splits = split_intermediate(k, nodes, split_unit(scheme))
    except ValueError:
        return
    slices = [whole.columns(begin, end) for begin, end in splits]
    for piece, (begin, end) in zip(slices, splits, strict=True):
        assert piece.tiles.size == piece.layout.tile_bytes
        assert piece.scale.size == piece.layout.scale_count and piece.mult.size == piece.layout.mult_bytes
        if scheme.scale in ("none", "group"):  # nothing of the whole row: a slice is as if it were packed alone
            same(piece, pack(array[:, begin : min(end, k)], scheme))
    same(join_columns(slices), whole)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SCHEMES), st.integers(2, 9), st.integers(1, 300), st.integers(1, 4), st.integers(0, 99))
def test_rows_cut_and_joined_are_the_whole(scheme, blocks, k, nodes, seed) -> None:
    array = np.random.default_rng(seed).normal(size=(32 * blocks, k)).astype(np.float32)
    whole = pack(array, scheme)
    edges = [32 * (blocks * i // nodes) for i in range(nodes + 1)]
    ranges = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    slices = [whole.rows(a, b) for a, b in ranges]
    for piece, (a, b) in zip(slices, ranges, strict=True):
        same(piece, pack(array[a:b], scheme))  # rows are independent
    same(join_rows(slices), whole)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("arrangement", ["apart", "reversed", "stacked", "alternating", "transposed", "misaligned"])
def test_gate_and_up_are_packed_from_where_they_are(arrangement: str, dtype: str) -> None:
    """Every way two matrices can lie in memory gives the bytes of two fresh arrays."""
    rng = np.random.default_rng(3)
    kind = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}[dtype]
    inter, hidden = 80, 70
    values = rng.normal(size=(2, inter, hidden)).astype(np.float32)
    values = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values.astype(kind)
    if arrangement == "apart":
        gate, up = values[0].copy(), values[1].copy()
    elif arrangement == "reversed":
        both = np.ascontiguousarray(values[::-1])
        gate, up = both[1], both[0]
    elif arrangement == "stacked":
        gate, up = values
    elif arrangement == "alternating":
        both = np.ascontiguousarray(values.transpose(1, 0, 2)).reshape(2 * inter, hidden)
        gate, up = both[0::2], both[1::2]
    elif arrangement == "transposed":  # gpt-oss: [H, 2I], columns alternate
        both = np.ascontiguousarray(values.transpose(2, 1, 0)).reshape(hidden, 2 * inter)
        gate, up = both.T[0::2], both.T[1::2]
    else:  # an odd distance between the two, as in a file that is mapped
        raw = np.zeros(values.nbytes + 64, np.uint8)
        half = values[0].nbytes
        gate = np.frombuffer(raw.data, kind, values[0].size, 0).reshape(inter, hidden)
        up = np.frombuffer(raw.data, kind, values[0].size, half + 1).reshape(inter, hidden)
        gate[:], up[:] = values
    scheme = QuantScheme("int4", "integer", 64)
    row, is_up = interleaved_rows(inter, 128)
    packed, bad = pack_sources([gate, up], dtype, is_up, row, scheme)
    fresh = np.concatenate([np.stack([values[0], values[1]]).reshape(2 * inter, hidden)])
    expected, _ = pack_sources([fresh], dtype, np.zeros_like(row), np.where(row < 0, -1, row + is_up * inter), scheme)
    assert bad is None
    same(packed, expected)


def test_interleaved_rows_alternate_in_half_blocks() -> None:
    row, is_up = interleaved_rows(40, 64)
    assert row[:16].tolist() == list(range(16)) and is_up[:16].tolist() == [0] * 16
    assert row[16:32].tolist() == list(range(16)) and is_up[16:32].tolist() == [1] * 16
    assert row[64:72].tolist() == list(range(32, 40)) and set(row[72:80].tolist()) == {-1}
    assert len(row) == 128


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_q3_a_nonfinite_weight_is_found_where_it_is(scheme: QuantScheme, value: float) -> None:
    # failure Q3: NaN and infinity already in the checkpoint; here the second source, row 9, column 65.
    gate, up = np.ones((40, 70), np.float32), np.ones((40, 70), np.float32)
    up[9, 65] = value
    row, is_up = interleaved_rows(40, 64)
    _, bad = pack_sources([gate, up], "fp32", is_up, row, scheme)
    assert bad is not None and (bad.source, bad.row, bad.column) == (1, 9, 65)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_q2_zero_and_tiny_rows_become_exact_zeros(scheme: QuantScheme) -> None:
    # failure Q2: an all-zero or nearly zero expert row aborted the quantiser.
    from ktc.bundle.reference import stored_values, weight_scales

    array = np.random.default_rng(0).normal(size=(32, 128)).astype(np.float32)
    array[3] = 0
    array[4] = 1e-42  # denormal
    packed = pack(array, scheme)
    group = scheme.group or 128
    factors = np.repeat(weight_scales(packed), group, axis=1)[:, :128]
    if scheme.scale == "none":
        factors = np.ones((32, 128))
    dense = stored_values(packed, 0, 1)[:, :128] * factors
    assert np.all(dense[3] == 0) and np.all(np.isfinite(dense))
    assert np.abs(dense[4]).max() <= 1e-41


@pytest.mark.skipif("avx2" not in cpu_features(), reason="this CPU has no AVX2: there is one way to choose selectors")
def test_codebook_bytes_do_not_depend_on_the_instruction_set() -> None:
    """The choice of selectors with SSE2, which is the fallback, in a process of its own."""
    script = (
        "import hashlib, numpy as np\n"
        "from tests.pack.test_matrix import QuantScheme, pack\n"
        "h = hashlib.sha256()\n"
        "for group, k in ((16, 700), (32, 65), (128, 333)):\n"
        "    w = np.random.default_rng(k).standard_t(3, size=(64, k)).astype(np.float32)\n"
        "    w[5] = 0; w[6, 3] = 1e4\n"
        "    p = pack(w, QuantScheme('int4', 'codebook', group))\n"
        "    for part in (p.tiles, p.scale, p.mult): h.update(part.tobytes())\n"
        "print(h.hexdigest())\n"
    )
    hashes = [
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **isa}, check=True, capture_output=True, text=True
        ).stdout
        for isa in ({}, {"KTC_QUANTIZE_ISA": "sse2"})
    ]
    assert len(hashes[0].strip()) == 64 and hashes[0] == hashes[1]
