"""Turns and the limits of their rounds, with a machine whose memory changes between rounds."""

from __future__ import annotations

import pytest

from ktc.perf import interleave
from ktc.perf.interleave import Timing, take_turns
from ktc.perf.limits import Limits, Rate, Sampler
from ktc.perf.shapes import Floor


def limits(rate: float) -> Limits:
    return Limits({"dram_huge": {2: Rate(rate, rate, 3)}}, 2, 0)


class Memory:
    """Stands where a Sampler does: 1 GB/s in the first two rounds, then 4."""

    def __init__(self) -> None:
        self.rounds = 0

    def sample(self) -> Limits:
        self.rounds += 1
        return limits(1e9 if self.rounds <= 2 else 4e9)


class Reader:
    """Stands where a Turn does: reads 1 GB at half of what memory delivers, twice a turn."""

    burst = 1

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def time_one(self) -> float:
        return 0.015  # two of them are a burst

    def run(self, timing: Timing) -> float:
        timing.seconds += [2.0 if self.memory.rounds <= 2 else 0.5] * self.burst
        timing.active += [1] * self.burst
        return 1.0


def test_a_call_is_compared_with_the_limits_of_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "_MOMENT_SECONDS", 0.0)
    memory = Memory()
    (timing,) = take_turns([Reader(memory)], 0.0, memory, min_rounds=5)  # type: ignore[list-item,arg-type]
    assert memory.rounds == 6  # one more after the last round
    assert [m.rate("dram_huge") for m in timing.limits] == [1e9] * 2 + [4e9] * 8
    # By the highest limit of the run the first calls would be 8 times their floor, by the lowest all others half of it.
    assert timing.times(lambda moment: Floor(1e9 / moment.rate("dram_huge"), 0.0)) == 2.0


def test_short_rounds_share_the_samples_of_the_limits() -> None:
    memory = Memory()
    (timing,) = take_turns([Reader(memory)], 0.0, memory, min_rounds=5)  # type: ignore[list-item,arg-type]
    assert memory.rounds == 2 and len(timing.limits) == len(timing.seconds) == 10


def test_without_limits_there_is_no_floor() -> None:
    (timing,) = take_turns([Reader(Memory())], 0.0)  # type: ignore[list-item]
    with pytest.raises(ValueError):
        timing.times(lambda moment: Floor(1.0, 0.0))


def test_the_higher_of_two_moments_is_taken_rate_by_rate() -> None:
    def two(dram: float, fma: float) -> Limits:
        return Limits({"dram_huge": {1: Rate(dram, dram, 3)}, "fp32_fma": {1: Rate(fma, fma, 3)}}, 1, 0)

    higher = two(1.0, 4.0).or_higher(two(2.0, 3.0))
    assert (higher.rate("dram_huge"), higher.rate("fp32_fma")) == (2.0, 4.0)


def test_a_round_is_the_best_of_its_own_samples() -> None:
    sampler = Sampler([0], ["dram_huge"], [1], 16 << 20)
    first, second = sampler.sample(), sampler.sample()
    samples = sampler._samples["dram_huge"][1]
    assert len(samples) == 6
    assert (first.rate("dram_huge"), second.rate("dram_huge")) == (max(samples[:3]), max(samples[3:]))
