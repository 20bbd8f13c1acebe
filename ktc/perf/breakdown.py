"""The paper's breakdown on this machine: what each technique adds, and hybrid against pure kernels.

Steps, each on top of the one before: v = vector (AVX-512) kernels, static scheduling, one pool over all nodes;
m = matrix (AMX) kernels where an expert has enough tokens; d = dynamic scheduling; n = NUMA tensor parallelism
(every expert split over the nodes). Prefill is measured with uneven expert loads too: that is what dynamic
scheduling is for. (SOSP '25 paper, sections 3.2 and 4.4 and its breakdown figure.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ktc.errors import KtcError, UsageError
from ktc.perf import routing
from ktc.perf.dense_experts import random_experts
from ktc.perf.experts import KtcExperts, KtcWeights, kernel_library, layers_for, specs_for_shape
from ktc.perf.figures import machine
from ktc.perf.interleave import interleave
from ktc.perf.kernel_bench import Options, limit_kinds
from ktc.perf.limits import Limits, Sampler, default_cpus
from ktc.perf.shapes import SCHEMES, floor
from ktc.progress import counted

PREFILL_TOKENS = 64
"""From this many tokens on, uneven loads are measured beside even ones."""
UNEVEN_SKEW = 1.0


@dataclass(frozen=True)
class Step:
    """One configuration. `step`: v, m, d, n, or a kernel choice; `numa`: off or tp."""

    table: str
    step: str
    kernel: str
    scheduling: str
    numa: str


@dataclass(frozen=True)
class BreakdownRow:
    """`speedup` is over the first configuration of the same table, tokens and loads."""

    table: str
    shape: str
    format: str
    tokens: int
    loads: str
    step: str
    kernel: str
    scheduling: str
    numa: str
    ms: float
    speedup: float
    x_floor: float


@dataclass
class Breakdown:
    rows: list[BreakdownRow] = field(default_factory=list)
    limits: Limits = field(default_factory=lambda: Limits({}, 1, 0))
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "ktc-bench-breakdown/1",
            "about": self.about,
            "limits": self.limits.to_json(),
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
        }


def steps_for(labels: set[str]) -> tuple[list[Step], list[str]]:
    """The configurations that a kernel library with these labels ("avx512", "amx") can show, and what is left out."""
    tile = next((label for label in ("amx", "emul") if label in labels), None)
    vector = next((label for label in ("avx512", "avxvnni", "avx2", "scalar") if label in labels), None)
    if vector is None:
        raise KtcError(f"the kernel library has no vector kernels (it has {', '.join(sorted(labels))})")
    steps = [Step("step", "v", vector, "static", "off")]
    notes = []
    if tile:
        steps.append(Step("step", "m", "hybrid", "static", "off"))
    else:
        notes.append(
            "step m and the choice of kernel: this machine has no tile kernels, so every step uses vector kernels"
        )
    best = "hybrid" if tile else vector
    steps += [Step("step", "d", best, "dynamic", "off"), Step("step", "n", best, "dynamic", "tp")]
    if tile:
        steps += [Step("kernel", name, name, "dynamic", "off") for name in (vector, tile, "hybrid")]
    return steps, notes


def run(options: Options, emulate_nodes: int | None = None, say: Callable[[str], None] = lambda _: None) -> Breakdown:
    """Measure every step for the first format at every shape and token count, interleaved.

    Args:
        emulate_nodes: for step n, deal the CPUs out to so many nodes; default: the machine's own.
    Raises:
        KtcError: see kernel_bench.run; more nodes than the shape can be split over.
    """
    from ktc import _runtime
    from ktc.codegen.spec import KernelSpecs
    from ktc.engine.pool import get_pool, place
    from ktc.perf.tuning import load as load_tuning

    if not options.formats or options.formats[0] not in SCHEMES:
        raise UsageError("a breakdown needs a format", f"--format, one of {', '.join(SCHEMES)}")
    name, scheme = options.formats[0], SCHEMES[options.formats[0]]
    cpus = default_cpus(options.threads)
    host = _runtime.numa_nodes()
    nodes = emulate_nodes or len(host)
    placement = place(host, nodes, max(nodes, len(cpus)), emulate=emulate_nodes is not None)
    pools = {"off": get_pool([cpus]), "tp": get_pool(placement)}
    tuning = load_tuning()
    out = Breakdown(about=machine(cpus) | {"format": name, "tuning": str(tuning), "nodes": nodes})
    if nodes == 1:
        out.notes.append(
            "step n: one NUMA node here, so it is step d measured once more (--emulate-nodes 2 splits the experts)"
        )
    elif emulate_nodes:
        out.notes.append(f"step n: {nodes} emulated nodes on the same memory show the cost of splitting, not its gain")
    sampler = Sampler.of_pool(cpus, limit_kinds([scheme.data_type]), options.probe_bytes)
    pending = []
    for shape in options.shapes:
        say(f"{shape.name}: making weights")
        dense = random_experts(shape, options.seed)
        specs = [*specs_for_shape(shape, scheme), *specs_for_shape(shape, scheme, nodes)]
        lib = kernel_library(KernelSpecs(tuple(specs)), options.variant)
        out.about["variant"] = lib.variant
        steps, notes = steps_for({str(k["name"]).partition(":")[0] for k in lib.kernels()})
        out.notes += [n for n in notes if n not in out.notes]
        layers = layers_for(shape.experts * shape.expert_bytes(scheme), options.working_set)
        weights = {"off": KtcWeights(shape, scheme, 1, dense, layers)}
        weights["tp"] = weights["off"] if nodes == 1 else KtcWeights(shape, scheme, nodes, dense, layers)
        contestants = [
            KtcExperts(
                weights[s.numa],
                lib,
                pools[s.numa],
                name=f"{s.table} {s.step}",
                force="" if s.kernel == "hybrid" else f"{s.kernel}:",
                scheduling=s.scheduling,
                min_rows=tuning.min_rows,
            )
            for s in steps
        ]
        for tokens in options.tokens:
            loads = {"even": options.skew}
            if tokens >= PREFILL_TOKENS:
                loads["uneven"] = max(options.skew, UNEVEN_SKEW)
            for kind, skew in loads.items():
                say(f"{shape.name}: {counted(tokens, 'token')}, {kind} loads")
                rng = np.random.default_rng([options.seed, tokens])
                inputs = [rng.standard_normal((tokens, shape.hidden), dtype=np.float32) for _ in range(2)]
                calls = [routing.draw(rng, shape, tokens, skew) for _ in range(4 if tokens > 128 else 32)]
                timings = interleave(contestants, inputs, calls, options.seconds, sampler, options.min_rounds)
                pending.append((shape, tokens, kind, steps, contestants[0].expert_bytes, timings))
        del contestants, weights
    out.limits = sampler.limits()
    for shape, tokens, kind, steps, expert_bytes, timings in pending:
        first: dict[str, float] = {}
        for step, timing in zip(steps, timings, strict=True):
            seconds = timing.median
            base = first.setdefault(step.table, seconds)
            touched = timing.mean_active * expert_bytes
            multiple = timing.times(partial(floor, shape, scheme.data_type, touched, tokens))
            out.rows.append(
                BreakdownRow(
                    step.table, shape.name, name, tokens, kind, step.step, step.kernel, step.scheduling, step.numa,
                    1e3 * seconds, base / seconds, multiple,
                )
            )  # fmt: skip
    return out
