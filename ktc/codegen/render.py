"""KernelSpecs + Variant -> one C++ source. The only place that touches Jinja."""

from __future__ import annotations

from dataclasses import dataclass

from ktc.codegen.paths import data_dir
from ktc.codegen.spec import KernelSpec, KernelSpecs
from ktc.codegen.variants import Variant

TEMPLATE = "experts.cpp.j2"


@dataclass(frozen=True)
class Shape:
    """A `ktc::Spec` instantiation; kernels that differ only in their epilogue share it."""

    name: str
    format: str
    scale: str
    group: int
    k: int
    comment: str


@dataclass(frozen=True)
class Kernel:
    """One row of the kernel table."""

    kind: str  # "vector" | "tile"
    shape: str
    epilogue: str
    name: str


def render(specs: KernelSpecs, variant: Variant) -> str:
    """Source of the kernel library for one variant; a pure function of its arguments and the template."""
    import jinja2

    shapes: dict[tuple[str, str, int, int], Shape] = {}
    kernels: list[Kernel] = []
    for spec in specs:
        shape = shapes.setdefault(_shape_key(spec), _shape(spec, len(shapes)))
        epilogue = f"KTC_{spec.epilogue.upper()}"
        kernels.append(Kernel("vector", shape.name, epilogue, f"{variant.vector_label}:{spec.name}"))
        if variant.tile_type and spec.data_type != "fp32":
            kernels.append(Kernel("tile", shape.name, epilogue, f"{variant.tile_label}:{spec.name}"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(TEMPLATE).render(variant=variant, shapes=list(shapes.values()), kernels=kernels)


def _shape_key(spec: KernelSpec) -> tuple[str, str, int, int]:
    return (spec.data_type, spec.scale, spec.group, spec.k)


def _shape(spec: KernelSpec, index: int) -> Shape:
    return Shape(
        name=f"Shape{index}",
        format=f"KTC_{spec.data_type.upper()}",
        scale=f"KTC_SCALE_{spec.scale.upper()}",
        group=spec.group,
        k=spec.k,
        comment=f"{spec.scheme}, K = {spec.k or 'any'}",
    )
