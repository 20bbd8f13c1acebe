"""Which kernels a Plan needs: one spec per unique (data type, scale, group, epilogue, K).

Nothing here knows about C++ or an instruction set; `render` turns specs into source.
Letters: H hidden, I expert intermediate size, K columns of a weight matrix (padded to 64).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ktc.errors import BuildError
from ktc.layout import DATA_TYPES, K_ALIGN, Activation, DataType, QuantScheme, ScaleMode, round_up
from ktc.plan.ir import Plan

Epilogue = Literal["store", "scatter_add", "silu_mul", "silu_clamp", "swiglu_oai"]
EPILOGUES: tuple[Epilogue, ...] = get_args(Epilogue)
GATED: tuple[Activation, ...] = get_args(Activation)

_SCALES: dict[DataType, tuple[ScaleMode, ...]] = {
    "fp32": ("none",),
    "bf16": ("none",),
    "int8": ("channel", "group"),
    "int4": ("integer", "codebook", "group"),
}


@dataclass(frozen=True, order=True)
class KernelSpec:
    """One GEMM kernel with its epilogue.

    Attributes:
        data_type, scale, group: the weight's QuantScheme.
        epilogue: what happens to the product (abi.h, ktc_epilogue).
        k: K_pad it is specialised for, or 0 for any.

    Raises:
        BuildError: values that no kernel can be generated for (a spec may come from a manifest, so every value is
            checked before it reaches a template).
    """

    data_type: DataType
    scale: ScaleMode
    group: int
    epilogue: Epilogue
    k: int = 0

    def __post_init__(self) -> None:
        def refuse(why: str) -> BuildError:
            return BuildError(f"no kernel can be generated for {self!r}: {why}")

        if self.data_type not in DATA_TYPES or self.epilogue not in EPILOGUES:
            raise refuse("unknown data type or epilogue")
        if self.scale not in _SCALES[self.data_type]:
            raise refuse(f"{self.data_type} takes scale {' or '.join(_SCALES[self.data_type])}")
        if type(self.group) is not int or type(self.k) is not int:
            raise refuse("group and k must be integers")
        if (self.group != 0) != (self.scale in ("group", "integer", "codebook")) or not 0 <= self.group <= 1 << 16:
            raise refuse("a group belongs to the scales 'group', 'integer' and 'codebook'")
        if self.group % 64 and self.group not in (0, 16, 32):
            raise refuse("a group must be 16, 32 or a multiple of 64 columns")
        if self.scale == "codebook" and self.group > 128:
            raise refuse("a codebook group has at most 128 columns")
        if self.k % K_ALIGN or not 0 <= self.k <= 1 << 20:
            raise refuse("k must be a multiple of 64")

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(self.data_type, self.scale, self.group)

    @property
    def gated(self) -> bool:
        return self.epilogue in GATED

    @property
    def name(self) -> str:
        """`int4-g64:silu_mul:k2048`; a kernel's name is this behind the label of its instruction set."""
        return f"{self.scheme}:{self.epilogue}:k{self.k or '*'}"

    def to_json(self) -> dict[str, Any]:
        return {
            "data_type": self.data_type,
            "scale": self.scale,
            "group": self.group,
            "epilogue": self.epilogue,
            "k": self.k,
        }


@dataclass(frozen=True)
class KernelSpecs:
    """The kernels of one library: sorted and without duplicates."""

    specs: tuple[KernelSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(sorted(set(self.specs))))

    def __iter__(self) -> Any:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def to_json(self) -> list[dict[str, Any]]:
        return [s.to_json() for s in self.specs]

    @classmethod
    def from_json(cls, data: Iterable[dict[str, Any]]) -> KernelSpecs:
        try:
            return cls(tuple(KernelSpec(**d) for d in data))
        except TypeError as e:
            raise BuildError(f"kernel specs are not what this version of ktc writes: {e}") from e


def specs_for(plan: Plan) -> KernelSpecs:
    """The kernels that run `plan`.

    A MoE block takes one gated kernel with k = H and, per distinct node slice of I, kernels for down with k = the
    slice (STORE, and SCATTER_ADD from the same instantiation). A packed linear takes a STORE kernel for any k.
    """
    specs: list[KernelSpec] = []
    for module in plan.modules:
        if module.moe is not None:
            moe, scheme = module.moe, (module.moe.data_type, module.moe.scale, module.moe.group)
            specs.append(KernelSpec(*scheme, moe.activation, round_up(moe.hidden, K_ALIGN)))
            for begin, end in moe.splits:
                k = round_up(end - begin, K_ALIGN)
                specs += [KernelSpec(*scheme, "store", k), KernelSpec(*scheme, "scatter_add", k)]
        if module.linear is not None:
            linear = module.linear
            specs.append(KernelSpec(linear.data_type, linear.scale, linear.group, "store"))
    return KernelSpecs(tuple(specs))
