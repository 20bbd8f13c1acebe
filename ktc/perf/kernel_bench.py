"""`ktc bench kernels`: ktc's experts against PyTorch's and against the machine's limits, all in one run.

`run` goes over shapes and token counts and returns rows; report.py prints them. Every figure of a row comes from
the same interleaved run: the contestants' medians and the limits that its floor is made of.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.engine.opening import forced_kernel
from ktc.errors import BuildError, KtcError, UsageError
from ktc.perf import routing
from ktc.perf.dense_experts import DenseExpert, random_experts, reference, relative_error
from ktc.perf.experts import Contestant, KtcExperts, KtcWeights, kernel_library, layers_for, specs_for_shape
from ktc.perf.figures import Report, Row, machine, make_row
from ktc.perf.interleave import Timing, interleave
from ktc.perf.limits import DRAM_HUGE, Limits, Sampler, default_cpus
from ktc.perf.shapes import SCHEMES, MoeShape, arithmetic_kinds
from ktc.progress import counted

DEFAULT_TOKENS = (1, 2, 4, 8, 16, 128, 512, 1024)
ERROR_TOKENS = 128
PEERS = ("grouped_mm", "int4pack", "int8pack")
_CALLS = 32


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        shapes, tokens: the grid.
        formats: keys of SCHEMES for ktc's own experts.
        peers: of PEERS.
        seconds: timing of each contestant at each grid point.
        threads: of the pool and of torch; None = usable CPUs.
        variant, force, scheduling: as in `_runtime`; "" chooses kernels by tokens.
        skew: see routing.draw.
        working_set: bytes that the layers of a contestant hold together; default twice the last-level cache.
        probe_bytes: buffer of the DRAM limit; default limits.probe_bytes().
        min_rounds: at least so many turns each.
    """

    shapes: Sequence[MoeShape]
    tokens: Sequence[int] = DEFAULT_TOKENS
    formats: Sequence[str] = ("int4", "int8", "bf16")
    peers: Sequence[str] = PEERS
    seconds: float = 0.5
    threads: int | None = None
    variant: str | None = None
    force: str = ""
    scheduling: str = "dynamic"
    skew: float = 0.0
    seed: int = 0
    working_set: int | None = None
    probe_bytes: int | None = None
    min_rounds: int = 3


Factory = Callable[[MoeShape, list[DenseExpert]], list[Contestant]]


def run(options: Options, extra: Factory | None = None, say: Callable[[str], None] = lambda _: None) -> Report:
    """Measure the whole grid.

    Args:
        extra: more contestants for a shape (the scripts in benchmarks/ add peers of their own).
        say: told what is going on, one line at a time.
    Raises:
        KtcError: unknown format or peer, no memory, no kernel for a forced choice.
    """
    from ktc import _runtime
    from ktc.engine.pool import crowded, get_pool

    if unknown := [f for f in options.formats if f not in SCHEMES]:
        raise UsageError(f"unknown format {unknown[0]!r}", f"one of {', '.join(SCHEMES)}")
    if unknown := [p for p in options.peers if p not in PEERS]:
        raise UsageError(f"unknown peer {unknown[0]!r}", f"one of {', '.join(PEERS)}")
    if not options.shapes or not options.tokens or min(options.tokens) < 1:
        raise UsageError("nothing to measure", "give at least one shape and positive token counts")
    report = Report()
    cpus = default_cpus(options.threads)
    pool = get_pool([cpus])
    for shape in options.shapes:
        gc.collect()
        say(f"{shape.name}: making weights")
        dense = random_experts(shape, options.seed)
        contestants: list[Contestant] = [*ktc_contestants(options, shape, dense, pool, report, say)]
        contestants += _torch_contestants(options, shape, dense, len(cpus), report, say)
        contestants += extra(shape, dense) if extra else []
        if not contestants:
            raise UsageError("nothing to measure", "give at least one format or peer")
        sampler = Sampler.of_pool(cpus, limit_kinds([c.data_type for c in contestants]), options.probe_bytes)
        measured = measure_shape(options, shape, dense, contestants, sampler, say)
        limits = report.limits[shape.name] = sampler.limits()
        for tokens, timings, errors in measured:
            report.rows += _rows(shape, tokens, contestants, timings, errors, limits)
        report.about["contestants"] = report.about.get("contestants", {}) | {
            f"{shape.name}: {c.name}": c.about() for c in contestants
        }
        del contestants, sampler
    report.notes += crowded(_runtime.numa_nodes(), options.threads)
    report.about |= machine(cpus) | {"seconds": options.seconds, "skew": options.skew, "seed": options.seed}
    return report


