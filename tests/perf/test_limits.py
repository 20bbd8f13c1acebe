"""Limits are positive, cover what this process may use, and refuse what makes no sense. Nothing is timed here."""

from __future__ import annotations

import pytest

from ktc import _runtime
from ktc.errors import KtcError
from ktc.host import this_host
from ktc.perf import limits

TINY = {"buffer_bytes": 4 << 20, "seconds": 0.001, "samples": 2}


def test_every_limit_is_positive_for_every_thread_count() -> None:
    found = limits.measure([0, 0], thread_counts=[1, 2], **TINY)
    assert set(found.rates) == {limits.DRAM_HUGE, limits.DRAM_4K, *_runtime.compute_kinds()}
    assert found.threads == 2 and found.buffer_bytes == 4 << 20
    for kind, by_threads in found.rates.items():
        assert set(by_threads) == {1, 2}, kind
        for rate in by_threads.values():
            assert 0 < rate.median <= rate.high and rate.samples == 6
        assert found.rate(kind) == by_threads[2].high
    assert len(found.lines()) == len(found.rates)


def test_kinds_are_those_of_the_host() -> None:
    features = this_host().features
    kinds = set(_runtime.compute_kinds())
    assert ("amx_int8" in kinds) == ("amx_int8" in features)
    assert ("avx512_vnni" in kinds) == ("avx512_vnni" in features)
    assert ("avx_vnni" in kinds) == ("avx_vnni" in features)
    assert ("avx2_int8" in kinds) == ("avx2" in features)


def test_a_kind_that_is_absent_has_rate_zero() -> None:
    found = limits.measure([0], kinds=[limits.DRAM_HUGE], **TINY)
    assert found.rate("amx_int8") == 0.0


@pytest.mark.parametrize(
    ("cpus", "kinds", "message"),
    [([], None, "no CPUs"), ([0], ["dram_giant"], "unknown limit 'dram_giant'")],
)
def test_nonsense_is_refused(cpus: list[int], kinds: list[str] | None, message: str) -> None:
    with pytest.raises(KtcError, match=message):
        limits.measure(cpus, kinds=kinds, **TINY)


def test_native_calls_refuse_what_they_cannot_measure() -> None:
    with pytest.raises(ValueError, match="does not offer 'tpu'"):
        _runtime.measure_compute("tpu", [0], 0.001)
    with pytest.raises(ValueError, match="at least one CPU"):
        _runtime.measure_compute("fp32_fma", [], 0.001)
    with pytest.raises(ValueError, match="at least 2 MB"):
        _runtime.ReadProbe(1000, True)


@pytest.mark.parametrize(
    ("kind", "rate", "text"),
    [
        ("dram_huge", 31.4e9, "31.4 GB/s"),
        ("amx_int8", 13.5e12, "13.5 TOPS"),
        ("avx_vnni", 1e12, "1 TOPS"),
        ("fp32_fma", 0.42e12, "0.42 TFLOPS"),
    ],
)
def test_rates_are_printed_in_their_unit(kind: str, rate: float, text: str) -> None:
    assert limits.format_rate(kind, rate) == text


def test_a_probe_is_larger_than_any_cache() -> None:
    assert limits.probe_bytes() >= max(1 << 30, 4 * limits.l3_bytes())


def test_a_rate_is_the_upper_decile_of_its_samples() -> None:
    rate = limits.Rate.of([1.0, 9.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 2.0, 10.0, 99.0])
    assert (rate.high, rate.median, rate.samples) == (10.0, 6.0, 11)
    assert limits.Rate.of([3.0]).high == 3.0
