"""Measure decode for K = 0.. on the emulated lane, and ask `ktc simulate` about the same machine.

First every K records the same real steps (same prompt, same tokens), then all K are replayed in turns (turns.py). The
time of a layer of a step is the median over its replays, so that an interruption of one replay is not taken for the
layer's own; times of steps are sums of these. Of the replays, the simulation knows those of K = 0 only.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktc.emulate.lane import EmulatedLane, Replay
from ktc.emulate.scaling import as_measured, slower_device
from ktc.emulate.turns import Turns, contestants, replay_steps, take_turns
from ktc.errors import UsageError
from ktc.host import physical_cores
from ktc.progress import Progress, status
from ktc.simulate.costs import decode_costs
from ktc.simulate.hardware import Hardware
from ktc.simulate.metrics import Use
from ktc.simulate.sweep import Row, decode_row

_TURNS, _CALIBRATIONS = 3, 8
"""Turns of K = 0 for one calibration, and at most so many calibrations until two agree."""
_AGREE, _KEPT = 0.02, 0.05
"""Relative: when two calibrations agree, and how far the shares of K = 0 may be off after all turns."""
_ATTEMPTS = 3
_FEWEST, _MOST, _SECONDS = 7, 15, 40.0
"""Repeats unless asked otherwise."""


@dataclass(frozen=True)
class SweepOptions:
    """
    Attributes:
        deferred: the K to measure; None = all that leave two experts immediate. 0 is always among them.
        steps: decode steps that are recorded and replayed.
        repeats: replays of each; None = 7 to 15, as many as take about 40 s.
        shares: scale the device so that expert time : device time is this at K = 0; None = as the profile says.
        prompt: random tokens before the first step.
    """

    deferred: Sequence[int] | None = None
    steps: int = 6
    repeats: int | None = None
    shares: tuple[float, float] | None = None
    prompt: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """One K on the emulated lane.

    Attributes:
        layer_seconds: of a MoE layer in the middle of the model, averaged over layers and steps.
        token_seconds: of a whole step, averaged over steps.
        layer, cores: medians over all replays.
        typical: the replay of median duration.
        samples: seconds of every replayed step.
    """

    deferred: int
    layer_seconds: float
    token_seconds: float
    layer: Use
    cores: float
    typical: Replay
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Sweep:
    """
    Attributes:
        measured, simulated: one per K, in order.
        hardware: the (scaled) profile with measured experts, jobs and callbacks, which `simulated` is of.
        factor: by which the profile's device was slowed down.
        expert_seconds: of a layer's routed experts at K = 0.
        late: median and 95th percentile of the submit callbacks' lateness, seconds.
        lane: CPU time that the lane's own thread takes for a MoE layer, seconds; median over all replays.
        realtime: the lane had real-time priority.
    """

    measured: tuple[Measured, ...]
    simulated: tuple[Row, ...]
    hardware: Hardware
    factor: float
    expert_seconds: float
    late: tuple[float, float]
    lane: float
    realtime: bool
    steps: int
    repeats: int
    context: int
    threads: int

    def gain(self, rows: Sequence[Any], layer: bool = False) -> float:
        """Of the best K over K = 0: tokens/s (or layers/s), less one."""
        times = [r.layer_seconds if layer else r.token_seconds for r in rows]
        return float(times[0] / min(times) - 1)

    @property
    def best(self) -> int:
        """Index of the fastest measured K."""
        return min(range(len(self.measured)), key=lambda i: self.measured[i].token_seconds)


def run(lane: EmulatedLane, options: SweepOptions) -> Sweep:
    """
    Raises:
        UsageError: a K that leaves fewer than two immediate experts, or more steps than the caches hold.
    """
    ks = _ks(lane, options)
    records = _record(lane, options, ks)
    profile, factor = lane.hardware, 1.0
    repeats = options.repeats or _repeats(lane, records)
    if options.shares is None:
        turns = _take_turns(lane, records, repeats)
    else:
        wanted = options.shares[1] / options.shares[0]
        factor = _calibrate(lane, profile, records[0], wanted)
        for attempt in range(_ATTEMPTS):
            turns = _take_turns(lane, records, repeats)
            off = _correction(lane, turns, wanted)
            if abs(off - 1) <= _KEPT or attempt == _ATTEMPTS - 1:
                break
            factor *= off  # the machine has changed since the calibration
            lane.retime(slower_device(profile, factor))
    lane.forget()
    seconds = turns.middle(0, lambda r: r.experts)
    submit, sync = turns.middle(0, lambda r: r.submit), turns.middle(0, lambda r: r.sync)
    hardware = as_measured(
        lane.hardware,
        lane.plan,
        seconds,
        submit,
        sync,
        job=turns.second_job,
        start=turns.start,
        cores=_cores(lane.graph.pool.threads),
    )
    costs = decode_costs(lane.plan, hardware, context=lane.context, numa="single")
    everything = turns.all()
    late = np.concatenate([r.late for r in everything])
    return Sweep(
        measured=tuple(_summary(k, turns) for k in ks),
        simulated=tuple(decode_row(costs, k) for k in ks),
        hardware=hardware,
        factor=factor,
        expert_seconds=seconds,
        late=(float(np.quantile(late, 0.5)), float(np.quantile(late, 0.95))),
        lane=statistics.median(r.lane for r in everything) / len(lane.script.blocks),
        realtime=all(r.realtime for r in everything),
        steps=options.steps,
        repeats=repeats,
        context=lane.context,
        threads=lane.graph.pool.threads,
    )


def _calibrate(lane: EmulatedLane, profile: Hardware, records: Sequence[int], wanted: float) -> float:
    """The factor on the device's times that makes its share of K = 0 `wanted` times the experts'; it is set."""
    factor = 1.0
    with status("the device's share"):
        for _ in range(_CALIBRATIONS):
            off = _correction(lane, replay_steps(lane, records, _TURNS), wanted)
            factor *= off
            lane.retime(slower_device(profile, factor))
            if abs(off - 1) <= _AGREE:
                break
    return factor


def _correction(lane: EmulatedLane, turns: Turns, wanted: float) -> float:
    """What the device's times must be multiplied with."""
    return turns.middle(0, lambda r: r.experts) * wanted / lane.script.device_seconds


