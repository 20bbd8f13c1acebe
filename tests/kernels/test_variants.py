"""Every variant against the portable one, bit for bit, and what every library promises about itself."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from ktc.codegen.variants import VARIANTS
from ktc.layout import ABI_VERSION, LAYOUT_VERSION, QuantScheme
from tests.kernels.conftest import SCHEMES
from tests.kernels.native import GemmArgs, KernelLibrary, QuantArgs
from tests.kernels.reference import act_tiles, random_weights

EPILOGUES = ("store", "silu_mul", "silu_clamp", "swiglu_oai")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_q6_same_bits_as_portable(library: KernelLibrary, portable: KernelLibrary, scheme: QuantScheme) -> None:
    """failure Q6 (bits that depend on the ISA): all formats and activations. Only bf16 may round apart: on tiles, and
    where pairs are multiplied (below)."""
    rng = np.random.default_rng(1)
    m, k = 51, 448
    w = random_weights(96, k, scheme, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    bias = rng.standard_normal(96).astype(np.float32)
    for epilogue in EPILOGUES:
        reference = portable.find(scheme, epilogue)[0]
        width = 96 if epilogue == "store" else 48
        expected = np.full((m, width), np.nan, np.float32)
        reference.gemm(reference.quantize(x, scheme), w, expected, bias=bias, alpha=1.702, limit=3.0)
        assert np.isfinite(expected).all()
        for kernel in library.find(scheme, epilogue):
            out = np.full((m, width), np.nan, np.float32)
            kernel.gemm(kernel.quantize(x, scheme), w, out, bias=bias, alpha=1.702, limit=3.0)
            own_order = library.variant == "zen4" or kernel.name.startswith(("amx:", "emul:"))
            if scheme.data_type == "bf16" and own_order:
                assert np.abs(out - expected).max() <= 2e-5 * np.abs(expected).max(), kernel.name
            else:
                assert np.array_equal(out, expected), kernel.name


@pytest.mark.parametrize("library", ["zen4"], indirect=True)
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16, 35])
def test_bf16_pairs_are_added_odd_product_first(library: KernelLibrary, rows: int) -> None:
    """What `isa/zen4.h` says of its dot product, to the bit. A sum of two floats in double, rounded to float, is
    rounded as if once."""
    rng = np.random.default_rng(rows)
    scheme, k = QuantScheme("bf16"), 448
    w = random_weights(64, k, scheme, rng)
    x = (rng.standard_normal((rows, k)) * 10.0 ** rng.integers(-6, 6, (rows, k))).astype(np.float32)
    values = act_tiles(x, k, "bf16")[2]
    expected = np.zeros((rows, 64), np.float32)
    for pair in range(0, k, 2):
        for one in (pair + 1, pair):
            expected = (expected + values[:, one : one + 1] * w.dense[None, :, one]).astype(np.float32)
    (kernel,) = library.find(scheme, "store")
    out = np.full((rows, 64), np.nan, np.float32)
    kernel.gemm(kernel.quantize(x, scheme), w, out)
    assert np.array_equal(out, expected)


def test_a_row_does_not_depend_on_its_batch(library: KernelLibrary) -> None:
    """The bits of a row are the same alone and among others (so they do not depend on how tokens are cut)."""
    rng = np.random.default_rng(2)
    for scheme in SCHEMES:
        w = random_weights(64, 192, scheme, rng)
        x = rng.standard_normal((33, 192)).astype(np.float32)
        for kernel in library.find(scheme, "silu_mul"):
            whole, alone = np.full((33, 32), np.nan, np.float32), np.full((1, 32), np.nan, np.float32)
            kernel.gemm(kernel.quantize(x, scheme), w, whole)
            for row in (0, 7, 32):
                kernel.gemm(kernel.quantize(x[row : row + 1], scheme), w, alone)
                assert np.array_equal(whole[row], alone[0]), kernel.name


def test_what_a_library_says_about_itself(library: KernelLibrary) -> None:
    lib = library.lib
    variant = VARIANTS[library.variant]
    assert (lib.abi_version, lib.layout_version) == (ABI_VERSION, LAYOUT_VERSION)
    assert tuple(lib.required_features.decode().split()) == variant.required_features
    assert len(lib.source_key) == 32
    assert bool(lib.thread_init) == bool(lib.thread_fini) == bool(variant.tile_type)
    for kernel in library.kernels:
        tile = bool(variant.tile_label) and kernel.name.startswith(variant.tile_label + ":")
        assert tile or kernel.name.startswith(variant.vector_label + ":")
        assert (kernel.struct.min_rows > 1) == tile
        assert 0 <= kernel.struct.scratch_bytes <= 3 << 19
    assert len({k.name for k in library.kernels}) == len(library.kernels)
    assert not library.query(ABI_VERSION + 1)  # failure I4: another ABI is refused, not guessed at


def test_faulty_arguments_get_a_status(library: KernelLibrary) -> None:
    """Nothing that the argument check can see may crash: NULLs, sizes, ranges."""
    for kernel in library.kernels:
        assert kernel.gemm_raw(GemmArgs()) != 0  # struct_size 0
        assert kernel.quantize_raw(QuantArgs()) != 0
        size = ctypes.sizeof(GemmArgs)
        k = kernel.struct.k or 64
        good = {"struct_size": size, "k": k, "m_end": 16, "block_end": 1}
        for wrong in ({"k": 63}, {"k": 0}, {"m_begin": 8}, {"m_begin": 32}, {"block_begin": 2}, {"flags": 1}, {}):
            assert kernel.gemm_raw(GemmArgs(**{**good, **wrong})) != 0, (kernel.name, wrong)
        assert kernel.gemm_raw(GemmArgs(**{**good, "m_end": 0})) == 0  # no rows: nothing is touched
        quant = {"struct_size": ctypes.sizeof(QuantArgs), "k": 64, "m_end": 1, "copies": 1}
        for wrong in ({"k": 32}, {"k_valid": 65}, {"copies": 0}, {"m_begin": 2}, {}):
            assert kernel.quantize_raw(QuantArgs(**{**quant, **wrong})) != 0, (kernel.name, wrong)


def test_s11_s12_threads_share_a_library(library: KernelLibrary) -> None:
    # failures S11, S12: fresh threads, each with its own tile configuration, run the same kernels at once.
    rng = np.random.default_rng(3)
    jobs = []
    for scheme in SCHEMES[1:]:
        w = random_weights(64, 128, scheme, rng)
        x = rng.standard_normal((37, 128)).astype(np.float32)
        for kernel in library.find(scheme, "silu_mul"):
            act = kernel.quantize(x, scheme)
            out = np.full((37, 32), np.nan, np.float32)
            kernel.gemm(act, w, out)
            jobs.append((kernel, act, w, out))
    wrong: list[str] = []

    def work() -> None:
        init, fini = (ctypes.CFUNCTYPE(ctypes.c_int)(f) if f else lambda: 0 for f in _hooks(library))
        assert init() == 0
        for kernel, act, w, expected in jobs:
            out = np.full((37, 32), np.nan, np.float32)
            kernel.gemm(act, w, out)
            if not np.array_equal(out, expected):
                wrong.append(kernel.name)
        assert fini() == 0

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def _hooks(library: KernelLibrary) -> tuple[int | None, int | None]:
    return library.lib.thread_init, library.lib.thread_fini
