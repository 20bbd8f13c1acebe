"""Every kernel library under test, built once per session (and cached between sessions by its key)."""

from __future__ import annotations

import pytest

from ktc.codegen.build import build_variants
from ktc.codegen.spec import GATED, KernelSpec, KernelSpecs
from ktc.codegen.variants import VARIANTS
from ktc.layout import QuantScheme
from tests.kernels.native import KernelLibrary, cpu_features

SCHEMES = [
    QuantScheme("fp32"),
    QuantScheme("bf16"),
    QuantScheme("int8", "channel"),
    QuantScheme("int8", "group", 64),
    QuantScheme("int4", "integer", 16),
    QuantScheme("int4", "integer", 32),
    QuantScheme("int4", "integer", 64),
    QuantScheme("int4", "integer", 128),
    QuantScheme("int4", "group", 16),
    QuantScheme("int4", "group", 32),
    QuantScheme("int4", "group", 128),
    QuantScheme("int4", "codebook", 16),
    QuantScheme("int4", "codebook", 32),
    QuantScheme("int4", "codebook", 128),
]
SPECIAL_K = 192
"""One specialised K, not a multiple of 128, so that the last group of 128 is partial."""


def _specs() -> KernelSpecs:
    specs = []
    for s in SCHEMES:
        for epilogue in ("store", "scatter_add", *GATED):
            specs.append(KernelSpec(s.data_type, s.scale, s.group, epilogue))  # type: ignore[arg-type]
    for s in (SCHEMES[1], SCHEMES[2], SCHEMES[7], SCHEMES[10], SCHEMES[11]):
        specs.append(KernelSpec(s.data_type, s.scale, s.group, "store", SPECIAL_K))
    return KernelSpecs(tuple(specs))


@pytest.fixture(scope="session", params=list(VARIANTS))
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    """The library of each variant that this machine can run, forced in turn."""
    name = request.param
    missing = set(VARIANTS[name].required_features) - cpu_features()
    if missing:
        pytest.skip(f"variant {name} needs {', '.join(sorted(missing))}, which this CPU or kernel does not offer")
    lib = KernelLibrary(build_variants(_specs(), [name])[name].path)
    assert lib.variant == name  # the forced variant is the one that runs
    return lib


@pytest.fixture(scope="session")
def portable() -> KernelLibrary:
    return KernelLibrary(build_variants(_specs(), ["portable"])["portable"].path)
