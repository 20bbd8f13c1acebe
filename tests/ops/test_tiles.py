"""Attention by tiles: every arithmetic forced in turn, against the naive softmax and against attention by rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ktc import _runtime
from tests.ops.test_attention import BF16, F32, KERNELS, ROWS, Case, Gqa, Mla, MlaCase, name_of
from tests.ops.test_ops import ISAS, close

kernels = pytest.mark.parametrize(("isa", "prefill"), KERNELS, ids=[isa for isa, _ in KERNELS])
SHAPES = [
    Gqa(),
    Gqa(heads=6, kv_heads=1, dim=17, half=4),
    Gqa(heads=5, kv_heads=5, dim=80, half=40, norm=True),
    Gqa(heads=8, kv_heads=1, dim=136, half=32),
    Gqa(window=9),
    Gqa(window=70, sinks=True),
    Gqa(window=600, sinks=True, clip=0.8),
]
CHUNKS = [16, 130, 17, 64, 700, 65, 40, 1, 18]  # past a stretch of keys, odd, and rows in between


def near(got: torch.Tensor, want: torch.Tensor, prefill: int) -> None:
    """f32 to rounding; bf16 to what rounding q, k, v and probabilities to 8 bits can do."""
    if prefill == F32:
        return close(got, want, 5e-6)
    assert torch.isfinite(got).all()
    error = (got - want).abs() / want.abs().max()
    assert error.max() <= 2e-2
    assert error.mean() <= 1e-3


@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gqa_chunks(isa: str, prefill: int, shape: Gqa) -> None:
    case = Case(shape, sum(CHUNKS))
    near(case.run(isa, CHUNKS, prefill=prefill), case.naive(), prefill)


@kernels
@pytest.mark.parametrize("kv_b_type", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "shape", [Mla(), Mla(33, 6, 4, 10, 20), Mla(3, 128, 64, 128, 300), Mla(2, 40, 16, 72, 65)], ids=str
)
def test_mla_chunks(isa: str, prefill: int, kv_b_type: str, shape: Mla) -> None:
    case = MlaCase(shape, 720, style=1, kv_b_type=kv_b_type)
    got = case.run(isa, [16, 600, 1, 103], prefill=prefill)
    assert case.ran[1:3] == [name_of(isa, prefill, 600), "rows"]
    near(got, case.naive(), prefill)


def test_mla_expands_where_that_is_less_work() -> None:
    # f32: 24 * 32 + rows * 40 multiply-adds against rows * 56.
    case = MlaCase(Mla(), 100)
    case.run("baseline", [48, 50])
    assert case.ran == ["rows", "baseline"]


@kernels
def test_equal_scores_give_the_exact_mean(isa: str, prefill: int) -> None:
    """Nothing rounds but the last division: which keys are seen, and where every value goes, shows exactly."""
    for shape in SHAPES[3:]:
        case = Case(dataclasses.replace(shape, sinks=False, clip=0.0), 300)
        case.q.zero_()
        case.v = case.v.mul(2).round().clamp(-8, 8)
        close(case.run(isa, [203, 97], prefill=prefill), case.naive(), 1e-6)


@kernels
def test_one_score_above_all_gives_that_value(isa: str, prefill: int) -> None:
    """Every query singles out one key, with numbers that bf16 holds: products of scores show exactly."""
    total, dim = 300, 64
    case = Case(Gqa(heads=2, kv_heads=2, dim=dim, half=0), total)
    signs = torch.randint(0, 2, (total, 2, dim), generator=torch.Generator().manual_seed(1)) * 2.0 - 1.0
    target = torch.arange(total) * 7919 % (torch.arange(total) + 1)
    case.k = signs.reshape(total, -1).contiguous()
    case.q = (signs[target] * 16).reshape(total, -1).contiguous()
    case.v = case.v.bfloat16().float()
    want = case.v[target]
    close(case.run(isa, [total], prefill=prefill), want, 1e-6)


@kernels
def test_scores_that_keep_growing_and_huge_ones(isa: str, prefill: int) -> None:
    """The running maximum is raised at every block; scores of some thousands overflow nothing."""
    case = Case(Gqa(heads=2, kv_heads=1, dim=32, half=0), 700)
    ramp = torch.linspace(0, 1, 700)[:, None]
    case.k, case.q = case.k.abs() * ramp * (2 if prefill == F32 else 1), case.q.abs() * 4
    near(case.run(isa, [700], prefill=prefill), case.naive(), prefill)
    case.q = case.q * 64
    got = case.run(isa, [700], prefill=prefill)
    assert torch.isfinite(got).all()
    assert (got.abs().amax() <= case.v.abs().amax() * 1.01).all()


@kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_s6_bad_values_reach_their_own_queries_only(isa: str, prefill: int, bad: float) -> None:
    # failure S6, in masked blocks, in whole ones and at the edge of a window; the other rows keep their bits.
    for shape, last in ((Gqa(), 300), (Gqa(window=100, heads=8, kv_heads=1, dim=72), 241)):
        case = Case(shape, 300)
        clean = case.run(isa, [300], prefill=prefill)
        value = case.v[141, 3].clone()
        case.v[141, 3] = bad
        dirty = case.run(isa, [300], prefill=prefill)
        assert torch.equal(dirty[:141], clean[:141]) and torch.equal(dirty[last:], clean[last:])
        assert (~torch.isfinite(dirty[141:last])).any(-1).all()
        case.v[141, 3] = value
        case.q[10] = float("nan")
        again = case.run(isa, [300], prefill=prefill)
        assert torch.isnan(again[10]).all()
        assert torch.equal(again[:10], clean[:10]) and torch.equal(again[11:], clean[11:])
        case.q[10] = 0.0
        case.k[200] = float("nan")
        keyed = case.run(isa, [300], prefill=prefill)
        assert torch.equal(keyed[11:200], clean[11:200])
        assert torch.isnan(keyed[200]).any()


@kernels
def test_s6_mla_bad_latents(isa: str, prefill: int) -> None:
    case = MlaCase(Mla(3, 32, 8, 24, 20), 200)
    clean = case.run(isa, [200], prefill=prefill)
    case.kv[77, 2] = float("nan")
    dirty = case.run(isa, [200], prefill=prefill)
    assert torch.equal(dirty[:77], clean[:77])
    assert torch.isnan(dirty[77:]).any(-1).all()


@kernels
def test_same_bits_for_every_thread_count_and_on_every_run(isa: str, prefill: int) -> None:
    # failure Q5
    gqa, mla = Case(Gqa(heads=6, kv_heads=3, dim=40, half=20, sinks=True), 700), MlaCase(Mla(), 700)
    for case in (gqa, mla):
        alone = case.run(isa, [600, 83], prefill=prefill)
        assert torch.equal(case.run(isa, [600, 83], prefill=prefill), alone)
        for threads in (2, 5):
            pool = _runtime.Pool([[0] * threads], pin=False)
            assert torch.equal(case.run(isa, [600, 83], pool, prefill), alone)


@kernels
def test_groups_of_heads(isa: str, prefill: int) -> None:
    """More heads than the scratch of one group: 16 KV heads of 1024 queries."""
    case = Case(Gqa(heads=128, kv_heads=16, dim=128, half=64), 140)
    got = case.run(isa, [8, 132], prefill=prefill)
    near(got, case.run("", [8, 132], prefill=ROWS), prefill)


def test_bf16_without_bf16_hardware_is_f32() -> None:
    case = Case(Gqa(), 100)
    for isa in ISAS:
        if isa.startswith(("baseline", "avx2")) or isa == "avx512":
            assert torch.equal(case.run(isa, [100], prefill=BF16), case.run(isa, [100], prefill=F32))
