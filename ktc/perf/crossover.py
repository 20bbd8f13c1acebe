"""From how many tokens per expert on the tile kernels are faster than the vector kernels, on this machine.

Both kernels read the same packed bytes, so each is forced in turn on the same calls; every active expert of a call
has exactly the same number of rows, weights are cold, and the two are interleaved. Storing what is found: tuning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ktc.errors import UsageError
from ktc.perf.dense_experts import random_experts
from ktc.perf.experts import KtcExperts, KtcWeights, kernel_library, layers_for, specs_for_shape
from ktc.perf.interleave import interleave
from ktc.perf.limits import default_cpus
from ktc.perf.routing import even_rows
from ktc.perf.shapes import SCHEMES, MoeShape

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
FORMATS = ("int4", "int8", "bf16")
SHAPE = MoeShape("tune", 32, 2048, 1408, 4, "the experts of DeepSeek-V2-Lite, a few of them")
NEVER = 1 << 20
"""min_rows of a kernel that never won."""


@dataclass(frozen=True)
class Crossover:
    """One format: milliseconds of a call per rows of each active expert, and where the tile kernels take over."""

    format: str
    vector: str
    tile: str
    rows: tuple[int, ...]
    vector_ms: tuple[float, ...]
    tile_ms: tuple[float, ...]
    min_rows: int

    @property
    def prefix(self) -> str:
        """Of the kernel names it holds for ("amx:int4")."""
        return f"{self.tile}:{SCHEMES[self.format].data_type}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def crossover(rows: Sequence[int], vector: Sequence[float], tile: Sequence[float]) -> int:
    """The row count from which choosing the tile kernel costs least over all measured counts.

    One noisy point must not move it, so it is not the first or last win: each possible threshold is judged by the
    relative time lost at every measured count, and the lowest threshold of the best ones is taken.
    """
    best, best_loss = NEVER, float("inf")
    for threshold in [*rows, NEVER]:
        loss = 0.0
        for r, v, t in zip(rows, vector, tile, strict=True):
            chosen = t if r >= threshold else v
            loss += chosen / min(v, t) - 1
        if loss < best_loss - 1e-12:
            best, best_loss = threshold, loss
    return best


def measure(
    formats: Sequence[str] = FORMATS,
    shape: MoeShape = SHAPE,
    rows: Sequence[int] = ROWS,
    seconds: float = 0.15,
    threads: int | None = None,
    variant: str | None = None,
    working_set: int | None = None,
    min_rounds: int = 3,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Crossover]:
    """Measure every format.

    Args:
        seconds: timing of each kernel at each row count.
        tick: told "format, rows" before each measurement.
    Returns:
        one Crossover per format; empty where the library has only one kind of kernel (nothing to choose).
    Raises:
        KtcError: unknown format, or the kernels cannot be built.
    """
    from ktc.codegen.spec import KernelSpecs
    from ktc.engine.pool import get_pool

    if unknown := [f for f in formats if f not in SCHEMES]:
        raise UsageError(f"unknown format {unknown[0]!r}", f"one of {', '.join(SCHEMES)}")
    specs = [spec for f in formats for spec in specs_for_shape(shape, SCHEMES[f])]
    lib = kernel_library(KernelSpecs(tuple(specs)), variant)
    labels = {str(k["name"]).partition(":")[0]: int(str(k["min_rows"])) for k in lib.kernels()}
    if len(labels) < 2:
        return []
    vector, tile = sorted(labels, key=lambda label: labels[label])[:2]
    pool = get_pool([default_cpus(threads)])
    dense = random_experts(shape, distinct=1)
    out = []
    for name in formats:
        scheme = SCHEMES[name]
        weights = KtcWeights(
            shape, scheme, 1, dense, layers_for(shape.experts * shape.expert_bytes(scheme), working_set)
        )
        pair = [KtcExperts(weights, lib, pool, force=f"{label}:") for label in (vector, tile)]
        times: list[list[float]] = [[], []]
        for count in rows:
            tick(f"{name}, {count} tokens per expert")
            x = np.random.default_rng(count).standard_normal((count, shape.hidden), dtype=np.float32)
            timings = interleave(pair, [x], [even_rows(shape, count)], seconds, min_rounds=min_rounds)
            for series, timing in zip(times, timings, strict=True):
                series.append(1e3 * timing.median)
        at = crossover(rows, *times)
        out.append(Crossover(name, vector, tile, tuple(rows), tuple(times[0]), tuple(times[1]), at))
    return out