def ktc_contestants(
    options: Options,
    shape: MoeShape,
    dense: list[DenseExpert],
    pool: Any,
    report: Report,
    say: Callable[[str], None],
) -> list[KtcExperts]:
    """ktc in each asked format, on one kernel library for all of them."""
    from ktc.codegen.spec import KernelSpecs
    from ktc.perf.tuning import load as load_tuning

    if not options.formats:
        return []
    schemes = {f: SCHEMES[f] for f in options.formats}
    specs = KernelSpecs(tuple(s for scheme in schemes.values() for s in specs_for_shape(shape, scheme)))
    say(f"{shape.name}: kernels")
    lib = kernel_library(specs, options.variant)
    tuning = load_tuning()
    report.about |= {"variant": lib.variant, "kernels": options.force or "by tokens", "tuning": str(tuning)}
    out: list[KtcExperts] = []
    for name, scheme in schemes.items():
        say(f"{shape.name}: packing {name}")
        layers = layers_for(shape.experts * shape.expert_bytes(scheme), options.working_set)
        weights = KtcWeights(shape, scheme, pool.nodes, dense, layers)
        try:
            out.append(
                KtcExperts(
                    weights,
                    lib,
                    pool,
                    name=f"ktc {name}",
                    force=options.force,
                    scheduling=options.scheduling,
                    min_rows=tuning.min_rows,
                )
            )
        except ValueError as error:
            raise forced_kernel(lib, options.force, error) or BuildError(f"{name}: {error}") from error
    return out


def _torch_contestants(
    options: Options,
    shape: MoeShape,
    dense: list[DenseExpert],
    threads: int,
    report: Report,
    say: Callable[[str], None],
) -> list[Contestant]:
    if not options.peers:
        return []
    try:
        import torch
    except ImportError:
        report.skipped.append("PyTorch's experts: torch is not installed")
        return []
    from ktc.perf import torch_peers

    torch.set_num_threads(threads)
    kinds = {
        "grouped_mm": (torch_peers.GroupedMM, 16.0),
        "int4pack": (torch_peers.Int4Pack, 4.25),
        "int8pack": (torch_peers.Int8Pack, 8.0),
    }
    out: list[Contestant] = []
    for peer in options.peers:
        say(f"{shape.name}: making torch {peer}")
        kind, bits = kinds[peer]
        layers = layers_for(shape.experts * shape.expert_params * bits / 8, options.working_set)
        try:
            out.append(kind(shape, dense, layers))
        except (KtcError, RuntimeError) as error:
            report.skipped.append(f"{shape.name}: torch {peer}: {str(error).splitlines()[0]}")
    return out


def limit_kinds(data_types: Sequence[str]) -> list[str]:
    """The limits that the floors of these data types need on this machine."""
    from ktc import _runtime

    available = _runtime.compute_kinds()
    return [DRAM_HUGE, *dict.fromkeys(k for d in data_types for k in arithmetic_kinds(d, available))]


Measured = tuple[int, list[Timing], list["float | None"]]


def measure_shape(
    options: Options,
    shape: MoeShape,
    dense: list[DenseExpert],
    contestants: Sequence[Contestant],
    sampler: Sampler,
    say: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Per token count: the contestants' timings, and their errors against fp32."""
    errors = output_errors(shape, dense, contestants, options.seed)
    out = []
    for tokens in options.tokens:
        say(f"{shape.name}: {counted(tokens, 'token')}")
        rng = np.random.default_rng([options.seed, tokens])
        inputs = [rng.standard_normal((tokens, shape.hidden), dtype=np.float32) for _ in range(2)]
        calls = [routing.draw(rng, shape, tokens, options.skew) for _ in range(_CALLS if tokens <= 128 else 4)]
        timings = interleave(
            contestants, inputs, calls, options.seconds, sampler, options.min_rounds, seed=options.seed
        )
        out.append((tokens, timings, errors))
    return out


def output_errors(
    shape: MoeShape, dense: list[DenseExpert], contestants: Sequence[Contestant], seed: int
) -> list[float | None]:
    """||out - ref|| / ||ref|| of each contestant on the same `ERROR_TOKENS` tokens, activations N(0, 1)."""
    rng = np.random.default_rng([seed, 1])
    x: NDArray[np.float32] = rng.standard_normal((ERROR_TOKENS, shape.hidden), dtype=np.float32)
    route = routing.draw(rng, shape, ERROR_TOKENS)
    expected = reference(dense, x, route)
    errors: list[float | None] = []
    for contestant in contestants:
        contestant.prepare(0, x, route)()
        errors.append(relative_error(contestant.output(), expected))
    return errors


def _rows(
    shape: MoeShape,
    tokens: int,
    contestants: Sequence[Contestant],
    timings: Sequence[Timing],
    errors: Sequence[float | None],
    limits: Limits,
) -> list[Row]:
    torch_ms = next((t.median for c, t in zip(contestants, timings, strict=True) if "grouped_mm" in c.name), None)
    return [
        make_row(shape, tokens, c, t, e, limits, torch_ms) for c, t, e in zip(contestants, timings, errors, strict=True)
    ]