def _repeats(lane: EmulatedLane, records: dict[int, list[int]]) -> int:
    turn = contestants(lane, records) * sum(lane.replay(number).row.token_seconds for number in records[0])
    return max(_FEWEST, min(_MOST, int(_SECONDS / turn)))


def _take_turns(lane: EmulatedLane, records: dict[int, list[int]], repeats: int) -> Turns:
    with Progress("emulate", repeats * contestants(lane, records) * len(records[0]), "steps") as progress:
        return take_turns(lane, records, repeats, lambda: progress.update(1))


def _cores(threads: int) -> int:
    """Cores that this many threads ran on: at most the physical ones of this process."""
    cpus = os.sched_getaffinity(0)
    return min(threads, physical_cores(cpus) or len(cpus))


def _ks(lane: EmulatedLane, options: SweepOptions) -> list[int]:
    most = lane.costs.max_deferred
    if options.deferred is None:
        return list(range(most + 1))
    wrong = [k for k in options.deferred if not 0 <= k <= most]
    if wrong:
        raise UsageError(
            f"{wrong[0]} of {most + 2} experts cannot be deferred: at least 2 stay immediate",
            f"-K takes 0 to {most} here",
        )
    return sorted({0, *options.deferred})


def _record(lane: EmulatedLane, options: SweepOptions, ks: Sequence[int]) -> dict[int, list[int]]:
    """K -> numbers of its records."""
    graph = lane.graph
    if options.steps < 1 or options.prompt < 1 or (options.repeats is not None and options.repeats < 1):
        raise UsageError("steps, repeats and prompt must be at least 1")
    if options.prompt + options.steps > graph.context:
        raise UsageError(f"{options.prompt} + {options.steps} tokens do not fit caches of {graph.context} positions")
    tokens = np.random.default_rng(options.seed).integers(0, graph.program.vocab, options.prompt + options.steps)
    records: dict[int, list[int]] = {}
    lane.forget()
    for k in ks:
        for begin in range(0, options.prompt, graph.chunk):
            graph.step(tokens[begin : min(begin + graph.chunk, options.prompt)], begin)
        positions = range(options.prompt, options.prompt + options.steps)
        records[k] = [lane.record(int(tokens[p]), p, k)[0] for p in positions]
    return records


def _summary(k: int, turns: Turns) -> Measured:
    replays = [r for turn in turns.replays[k] for r in turn]

    def median(of: Callable[[Replay], float]) -> float:
        return statistics.median(of(r) for r in replays)

    order = sorted(replays, key=lambda r: r.row.token_seconds)
    return Measured(
        deferred=k,
        layer_seconds=turns.middle(k, lambda r: r.blocks),
        token_seconds=float(turns.medians(k, lambda r: r.blocks).sum(axis=1).mean()),
        layer=Use(
            median(lambda r: r.row.layer.cpu),
            median(lambda r: r.row.layer.device),
            median(lambda r: r.row.layer.both),
            median(lambda r: r.row.layer.idle),
        ),
        cores=median(lambda r: r.cores),
        typical=order[len(order) // 2],
        samples=tuple(r.row.token_seconds for r in replays),
    )
