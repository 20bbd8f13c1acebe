"""What `ktc bench kernels` found: a row per contestant and token count, and the machine that it holds for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ktc.perf.experts import Contestant
from ktc.perf.interleave import Timing
from ktc.perf.limits import Limits
from ktc.perf.shapes import MoeShape, floor


@dataclass(frozen=True)
class Row:
    """One contestant at one shape and token count.

    Attributes:
        ms, ms_p10, ms_p90: median and deciles of a call, milliseconds.
        x_floor: median of the calls' multiples of their roofline (shapes.Floor), each under the limits of its round;
            percent: 100 / x_floor, the share of the limit that is reached.
        floor_ms, bound: ms / x_floor, the roofline behind it, and what sets it under the limits of the whole run.
        gbytes, tops: weight bytes/s in 1e9 and operations/s in 1e12 that the call amounts to.
        vs_torch: ms of torch's bf16 grouped_mm / ms, or None where it was not measured.
        error: ||out - ref|| / ||ref|| against fp32 on `ERROR_TOKENS` tokens.
        active: mean number of experts that a call touched.
        calls: timed calls.
    """

    shape: str
    tokens: int
    name: str
    data_type: str
    bits: float
    ms: float
    ms_p10: float
    ms_p90: float
    floor_ms: float
    bound: str
    x_floor: float
    percent: float
    gbytes: float
    tops: float
    vs_torch: float | None
    error: float | None
    active: float
    calls: int


@dataclass
class Report:
    """Rows, the limits per shape's run, what everything ran on, what was left out, and what a reader should know."""

    rows: list[Row] = field(default_factory=list)
    limits: dict[str, Limits] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "ktc-bench-kernels/1",
            "about": self.about,
            "limits": {shape: limits.to_json() for shape, limits in self.limits.items()},
            "rows": [asdict(row) for row in self.rows],
            "skipped": self.skipped,
            "notes": self.notes,
        }


def make_row(
    shape: MoeShape,
    tokens: int,
    contestant: Contestant,
    timing: Timing,
    error: float | None,
    limits: Limits,
    torch_seconds: float | None,
) -> Row:
    """The figures of one contestant from its timing and the limits of the same run."""
    weight_bytes = timing.mean_active * contestant.expert_bytes
    roofline = partial(floor, shape, contestant.data_type, weight_bytes, tokens)
    seconds, multiple = timing.median, timing.times(roofline)
    return Row(
        shape=shape.name,
        tokens=tokens,
        name=contestant.name,
        data_type=contestant.data_type,
        bits=contestant.bits,
        ms=1e3 * seconds,
        ms_p10=1e3 * timing.quantile(0.1),
        ms_p90=1e3 * timing.quantile(0.9),
        floor_ms=1e3 * seconds / multiple,
        bound=roofline(limits).bound,
        x_floor=multiple,
        percent=100 / multiple,
        gbytes=weight_bytes / seconds / 1e9,
        tops=shape.operations(tokens) / seconds / 1e12,
        vs_torch=torch_seconds / seconds if torch_seconds else None,
        error=error,
        active=timing.mean_active,
        calls=len(timing.seconds),
    )


def machine(cpus: list[int]) -> dict[str, Any]:
    """What a figure must be read with."""
    import os

    from ktc import __version__, host
    from ktc.perf.limits import l3_bytes

    return {
        "ktc": __version__,
        "cpu": host.cpu_model(),
        "threads": len(cpus),
        "l3_bytes": l3_bytes(),
        "load": os.getloadavg()[0],
        "versions": host.package_versions(("torch", "numpy", "transformers")),
    }
