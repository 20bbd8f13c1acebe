"""A hardware profile of the present machine, for `ktc simulate` and the emulated device: measured, written as YAML.

What the fields mean is in docs/simulate.md. A rate of a socket is measured on one socket alone, with as many threads
as a pool would give it. Not here: a GPU's own rates (device_rates.py), reading profiles (ktc/simulate/profile.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ktc import host
from ktc.errors import DiskError, KtcError, UsageError
from ktc.perf import jobs, kernel_bench
from ktc.perf.crossover import SHAPE
from ktc.perf.experts import KtcExperts
from ktc.perf.figures import Report
from ktc.perf.limits import DRAM_HUGE, Limits, Sampler
from ktc.perf.shapes import SCHEMES, SHAPES, MoeShape
from ktc.simulate.hardware import peak_unit
from ktc.simulate.profile import MAX_AMX_MIN_TOKENS, THIS_MACHINE, parse_profile, this_machine_path

ROUNDS = 3
_SHAPE = replace(SHAPE, top_k=SHAPES["v2lite"].top_k)
MANY_TOKENS = 512
"""Tokens of the call whose share of the peak becomes `compute_fraction`."""
_UNITS = {
    "amx_bf16": ("amx_bf16",),
    "amx_int8": ("amx_int8",),
    "avx512": ("avx512_bf16", "fp32_fma"),
    "avx512_int8": ("avx512_vnni", "avx_vnni", "avx2_int8"),
}
"""Units of a profile and the limits that they are measured by: the highest that the machine has. The vector units are
called after AVX-512 whatever they are."""


@dataclass(frozen=True)
class MachineProfile:
    """`fields` is the document as written, `notes` what a reader of it should know."""

    fields: dict[str, Any]
    notes: tuple[str, ...] = ()

    def yaml(self) -> str:
        head = "# A machine as `ktc tune` measured it; docs/simulate.md says what the fields mean.\n"
        head += "".join(f"# {note}\n" for note in self.notes)
        text = head + str(yaml.safe_dump(self.fields, sort_keys=False, allow_unicode=True, width=110))
        parse_profile(text, "the measured profile")  # whatever is written must be readable
        return text

    def write(self, path: Path | None = None) -> Path:
        """Default: `this-machine.yaml` beside the tuning file, which `ktc simulate -H this-machine` finds.

        Raises:
            DiskError: it cannot be written; an older file is then untouched.
        """
        from ktc.codegen.cache import write_atomic

        path = this_machine_path() if path is None else path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"{path.parent} cannot be created: {error.strerror}") from error
        write_atomic(path, self.yaml().encode())
        return path


def measure_machine(
    formats: Sequence[str] = ("int4",),
    amx_min_tokens: int | None = None,
    *,
    seconds: float = 0.3,
    shape: MoeShape = _SHAPE,
    buffer_bytes: int | None = None,
    working_set: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> MachineProfile:
    """Measure the machine that this process may use.

    Args:
        formats: of `ktc.perf.shapes.SCHEMES`; the first becomes the kernels `ktc`, any other `ktc-FORMAT`.
        amx_min_tokens: the crossover that was measured, if it was.
        seconds: timing of each kernel figure.
        buffer_bytes, working_set: bytes read through for the DRAM limit and by the kernels; default: beyond all caches.
        say: told what is measured.
    Raises:
        KtcError: no memory for the buffers, no kernels, an unknown format.
    """
    from ktc import _runtime
    from ktc.engine.pool import place

    nodes = _runtime.numa_nodes()
    sockets = place(nodes, len(nodes), None)  # the CPUs of a pool of this machine, per node
    cpus = sockets[0]
    notes = ["A socket is what Linux calls a NUMA node; its rates are those of its own cores."]
    with _memory_on(cpus):
        say("memory, arithmetic and kernels of a socket")
        # Limits are sampled between the calls that are held against them: a machine's speed drifts.
        kinds = [DRAM_HUGE, *(kind for of_unit in _UNITS.values() for kind in of_unit)]
        sampler = Sampler.of_pool(cpus, kinds, buffer_bytes)
        timed = _time_kernels(formats, shape, cpus, sampler, seconds, working_set, say)
        limits = sampler.limits()
    local = limits.rate(DRAM_HUGE)
    cpu: dict[str, Any] = {
        "name": host.cpu_model(),
        "sockets": len(sockets),
        "cores_per_socket": _cores(sockets),
        "memory_gb": _round(host.memory()[0] / 1e9 / len(sockets)),
        "dram_local_gbs": _round(local / 1e9),
    }
    if len(sockets) > 1:
        say("memory of another socket")
        remote = _remote(cpus, sockets[1], buffer_bytes)
        cpu["dram_remote_gbs"] = _round(min(remote, local) / 1e9)
    cpu["peak_tflops"] = peaks(limits)
    if amx_min_tokens is not None and "amx_int8" in cpu["peak_tflops"]:
        cpu["amx_min_tokens"] = min(max(amx_min_tokens, 1), MAX_AMX_MIN_TOKENS)
    job = timed[0].line(local).job  # the machine's, so one for all formats
    cpu["job_us"] = _round(job * 1e6)
    cpu["kernels"] = {
        "ktc" if i == 0 else f"ktc-{timed[i].format}": timed[i].fractions(local, cpu["peak_tflops"], job)
        for i in range(len(timed))
    }
    fields: dict[str, Any] = {
        "version": 1,
        "name": THIS_MACHINE,
        "description": f"{host.cpu_model()}, measured by ktc tune",
        "cpu": cpu,
    }
    gpu, why = _gpu(timed[0], say)
    fields |= gpu or {"device": {"kind": "cpu"}}
    notes.append(why)
    fields["measured"] = {
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_average": _round(os.getloadavg()[0]),
        "threads_per_socket": len(cpus),
        "limits": {kind: _round(limits.rate(kind)) for kind in limits.rates},
        "kernels": {k.format: k.figures() for k in timed},
    }
    return MachineProfile(fields, tuple(notes))


def peaks(limits: Limits) -> dict[str, float]:
    """`cpu.peak_tflops` from measured limits; units that the machine lacks are left out.

    Raises:
        KtcError: a CPU with neither AVX2 nor AVX-512.
    """
    rates = {unit: max(map(limits.rate, kinds)) for unit, kinds in _UNITS.items()}
    found = {unit: _round(rate / 1e12) for unit, rate in rates.items() if rate}
    if "avx512" not in found:
        raise KtcError("this CPU has neither AVX2 nor AVX-512, so there is no profile of it")
    return found


@dataclass(frozen=True)
class TimedKernels:
    """The expert kernels of one format.

    Attributes:
        one_token: seconds of a call of one layer with one token, by its experts: 1, 2, ... top_k.
        many: seconds of a call with MANY_TOKENS tokens, which does so many `operations`.
        contestant: its layers.
    """

    format: str
    data_type: str
    expert_bytes: float
    one_token: tuple[float, ...]
    many: float
    operations: float
    contestant: KtcExperts

    def line(self, dram: float, job: float | None = None) -> jobs.JobLine:
        """What of `one_token` is a job's own time and what an expert's; none is read faster than `dram` bytes/s."""
        return jobs.fit(self.one_token, self.expert_bytes / dram, job)

    def fractions(self, dram: float, peak_tflops: dict[str, float], job: float) -> dict[str, float]:
        """Of the rates that `ktc simulate` will multiply them with, beside which it counts `job` seconds for each job:
        so neither fraction has that time in it."""
        peak = peak_unit(self.data_type, peak_tflops, amx=True)
        work = max(self.many - job, self.many / 2)
        return {
            "dram_fraction": _fraction(self.expert_bytes / self.line(dram, job).expert / dram),
            "compute_fraction": _fraction(self.operations / work / (1e12 * peak_tflops[peak])),
        }

    def figures(self) -> dict[str, Any]:
        """As measured: these rates have the job's own time in them."""
        read = len(self.one_token) * self.expert_bytes / self.one_token[-1]
        return {
            "us_at_1_token_by_experts": [_round(1e6 * s) for s in self.one_token],
            "gbs_at_1_token": _round(read / 1e9),
            f"tops_at_{MANY_TOKENS}_tokens": _round(self.operations / self.many / 1e12),
        }


