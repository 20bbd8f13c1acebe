"""Shapes of MoE layers to measure, and the roofline of a call. Arithmetic only.

Letters: E experts, H hidden, I expert intermediate size, k experts per token, T tokens of a call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ktc.errors import UsageError
from ktc.layout import MatrixLayout, QuantScheme, intermediate_pad
from ktc.perf.limits import DRAM_HUGE, Limits


@dataclass(frozen=True)
class MoeShape:
    """One MoE layer; `model` says whose."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    model: str = ""

    @property
    def expert_params(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    def expert_bytes(self, scheme: QuantScheme) -> int:
        """Packed bytes of one expert, paddings and scales included."""
        i_pad = intermediate_pad(self.intermediate)
        gate_up = MatrixLayout(2 * i_pad, self.hidden, scheme)
        return gate_up.nbytes + MatrixLayout(self.hidden, i_pad, scheme).nbytes

    def bits_per_param(self, scheme: QuantScheme) -> float:
        return 8 * self.expert_bytes(scheme) / self.expert_params

    def operations(self, tokens: int) -> int:
        """Of one call: a multiply and an add for each weight of each routed expert, 2 * T * k * 3 * H * I."""
        return 2 * tokens * self.top_k * self.expert_params


SHAPES = {
    s.name: s
    for s in (
        MoeShape("v2lite", 64, 2048, 1408, 6, "DeepSeek-V2-Lite"),
        MoeShape("qwen3", 128, 2048, 768, 8, "Qwen3-30B-A3B"),
        MoeShape("v3", 16, 7168, 2048, 8, "DeepSeek-V3, 16 of its 256 experts"),
    )
}

SCHEMES = {
    "int4": QuantScheme("int4", "codebook", 16),
    "int4-g16c": QuantScheme("int4", "codebook", 16),
    "int4-g32c": QuantScheme("int4", "codebook", 32),
    "int4-g64c": QuantScheme("int4", "codebook", 64),
    "int4-g16": QuantScheme("int4", "integer", 16),
    "int4-g32": QuantScheme("int4", "integer", 32),
    "int4-g64": QuantScheme("int4", "integer", 64),
    "int4-g128": QuantScheme("int4", "integer", 128),
    "int4-g32f": QuantScheme("int4", "group", 32),
    "int4-g128f": QuantScheme("int4", "group", 128),
    "int8": QuantScheme("int8", "channel"),
    "bf16": QuantScheme("bf16"),
    "fp32": QuantScheme("fp32"),
}
"""What `--format` accepts; "int4", "int8" and "bf16" are the schemes of the recipes of these names."""


def parse_shape(text: str) -> MoeShape:
    """A name of SHAPES, or `ExHxI:k` ("64x2048x1408:6").

    Raises:
        UsageError: neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    dims, _, top_k = text.partition(":")
    numbers = [*dims.split("x"), top_k]
    if len(numbers) != 4 or not all(n.isdigit() and int(n) > 0 for n in numbers):
        raise UsageError(f"unknown shape {text!r}", f"one of {', '.join(SHAPES)}, or EXPERTSxHIDDENxINTERMEDIATE:TOP_K")
    experts, hidden, intermediate, k = map(int, numbers)
    if k > experts:
        raise UsageError(f"shape {text!r}: top {k} of {experts} experts is impossible", f"top {experts} at most")
    return MoeShape(text, experts, hidden, intermediate, k)


@dataclass(frozen=True)
class Floor:
    """The shortest time that the machine's limits allow for one call.

    Attributes:
        seconds: the larger of the two.
        memory, compute: seconds to read every touched weight byte once from DRAM; to do the arithmetic.
        bound: "memory" or "compute", whichever is the larger.
    """

    memory: float
    compute: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute)

    @property
    def bound(self) -> str:
        return "memory" if self.memory >= self.compute else "compute"


_BYTES = (("amx_int8",), ("avx512_vnni",), ("avx_vnni",), ("avx2_int8",), ("fp32_fma",))
_ARITHMETIC: dict[str, tuple[tuple[str, ...], ...]] = {
    "int4": _BYTES,
    "int8": _BYTES,
    "bf16": (("amx_bf16",), ("avx512_bf16", "fp32_fma")),
    "fp32": (("fp32_fma",),),
}
"""Limits that may bound a data type's arithmetic, fastest first; of several in a place it depends on the CPU."""


def arithmetic_kinds(data_type: str, available: Collection[str]) -> list[str]:
    """The limits of `available` of which the highest bounds a data type's arithmetic (int4 multiplies as int8)."""
    places = ([kind for kind in place if kind in available] for place in _ARITHMETIC[data_type])
    return next((found for found in places if found), [])


def arithmetic_kind(data_type: str, limits: Limits) -> str:
    """The fastest arithmetic that was measured for a data type, or ""."""
    measured = [kind for kind in limits.rates if limits.rate(kind) > 0]
    return max(arithmetic_kinds(data_type, measured), key=limits.rate, default="")


def floor(shape: MoeShape, data_type: str, weight_bytes: float, tokens: int, limits: Limits) -> Floor:
    """The roofline of one call.

    Args:
        weight_bytes: of the experts that the call touches, each once.
        limits: measured in the same run. An arithmetic that was not measured does not bound.
    """
    arithmetic = limits.rate(arithmetic_kind(data_type, limits))
    dram = limits.rate(DRAM_HUGE)
    return Floor(
        memory=weight_bytes / dram if dram else 0.0,
        compute=shape.operations(tokens) / arithmetic if arithmetic else 0.0,
    )
