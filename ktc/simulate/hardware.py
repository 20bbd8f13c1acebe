"""What a hardware profile says: plain frozen data in SI units. Reading and checking the YAML is in profile.py.

Rates are bytes/s and operations/s (a multiply and an add are two), times are seconds. The fields of
the file, with their own units in their names, are documented in docs/simulate.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ktc.errors import RecipeError, UsageError
from ktc.layout import DataType

Numa = Literal["tp", "unaware", "single"]
NUMA_MODES: tuple[Numa, ...] = ("tp", "unaware", "single")


class ProfileError(RecipeError):
    """A hardware profile does not parse, does not fit its schema, or does not say what is needed."""


UNBOUNDED = 1e18
"""Operations/s of a profile that knows decode only: experts are a time, which no peak bounds."""


@dataclass(frozen=True)
class Kernels:
    """How much of the machine one implementation of the expert kernels reaches.

    Attributes:
        dram_fraction: of the DRAM rate, while weights stream (decode).
        compute_fraction: of the peak, while arithmetic bounds (prefill).
    """

    dram_fraction: float
    compute_fraction: float


@dataclass(frozen=True)
class Cpu:
    """The expert pool.

    Attributes:
        dram_local, dram_remote: read rate of one socket's cores from its own and from another socket's memory.
        peak: operations/s of one socket by unit: amx_bf16, amx_int8, avx512, avx512_int8.
        amx_min_tokens: from so many tokens on an expert runs on AMX.
        job: seconds that an expert job takes by itself, whatever it reads: hand-over, barriers between its phases.
        start: seconds more where the pool stood idle when the job came: its threads begin and end one by one, and
            nobody fills the gaps with the job before or behind.
        memory: bytes of one socket's DRAM, or None.
    """

    sockets: int
    cores: int
    dram_local: float
    dram_remote: float
    peak: dict[str, float]
    amx_min_tokens: int
    kernels: dict[str, Kernels]
    memory: float | None = None
    job: float = 0.0
    start: float = 0.0

    def peak_for(self, data_type: DataType, tokens: float) -> float:
        """Operations/s of a socket for an expert with so many tokens."""
        return self.peak[peak_unit(data_type, self.peak, tokens >= self.amx_min_tokens)]


def peak_unit(data_type: str, peak: Mapping[str, float], amx: bool) -> str:
    """Which unit of a profile's `peak_tflops` does the arithmetic of a data type; `amx`: there are tokens enough."""
    tile, vector = {
        "bf16": ("amx_bf16", "avx512"),
        "int8": ("amx_int8", "avx512_int8"),
        "int4": ("amx_int8", "avx512_int8"),
    }.get(data_type, ("", "avx512"))
    if amx and tile in peak:
        return tile
    return vector if vector in peak else "avx512"


@dataclass(frozen=True)
class Device:
    """What runs attention, router and shared experts: a GPU, or (kind cpu) the expert pool itself.

    Attributes:
        memory_rate: bytes/s; peak: operations/s of the weights' own arithmetic (bf16).
        memory_fraction, compute_fraction: what dense kernels reach of them.
        kernel_time: least time of one kernel inside a replayed graph, launch gap included.
        kernels: how many kernels a module of a role takes.
        memory: bytes, or None.
    """

    kind: Literal["cuda", "cpu"]
    name: str = ""
    memory_rate: float = 0.0
    memory_fraction: float = 1.0
    peak: float = 0.0
    compute_fraction: float = 1.0
    kernel_time: float = 0.0
    kernels: dict[str, int] = field(default_factory=dict)
    memory: float | None = None


@dataclass(frozen=True)
class Link:
    """PCIe: bytes/s reached and the time of an empty copy."""

    rate: float
    latency: float


@dataclass(frozen=True)
class Host:
    """The thread that runs the graph's callbacks: time until the pool works after a submit callback is due, and
    until the device goes on after the awaited experts are done."""

    submit: float
    sync: float


@dataclass(frozen=True)
class Hardware:
    """One machine. `file` is for messages."""

    name: str
    description: str
    cpu: Cpu
    device: Device
    link: Link
    host: Host
    file: str = ""

    def kernels(self, name: str | None) -> tuple[str, Kernels]:
        """An implementation of the expert kernels by name; the first of the profile by default.

        Raises:
            UsageError: no such entry under cpu.kernels.
        """
        known = self.cpu.kernels
        chosen = next(iter(known)) if name is None else name
        if chosen not in known:
            raise UsageError(
                f"{self.file}: cpu.kernels has no entry '{chosen}'", f"entries of this profile: {', '.join(known)}"
            )
        return chosen, known[chosen]
