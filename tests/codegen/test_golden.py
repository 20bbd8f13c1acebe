"""Generated source, golden per variant: a refactoring of templates or specs must not change it by accident.

Update after a wanted change: `python -m tests.codegen.test_golden`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ktc.codegen.render import render
from ktc.codegen.spec import KernelSpec, KernelSpecs
from ktc.codegen.variants import VARIANTS

GOLDEN = Path(__file__).parent / "golden"
SPECS = KernelSpecs(
    (
        KernelSpec("int4", "integer", 64, "silu_mul", 2048),
        KernelSpec("int4", "integer", 64, "store", 1408),
        KernelSpec("int4", "integer", 64, "scatter_add", 1408),
        KernelSpec("int4", "codebook", 16, "silu_mul", 2048),
        KernelSpec("int8", "group", 128, "swiglu_oai", 2880),
        KernelSpec("bf16", "none", 0, "store"),
        KernelSpec("fp32", "none", 0, "store"),
    )
)


def golden_path(variant: str) -> Path:
    return GOLDEN / f"{variant}.cpp.txt"


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_generated_source(variant: str) -> None:
    expected = golden_path(variant).read_text()
    assert render(SPECS, VARIANTS[variant]) == expected, "wanted? python -m tests.codegen.test_golden"


def test_the_template_only_instantiates() -> None:
    """No algorithm may creep into a template: no loops, no conditions in C++, no functions but the query."""
    for variant in VARIANTS:
        source = golden_path(variant).read_text()
        for word in ("for (", "while (", "if (", "#ifdef", "inline"):
            assert word not in source
        assert source.count("(uint32_t abi_version)") == 1 and len(source.splitlines()) < 80


if __name__ == "__main__":
    for name, variant in VARIANTS.items():
        golden_path(name).write_text(render(SPECS, variant))
        print(golden_path(name))
