"""What this machine can do at most, measured natively: DRAM read rate and peak arithmetic.

Every roofline of ktc is drawn from these. The loops are in runtime/src/machine_limits_kernels.cpp; this
file decides what is sampled, how often, and what a sample becomes. Not here: rooflines (shapes.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ktc.errors import KtcError, UsageError

DRAM_HUGE = "dram_huge"
DRAM_4K = "dram_4k"
_COMPUTE_SECONDS = 0.005
_PER_ROUND = 3
"""Samples of a round: short ones, a few milliseconds each, so that most are not interrupted on a shared machine."""
_MIN_BUFFER = 1 << 30


@dataclass(frozen=True)
class Rate:
    """One limit with one number of threads: bytes/s or operations/s (a multiply and an add are two).

    `high`, the upper decile of the samples, is what rooflines use: a limit is what the machine can do when nothing
    disturbs it, and a median of disturbed samples would flatter whatever is measured against it. On a quiet machine
    the two are within a few percent of each other.
    """

    high: float
    median: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Rate:
        ordered = sorted(samples)
        return cls(ordered[(len(ordered) - 1) * 9 // 10], statistics.median(samples), len(samples))

    @classmethod
    def best_of_last(cls, samples: list[float]) -> Rate:
        """Of the last round alone."""
        best = max(samples[-_PER_ROUND:])
        return cls(best, best, _PER_ROUND)


@dataclass(frozen=True)
class Limits:
    """All limits: kind -> number of threads -> Rate.

    Kinds: "dram_huge", "dram_4k" in bytes/s; "amx_int8", "amx_bf16", "avx512_vnni", "avx_vnni", "avx2_int8",
    "avx512_bf16", "fp32_fma" in operations/s, as far as this process may use them.
    """

    rates: dict[str, dict[int, Rate]]
    threads: int
    buffer_bytes: int

    def rate(self, kind: str) -> float:
        """What all threads together can do; 0.0 for a kind that this machine does not have."""
        return self.rates[kind][self.threads].high if kind in self.rates else 0.0

    def or_higher(self, other: Limits) -> Limits:
        """For each rate the higher one of two moments."""
        rates = {
            kind: {n: max(rate, other.rates[kind][n], key=lambda r: r.high) for n, rate in by_threads.items()}
            for kind, by_threads in self.rates.items()
        }
        return Limits(rates, self.threads, self.buffer_bytes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """One line per kind: the rate per number of threads, in GB/s, TOPS or TFLOPS (decimal)."""
        out = []
        for kind, by_threads in self.rates.items():
            cells = [f"{n} thread{'s' * (n != 1)} {format_rate(kind, r.high)}" for n, r in by_threads.items()]
            out.append(f"{kind:<12} {'   '.join(cells)}")
        return out


def format_rate(kind: str, rate: float) -> str:
    """("dram_huge", 31.4e9) -> "31.4 GB/s"; ("amx_int8", 13.5e12) -> "13.5 TOPS"."""
    if kind.startswith("dram"):
        return f"{rate / 1e9:.1f} GB/s"
    unit = "TOPS" if kind.endswith(("int8", "vnni")) else "TFLOPS"
    return f"{rate / 1e12:.3g} {unit}"


def l3_bytes() -> int:
    """The last-level cache as this machine shows it (a virtual machine may see all of a shared one); 0 if unknown."""
    from pathlib import Path

    best = 0
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = index.read_text().strip()
        except OSError:
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
        if unit and text[:-1].isdigit():
            best = max(best, int(text[:-1]) * unit)
    return best


def probe_bytes() -> int:
    """How large a buffer must be so that reading through it again finds nothing in a cache."""
    return max(_MIN_BUFFER, 4 * l3_bytes())


class Sampler:
    """Takes a few short samples of each limit at a time, so that a benchmark can sample between its own measurements.

    Args:
        cpus: the CPUs of the pool whose limits they are, one thread each.
        kinds: limits to sample; default all that this process may use.
        thread_counts: how many of the CPUs; default 1 and all.
        buffer_bytes: size of the buffer that is read through; default `probe_bytes()`.
    Raises:
        KtcError: no CPUs, an unknown kind, or no memory for the buffer.
    """

    def __init__(
        self,
        cpus: list[int],
        kinds: list[str] | None = None,
        thread_counts: list[int] | None = None,
        buffer_bytes: int | None = None,
        seconds: float = _COMPUTE_SECONDS,
    ) -> None:
        from ktc import _runtime

        if not cpus:
            raise KtcError("limits cannot be measured on no CPUs")
        known = [DRAM_HUGE, DRAM_4K, *_runtime.compute_kinds()]
        self.kinds = known if kinds is None else [k for k in kinds if k in known]
        if kinds and (unknown := set(kinds) - {DRAM_HUGE, DRAM_4K, *_ALL_COMPUTE}):
            raise UsageError(
                f"unknown limit {min(unknown)!r}", f"one of {', '.join([DRAM_HUGE, DRAM_4K, *_ALL_COMPUTE])}"
            )
        self.cpus = cpus
        self.counts = sorted({n for n in (thread_counts or [1, len(cpus)]) if 1 <= n <= len(cpus)} | {len(cpus)})
        self.buffer_bytes = probe_bytes() if buffer_bytes is None else buffer_bytes
        self.seconds = seconds
        self._samples: dict[str, dict[int, list[float]]] = {k: {n: [] for n in self.counts} for k in self.kinds}
        try:
            self._probes = {
                kind: _runtime.ReadProbe(self.buffer_bytes, kind == DRAM_HUGE)
                for kind in (DRAM_HUGE, DRAM_4K)
                if kind in self.kinds
            }
        except MemoryError as error:
            raise KtcError(f"no memory for a buffer of {self.buffer_bytes} bytes to read through") from error

    @classmethod
    def of_pool(cls, cpus: list[int], kinds: list[str], buffer_bytes: int | None = None) -> Sampler:
        """What a pool on these CPUs can do, all of them together. Threads that share a CPU have no more than it."""
        own = list(dict.fromkeys(cpus))
        return cls(own, kinds, [len(own)], buffer_bytes)

    def sample(self) -> Limits:
        """One more round: a few samples of everything. Returns the best of them: what the machine can do now."""
        from ktc import _runtime

        for kind in self.kinds:
            for count in self.counts:
                cpus = self.cpus[:count]
                for _ in range(_PER_ROUND):
                    if kind in self._probes:
                        rate = self._probes[kind].sample(cpus)
                    else:
                        rate = _runtime.measure_compute(kind, cpus, self.seconds)
                    self._samples[kind][count].append(rate)
        return self._limits(Rate.best_of_last)

    def read_rate(self) -> float:
        """Bytes/s of all threads now: the best of a few samples of `dram_huge`, which are kept too."""
        taken = self._samples[DRAM_HUGE][len(self.cpus)]
        taken += [self._probes[DRAM_HUGE].sample(self.cpus) for _ in range(_PER_ROUND)]
        return max(taken[-_PER_ROUND:])

    def limits(self) -> Limits:
        """What the samples so far amount to; takes one if there is none."""
        if not next(iter(self._samples.values()))[self.counts[0]]:
            self.sample()
        return self._limits(Rate.of)

    def _limits(self, rate: Callable[[list[float]], Rate]) -> Limits:
        rates = {k: {n: rate(s) for n, s in by_count.items()} for k, by_count in self._samples.items()}
        return Limits(rates, len(self.cpus), self.buffer_bytes)


_ALL_COMPUTE = ("amx_int8", "amx_bf16", "avx512_vnni", "avx_vnni", "avx2_int8", "avx512_bf16", "fp32_fma")


def measure(
    cpus: list[int] | None = None,
    samples: int = 5,
    kinds: list[str] | None = None,
    thread_counts: list[int] | None = None,
    buffer_bytes: int | None = None,
    seconds: float = _COMPUTE_SECONDS,
) -> Limits:
    """Measure the limits in a few rounds; a round samples every kind a few times per number of threads.

    Args:
        cpus: default all that this process may use (within its control group's quota).
        samples: rounds.
        kinds, thread_counts, buffer_bytes: see `Sampler`.
        seconds: length of one sample of arithmetic.
    Raises:
        KtcError: see `Sampler`.
    """
    sampler = Sampler(default_cpus() if cpus is None else cpus, kinds, thread_counts, buffer_bytes, seconds)
    for _ in range(samples):
        sampler.sample()
    return sampler.limits()


def default_cpus(threads: int | None = None) -> list[int]:
    """The CPUs that a pool of so many threads takes, all nodes together (see ktc.engine.pool.place)."""
    from ktc import _runtime
    from ktc.engine.pool import place

    return place(_runtime.numa_nodes(), 1, threads)[0]
