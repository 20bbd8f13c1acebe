"""The arithmetic of shapes, sizes and rooflines, against figures worked out by hand."""

from __future__ import annotations

import pytest

from ktc.errors import KtcError
from ktc.layout import QuantScheme
from ktc.perf.limits import Limits, Rate
from ktc.perf.shapes import SCHEMES, SHAPES, arithmetic_kind, floor, parse_shape


def fake_limits(**rates: float) -> Limits:
    return Limits({kind: {2: Rate(rate, rate, 1)} for kind, rate in rates.items()}, 2, 0)


MACHINE = fake_limits(dram_huge=30e9, amx_int8=13.5e12, amx_bf16=6.5e12, fp32_fma=0.4e12)


def test_operations_count_two_for_each_weight_of_each_routed_expert() -> None:
    assert SHAPES["v2lite"].operations(1024) == 2 * 1024 * 6 * 3 * 2048 * 1408


def test_packed_bytes_include_scales_and_padding() -> None:
    # 4 bits, a 4-bit selector for 16 weights, one f32 scale per row: 2 * 1408 rows of gate_up and 2048 of down.
    shape = SHAPES["v2lite"]
    expected = shape.expert_params // 2 + shape.expert_params // 32 + 4 * (2 * 1408 + 2048)
    assert shape.expert_bytes(SCHEMES["int4"]) == expected
    assert shape.expert_bytes(SCHEMES["int4-g32"]) == expected  # a one-byte multiplier for 32 weights
    assert shape.bits_per_param(SCHEMES["int4"]) < 4.28
    assert shape.bits_per_param(QuantScheme("bf16")) == 16.0
    odd = parse_shape("4x100x70:2")  # H pads to 128, I to 128
    assert odd.expert_bytes(QuantScheme("bf16")) == 2 * (256 * 128 + 128 * 128)


def test_decode_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    shape = SHAPES["v2lite"]
    one = floor(shape, "int4", 29.2e6, 1, MACHINE)
    assert one.bound == "memory" and one.seconds == pytest.approx(29.2e6 / 30e9)
    many = floor(shape, "int4", 311e6, 4096, MACHINE)
    assert many.bound == "compute" and many.seconds == pytest.approx(shape.operations(4096) / 13.5e12)
    assert floor(shape, "bf16", 0, 4096, MACHINE).seconds == pytest.approx(shape.operations(4096) / 6.5e12)


def test_the_fastest_arithmetic_that_was_measured_bounds() -> None:
    assert arithmetic_kind("int4", MACHINE) == "amx_int8"
    assert arithmetic_kind("int8", fake_limits(avx512_vnni=1e12, fp32_fma=1e11)) == "avx512_vnni"
    assert arithmetic_kind("bf16", fake_limits(fp32_fma=1e11)) == "fp32_fma"
    assert arithmetic_kind("bf16", fake_limits(fp32_fma=4e11, avx512_bf16=2e11)) == "fp32_fma"  # Intel
    assert arithmetic_kind("bf16", fake_limits(fp32_fma=5e11, avx512_bf16=1e12)) == "avx512_bf16"  # AMD
    assert arithmetic_kind("bf16", fake_limits()) == ""
    assert floor(SHAPES["v2lite"], "bf16", 1e6, 1, fake_limits(dram_huge=1e9)).compute == 0.0


def test_shapes_by_name_and_by_numbers() -> None:
    assert parse_shape("qwen3").model == "Qwen3-30B-A3B"
    shape = parse_shape("8x256x192:2")
    assert (shape.experts, shape.hidden, shape.intermediate, shape.top_k) == (8, 256, 192, 2)


@pytest.mark.parametrize("text", ["v4", "8x256:2", "8x256x192", "0x256x192:2", "8x-1x192:2", ""])
def test_unknown_shapes_are_refused(text: str) -> None:
    with pytest.raises(KtcError, match="unknown shape"):
        parse_shape(text)


def test_more_experts_per_token_than_there_are_is_refused() -> None:
    with pytest.raises(KtcError, match="top 9 of 8"):
        parse_shape("8x64x64:9")
