"""The ISA variants a kernel library is built for: flags, what the CPU must have, which headers.

Flags name explicit targets, never the build machine's; `required_features` are names as in /proc/cpuinfo
and exactly what the flags let the compiler use. Choosing a variant for a host is the bundle's job.
"""

from __future__ import annotations

from dataclasses import dataclass

COMMON_FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-static-libstdc++",
    "-static-libgcc",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # everything that passes a vector is inlined
    "-Wl,-z,defs",
    "-Wl,--as-needed",
)


@dataclass(frozen=True)
class Variant:
    """One way to compile the kernels.

    Attributes:
        name: as in `ktc_kernel_lib.variant`, in bundle paths and in recipes.
        machine_flags: -m flags on top of COMMON_FLAGS.
        required_features: what the host CPU must offer (a set, not a ladder).
        vector_type, vector_header: primitives of the vector kernels (struct in ktc::isa, file in ktc/isa).
        vector_label: what the vector kernels are called in kernel names.
        tile_type, tile_header, tile_label: the same for tile kernels, or empty.
        automatic: may be chosen for a host without being asked for.
    """

    name: str
    machine_flags: tuple[str, ...]
    required_features: tuple[str, ...]
    vector_type: str
    vector_header: str
    vector_label: str
    tile_type: str = ""
    tile_header: str = ""
    tile_label: str = ""
    automatic: bool = True

    @property
    def flags(self) -> tuple[str, ...]:
        return COMMON_FLAGS + self.machine_flags


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_BASE = ("-march=x86-64", "-mtune=generic")

_ALL = (
    Variant(
        "amx",
        (*_BASE, *_AVX512_FLAGS, "-mavx512vbmi", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        (*_AVX512, "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16"),
        "Avx512", "avx512.h", "avx512", "AmxTiles", "amx.h", "amx",
    ),
    # Only AMD has sse4a: avx512_bf16 of Intel's CPUs multiplies at half the rate of FMA, AMD's at twice.
    Variant(
        "zen4",
        (*_BASE, *_AVX512_FLAGS, "-mavx512vbmi", "-mavx512bf16"),
        (*_AVX512, "avx512vbmi", "avx512_bf16", "sse4a"),
        "Zen4", "zen4.h", "avx512",
    ),
    # Ice Lake and later: the same source as avx512, which looks up codebook levels in half the instructions.
    Variant(
        "avx512vbmi", (*_BASE, *_AVX512_FLAGS, "-mavx512vbmi"), (*_AVX512, "avx512vbmi"), "Avx512", "avx512.h", "avx512"
    ),
    Variant("avx512", (*_BASE, *_AVX512_FLAGS), _AVX512, "Avx512", "avx512.h", "avx512"),
    Variant("avxvnni", (*_BASE, *_AVX2_FLAGS, "-mavxvnni"), (*_AVX2, "avx_vnni"), "Avx2", "avx2.h", "avxvnni"),
    Variant("avx2", (*_BASE, *_AVX2_FLAGS), _AVX2, "Avx2", "avx2.h", "avx2"),
    Variant("portable", _BASE, (), "Scalar", "scalar.h", "scalar"),
    Variant(
        "emulated", _BASE, (), "Scalar", "scalar.h", "scalar", "EmulatedTiles", "tile_emul.h", "emul", automatic=False
    ),
)  # fmt: skip

VARIANTS: dict[str, Variant] = {v.name: v for v in _ALL}
"""Every variant by name, best first; the first automatic one whose features a host has is its default."""


def runnable(features: set[str] | frozenset[str], *, automatic: bool = True) -> list[str]:
    """Names of the variants that a CPU with these features can run, best first."""
    return [
        v.name for v in VARIANTS.values() if set(v.required_features) <= features and (v.automatic or not automatic)
    ]