def _time_kernels(
    formats: Sequence[str],
    shape: MoeShape,
    cpus: list[int],
    sampler: Sampler,
    seconds: float,
    working_set: int | None,
    say: Callable[[str], None],
) -> list[TimedKernels]:
    from ktc.engine.pool import get_pool
    from ktc.perf.dense_experts import random_experts

    options = kernel_bench.Options((shape,), (MANY_TOKENS,), tuple(formats), (), seconds, working_set=working_set)
    if unknown := [f for f in formats if f not in SCHEMES]:
        raise UsageError(f"unknown format {unknown[0]!r}", f"one of {', '.join(SCHEMES)}")
    if not formats:
        raise UsageError("no format to measure", f"at least one of {', '.join(SCHEMES)}")
    dense = random_experts(shape, distinct=1)
    made = kernel_bench.ktc_contestants(options, shape, dense, get_pool([cpus]), Report(), say)
    say(f"{shape.name}: one token, 1 to {shape.top_k} experts")
    ones = jobs.time_by_experts(made, shape.top_k, seconds, sampler)
    [(_, manies, _)] = kernel_bench.measure_shape(options, shape, dense, made, sampler, say)
    operations = shape.operations(MANY_TOKENS)
    return [
        TimedKernels(name, c.data_type, c.expert_bytes, one, many.median, operations, c)
        for name, c, one, many in zip(formats, made, ones, manies, strict=True)
    ]


def _remote(cpus: list[int], others: list[int], buffer_bytes: int | None) -> float:
    """Bytes/s that `cpus` read from memory that belongs to the CPUs of another node."""
    with _memory_on(others):
        sampler = Sampler.of_pool(cpus, [DRAM_HUGE], buffer_bytes)
    for _ in range(ROUNDS):
        sampler.sample()
    return sampler.limits().rate(DRAM_HUGE)


def _gpu(kernels: TimedKernels, say: Callable[[str], None]) -> tuple[dict[str, Any] | None, str]:
    """`device`, `link` and `host` of the first GPU, or None and why there is none."""
    if not host.this_host().cuda:
        return None, "No GPU here: the device is the CPU itself, so nothing overlaps."
    from ktc.perf import device_rates

    return device_rates.first_gpu(kernels, say)


@contextmanager
def _memory_on(cpus: list[int]) -> Iterator[None]:
    """What this thread touches first lies on the node of `cpus`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cores(sockets: list[list[int]]) -> int:
    cores = [host.physical_cores(set(cpus)) or len(cpus) for cpus in sockets]
    return max(1, min(cores))


def _fraction(value: float) -> float:
    return min(1.0, _round(value))


def _round(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")
