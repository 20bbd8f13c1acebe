"""Native attention against a naive softmax: grouped-query with windows and sinks, MLA, chunks, threads.

By rows (decode, and the reference), and by tiles (prefill): in f32 on every ISA, in bf16 where the CPU has it.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ktc import _runtime
from tests.ops.test_ops import DTYPES, ISAS, close, ops, ptr, rand, rotary

CONTEXT = 1400
F32, BF16, ROWS = 0, 1, 2  # of ops/attention.h
BF16_ISAS = [isa for isa in ISAS if isa in ("avx512_bf16", "amx")]
KERNELS = [(isa, F32) for isa in ISAS if isa not in BF16_ISAS] + [(isa, BF16) for isa in BF16_ISAS]


def name_of(isa: str, prefill: int, rows: int) -> str:
    """What must run: tiles from 16 rows on; the bf16 ISAs use avx512 for f32."""
    if prefill == ROWS or rows < 16:
        return "rows"
    return isa if prefill == BF16 or isa not in BF16_ISAS else "avx512"


@dataclasses.dataclass(frozen=True)
class Gqa:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 24
    half: int = 12
    window: int = 0
    sinks: bool = False
    norm: bool = False
    clip: float = 0.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim], half-split on the first 2 * half dims."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


class Case:
    """Random q, k, v of a whole sequence, the naive result, and a runner over chunks with a cache."""

    def __init__(self, shape: Gqa, total: int) -> None:
        s, self.s, self.total = shape, shape, total
        self.q, self.k, self.v = (
            rand(total, h * s.dim, seed=i) for i, h in enumerate((s.heads, s.kv_heads, s.kv_heads))
        )
        self.cos, self.sin = rotary(s.half, 0, total, 1.0)
        self.q_norm, self.k_norm = (rand(s.dim, seed=5), rand(s.dim, seed=6)) if s.norm else (None, None)
        self.sinks = rand(s.heads, seed=7) if s.sinks else None

    def naive(self) -> torch.Tensor:
        s, n = self.s, self.total

        def ready(x: torch.Tensor, heads: int, weight: torch.Tensor | None, turn: bool) -> torch.Tensor:
            x = x.view(n, heads, s.dim).double()
            if weight is not None:
                x = weight.double() * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = x.clamp(-s.clip, s.clip) if s.clip else x
            return rotate(x, self.cos.double(), self.sin.double()) if turn else x

        q, k = ready(self.q, s.heads, self.q_norm, True), ready(self.k, s.kv_heads, self.k_norm, True)
        v = ready(self.v, s.kv_heads, None, False)
        k, v = (t.repeat_interleave(s.heads // s.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.2
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        hidden = (j > i) | ((j <= i - s.window) if s.window else torch.zeros(n, n, dtype=torch.bool))
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, n, 1)), -1)
        p = scores.softmax(-1)[..., :n]
        return torch.einsum("hqk,khd->qhd", p, v).reshape(n, -1).float()

    def run(self, isa: str, chunks: list[int], pool: object = None, prefill: int = F32) -> torch.Tensor:
        s, at, out = self.s, 0, []
        keys, values = (torch.full((s.kv_heads, CONTEXT, s.dim), float("nan")) for _ in range(2))
        for rows in chunks:
            part = slice(at, at + rows)
            y = torch.full((rows, s.heads * s.dim), float("nan"))
            ran = ops.gqa(
                isa, pool, s.heads, s.kv_heads, s.dim, s.half, s.window, 0, 0.2, 1e-6, s.clip, ptr(self.q[part]),
                ptr(self.k[part]), ptr(self.v[part]), ptr(self.cos[part]), ptr(self.sin[part]), ptr(self.q_norm),
                ptr(self.k_norm), ptr(self.sinks), ptr(keys), ptr(values), CONTEXT, at, rows, ptr(y),
                prefill)  # fmt: skip
            assert not isa or ran == name_of(isa, prefill, rows)
            out.append(y)
            at += rows
        return torch.cat(out)


SHAPES = [
    Gqa(),
    Gqa(heads=6, kv_heads=1, dim=17, half=4),
    Gqa(heads=2, kv_heads=2, dim=64, half=32, norm=True),
    Gqa(window=9),
    Gqa(window=70, sinks=True),
    Gqa(sinks=True, clip=0.8),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gqa_prefill_chunks_and_decode(isa: str, shape: Gqa) -> None:
    # failures A2 (past the window) and S5 (odd row counts).
    case = Case(shape, 333)
    close(case.run(isa, [1, 130, 7, 64, 65, *[1] * 66]), case.naive(), 5e-6)


@pytest.mark.parametrize("shape", [Gqa(4, 1), Gqa(6, 3), Gqa(8, 8, sinks=True), Gqa(2, 1, window=300)], ids=str)
def test_gqa_keys_split_at_every_remainder(shape: Gqa) -> None:
    """1, 2, 4, ... parts of the keys, the last one of several lengths down to a single key or none."""
    for total in (256, 257, 273, 513, 529, 1025):
        case = Case(shape, total)
        want = case.naive()
        for last in (1, 15):
            close(case.run("", [total - last, last])[-last:], want[-last:], 5e-6)


def test_gqa_same_bits_for_every_thread_count() -> None:
    # failure Q5: the split of the keys depends on shapes, not on threads.
    case = Case(Gqa(heads=3, kv_heads=3, dim=40, half=20), 650)
    chunks = [600, 47, 1, 1, 1]
    alone = case.run("", chunks)
    for threads in (2, 5):
        assert torch.equal(case.run("", chunks, _runtime.Pool([[0] * threads], pin=False)), alone)


@pytest.mark.parametrize("isa", ISAS)
def test_s6_gqa_nan_row_reaches_later_rows_only(isa: str) -> None:
    # failure S6: 0 x NaN of a key that a row may not see must not reach it.
    case = Case(Gqa(), 100)
    clean = case.run(isa, [100])
    case.v[41, 3] = float("nan")
    dirty = case.run(isa, [100])
    assert torch.equal(dirty[:41], clean[:41])
    assert torch.isnan(dirty[41:]).any(-1).all()
    case.q[10] = float("nan")
    case.v[41, 3] = 0.0
    again = case.run(isa, [100])
    assert torch.isnan(again[10]).all() and torch.equal(again[:10], clean[:10])
    assert torch.isfinite(again[11:]).all()


@dataclasses.dataclass(frozen=True)
class Mla:
    heads: int = 4
    nope: int = 16
    rope: int = 8
    v_dim: int = 16
    rank: int = 24


class MlaCase:
    """As `Case`, for latent attention."""

    def __init__(self, shape: Mla, total: int, style: int = 1, kv_b_type: str = "fp32") -> None:
        s, self.s, self.total, self.style, self.kv_b_type = shape, shape, total, style, kv_b_type
        self.q, self.kv = rand(total, s.heads * (s.nope + s.rope)), rand(total, s.rank + s.rope, seed=1)
        self.norm = rand(s.rank, seed=2)
        kv_b = rand(s.heads * (s.nope + s.v_dim), s.rank, seed=3, scale=s.rank**-0.5)
        self.kv_b = kv_b.to(DTYPES[kv_b_type])
        self.cos, self.sin = rotary(s.rope // 2, 0, total, 1.0)

    def naive(self) -> torch.Tensor:
        s, n = self.s, self.total

        def turn(x: torch.Tensor) -> torch.Tensor:  # [T, heads, rope]; pair order does not change scores
            split = (x[..., : s.rope // 2], x[..., s.rope // 2 :])
            a, b = split if self.style == 0 else (x[..., 0::2], x[..., 1::2])
            cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q = self.q.double().view(n, s.heads, s.nope + s.rope)
        latent = self.kv.double()[:, : s.rank]
        latent = self.norm.double() * latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + 1e-6)
        expanded = (latent @ self.kv_b.double().T).view(n, s.heads, s.nope + s.v_dim)
        shared = turn(self.kv.double()[:, None, s.rank :]).expand(-1, s.heads, -1)
        keys = torch.cat((expanded[..., : s.nope], shared), -1)
        queries = torch.cat((q[..., : s.nope], turn(q[..., s.nope :])), -1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * 0.3
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), expanded[..., s.nope :]).reshape(n, -1).float()

    def run(self, isa: str, chunks: list[int], pool: object = None, prefill: int = F32) -> torch.Tensor:
        s, at, out = self.s, 0, []
        cache = torch.full((CONTEXT, s.rank + s.rope), float("nan"))
        self.ran: list[str] = []
        for rows in chunks:
            part = slice(at, at + rows)
            y = torch.full((rows, s.heads * s.v_dim), float("nan"))
            ran = ops.mla(
                isa, pool, s.heads, s.nope, s.rope, s.v_dim, s.rank, self.style, 0.3, 1e-6, ptr(self.q[part]),
                ptr(self.kv[part]), ptr(self.cos[part]), ptr(self.sin[part]), ptr(self.norm), ptr(self.kv_b),
                self.kv_b_type, ptr(cache), at, rows, ptr(y), prefill)  # fmt: skip
            self.ran.append(ran)
            out.append(y)
            at += rows
        return torch.cat(out)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("style", "kv_b_type"), [(1, "fp32"), (2, "bf16"), (0, "fp32")])
@pytest.mark.parametrize("shape", [Mla(), Mla(130, 6, 4, 10, 20)], ids=str)
def test_mla_equals_expanded_attention(isa: str, style: int, kv_b_type: str, shape: Mla) -> None:
    case = MlaCase(shape, 90, style, kv_b_type)
    close(case.run(isa, [40, 1, 30, *[1] * 19]), case.naive(), 5e-6)
