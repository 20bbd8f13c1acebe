"""The native operators against torch formulas, on odd shapes, on every ISA that this machine can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ktc import _runtime

ops = _runtime.ops
ISAS = ops.available()


def ptr(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert torch.isfinite(got).all()
    error = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_best_isa_is_chosen_and_unknown_is_refused() -> None:
    # failure S14: code for features that the CPU lacks is never entered.
    assert ops.chosen() in ISAS
    assert "baseline" in ISAS
    with pytest.raises(ValueError, match="neon"):
        ops.silu_mul("neon", 0, 0, 0, 0)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 1, 1), (1, 33, 16), (3, 5, 17), (7, 64, 100), (18, 37, 130)])
def test_gemm_nt(isa: str, dtype: str, t: int, n: int, k: int) -> None:
    x, w, bias = rand(t, k), rand(n, k, seed=1).to(DTYPES[dtype]), rand(n, seed=2)
    y = torch.full((t, n), float("nan"))
    ops.gemm_nt(isa, ptr(x), t, ptr(w), dtype, n, k, ptr(bias), ptr(y))
    close(y, (x.double() @ w.double().T + bias).float())
    ops.gemm_nt(isa, ptr(x), t, ptr(w), dtype, n, k, 0, ptr(y))
    close(y, (x.double() @ w.double().T).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "k", "n"), [(1, 1, 1), (1, 5, 16), (3, 17, 33), (9, 40, 130)])
def test_gemm_nn(isa: str, dtype: str, t: int, k: int, n: int) -> None:
    x, w, start = rand(t, k), rand(k, n, seed=1).to(DTYPES[dtype]), rand(t, n, seed=2)
    y = start.clone()
    ops.gemm_nn(isa, ptr(x), t, ptr(w), dtype, k, n, True, ptr(y))
    close(y, (start.double() + x.double() @ w.double()).float())
    ops.gemm_nn(isa, ptr(x), t, ptr(w), dtype, k, n, False, ptr(y))
    close(y, (x.double() @ w.double()).float())


def test_fp16_subnormals_and_extremes_are_exact(isa: str) -> None:
    w = torch.tensor([[2.0**-24, -(2.0**-15), 65504.0, -0.0, 1.5] + [0.0] * 12], dtype=torch.float16)
    x, y = torch.eye(17), torch.empty(17, 1)
    ops.gemm_nt(isa, ptr(x), 17, ptr(w), "fp16", 1, 17, 0, ptr(y))
    assert torch.equal(y[:, 0], w[0].float())


@pytest.mark.parametrize(("rows", "cols", "groups"), [(1, 7, 1), (3, 16, 1), (2, 24, 5), (4, 100, 1)])
def test_norm_with_residuals(isa: str, rows: int, cols: int, groups: int) -> None:
    width = cols * groups
    x, a, b, w = rand(rows, width), rand(rows, width, seed=1), rand(rows, width, seed=2), rand(cols, seed=3)

    def reference(v: torch.Tensor) -> torch.Tensor:
        g = v.view(rows, groups, cols)
        return (w * (g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + 1e-5))).view(rows, width)

    y, total = torch.empty_like(x), torch.empty_like(x)
    ops.norm(isa, ptr(x), 0, 0, 0, 1.0, ptr(w), 1e-5, cols, groups, rows, ptr(y))
    close(y, reference(x))
    ops.norm(isa, ptr(x), ptr(a), 0, ptr(total), 0.5, ptr(w), 1e-5, cols, groups, rows, ptr(y))
    close(total, x + a * 0.5)
    close(y, reference(x + a * 0.5))
    ops.norm(isa, ptr(x), ptr(a), ptr(b), ptr(total), 1.0, ptr(w), 1e-5, cols, groups, rows, ptr(y))
    close(total, x + (a + b))
    close(y, reference(x + (a + b)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(isa: str, dtype: str) -> None:
    table, ids = rand(11, 37).to(DTYPES[dtype]), torch.tensor([10, 0, 3, 3])
    y = torch.empty(4, 37)
    ops.embed(isa, ptr(ids), 4, ptr(table), dtype, 37, 3.0, ptr(y))
    assert torch.equal(y, table[ids].float() * 3.0)


def rotary(half: int, position: int, rows: int, factor: float = 1.25) -> tuple[torch.Tensor, torch.Tensor]:
    freq = 1.0 / (10000.0 ** (torch.arange(half).float() / half))
    angles = (torch.arange(rows) + position)[:, None].float() * freq
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()


def test_rope_table_far_positions(isa: str) -> None:
    # failure A1: right at position 0 only. The angle is an fp32 product, as in Hugging Face's code.
    half, rows, position = 21, 5, 100_000
    freq = 1.0 / (10000.0 ** (torch.arange(half).float() / half))
    c, s = torch.empty(rows, half), torch.empty(rows, half)
    ops.rope_table(isa, ptr(freq), half, 1.25, position, rows, ptr(c), ptr(s))
    want_c, want_s = rotary(half, position, rows)
    assert (c - want_c).abs().max() < 3e-7
    assert (s - want_s).abs().max() < 3e-7


@pytest.mark.parametrize("style", [0, 1, 2])
@pytest.mark.parametrize(("dim", "half"), [(8, 4), (40, 17), (70, 35)])
def test_rope_styles_also_in_place(isa: str, style: int, dim: int, half: int) -> None:
    x = rand(dim)
    c, s = rotary(half, 3, 1)
    rot = x[: 2 * half]
    first, second = (rot[:half], rot[half:]) if style == 0 else (rot[0::2], rot[1::2])
    a, b = first * c[0] - second * s[0], second * c[0] + first * s[0]
    turned = torch.stack((a, b), -1).flatten() if style == 2 else torch.cat((a, b))
    want = torch.cat((turned, x[2 * half :]))
    y = torch.empty(dim)
    ops.rope(isa, ptr(x), dim, half, ptr(c), ptr(s), style, ptr(y))
    close(y, want)
    same = x.clone()
    ops.rope(isa, ptr(same), dim, half, ptr(c), ptr(s), style, ptr(same))
    assert torch.equal(same, y)


@pytest.mark.parametrize("count", [1, 16, 45])
def test_activations(isa: str, count: int) -> None:
    g, u = rand(count, scale=4.0), rand(count, seed=1)
    y = torch.empty(count)
    ops.silu_mul(isa, ptr(g), ptr(u), count, ptr(y))
    close(y, torch.nn.functional.silu(g) * u)
    gate, x = rand(3, seed=4), rand(3, count, seed=5)
    z = torch.empty(3, count)
    ops.sigmoid_mul(isa, ptr(gate), ptr(x), count, 3, ptr(z))
    close(z, torch.sigmoid(gate)[:, None] * x)


def test_exponential_edges(isa: str) -> None:
    g = torch.tensor([-1e4, -104.0, -88.0, 88.0, 1e4, 0.0, float("inf"), float("nan")])
    u = torch.ones(8)
    y = torch.empty(8)
    ops.silu_mul(isa, ptr(g), ptr(u), 8, ptr(y))
    assert y[0].abs() < 1e-30 and y[1].abs() < 1e-30 and y[3] == 88.0 and y[4] == 1e4 and y[5] == 0.0
    assert torch.isinf(y[6]) and torch.isnan(y[7])


# ---- router ----------------------------------------------------------------------------------------
def hf_router(logits: torch.Tensor, kind: str, k: int, bias: torch.Tensor, groups: int, kept: int) -> Any:
    """(weights [T, k], ids [T, k]) by the formulas of Hugging Face's classes."""
    if kind in ("sigmoid", "minimax"):
        scores = logits.sigmoid()
        choice = scores + bias
        if kind == "sigmoid":
            by_group = choice.view(len(choice), groups, -1)
            best = by_group.topk(2, -1).values.sum(-1).topk(kept, -1, sorted=False).indices
            mask = torch.zeros(len(choice), groups).scatter_(1, best, 1)[..., None].expand(by_group.shape)
            choice = choice.masked_fill(~mask.reshape(choice.shape).bool(), float("-inf"))
        ids = choice.topk(k, -1, sorted=False).indices
        w = scores.gather(1, ids)
        w = w / (w.sum(-1, keepdim=True) + (1e-20 if kind == "sigmoid" else 0.0))
        return w * (2.5 if kind == "sigmoid" else 1.0), ids
    if kind == "topk_softmax":
        values, ids = logits.topk(k, -1)
        return values.softmax(-1), ids
    scores = logits.softmax(-1)
    if kind == "group_max":
        best = scores.view(len(scores), groups, -1).max(-1).values.topk(kept, -1).indices
        mask = torch.zeros(len(scores), groups).scatter_(1, best, 1)[..., None]
        scores = scores * mask.expand(len(scores), groups, logits.shape[1] // groups).reshape(scores.shape)
        w, ids = scores.topk(k, -1)
        return w * 16.0, ids
    w, ids = scores.topk(k, -1)
    return (w / w.sum(-1, keepdim=True) if kind == "renormalised" else w), ids


FLAVOURS = {  # kind -> score, group score, renormalise, eps, scale, bias
    "sigmoid": (1, 2, True, 1e-20, 2.5, True),
    "minimax": (1, 0, True, 0.0, 1.0, True),
    "topk_softmax": (2, 0, False, 0.0, 1.0, False),
    "group_max": (0, 1, False, 0.0, 16.0, False),
    "renormalised": (0, 0, True, 0.0, 1.0, False),
    "plain": (0, 0, False, 0.0, 1.0, False),
}


@pytest.mark.parametrize("kind", FLAVOURS)
@pytest.mark.parametrize(
    ("experts", "k", "groups", "kept"), [(256, 8, 8, 4), (20, 3, 5, 2), (6, 1, 3, 3), (7, 7, 1, 1)]
)
def test_router_matches_hugging_face(isa: str, kind: str, experts: int, k: int, groups: int, kept: int) -> None:
    # failures R1 to R5: scaling once, bias only for the choice, groups, renormalisation, order of softmax and top-k.
    score, group_score, renormalise, eps, scale, biased = FLAVOURS[kind]
    logits, bias = rand(33, experts, scale=2.0), rand(experts, seed=9, scale=0.3)
    weights, ids = torch.empty(33, k), torch.empty(33, k, dtype=torch.int64)
    n_group, n_kept = (groups, kept) if group_score else (1, 1)
    ops.router(isa, ptr(logits), 33, score, group_score, experts, k, n_group, n_kept, ptr(bias) if biased else 0,
               renormalise, eps, scale, ptr(weights), ptr(ids))  # fmt: skip
    want_w, want_ids = hf_router(logits, kind, k, bias, groups, kept)
    dense, want = torch.zeros(33, experts), torch.zeros(33, experts)
    assert torch.equal(ids.sort(-1).values, want_ids.sort(-1).values)
    close(dense.scatter_(1, ids, weights), want.scatter_(1, want_ids, want_w))


@pytest.mark.parametrize("kind", FLAVOURS)
def test_s6_router_nan_row_poisons_itself_only(isa: str, kind: str) -> None:
    # failure S6: a NaN in one row leaks into another. Ids must stay valid whatever the logits are.
    score, group_score, renormalise, eps, scale, biased = FLAVOURS[kind]
    experts, k, logits = 20, 4, rand(3, 20)
    bias = rand(experts, seed=9)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.empty(3, k), torch.full((3, k), -7)
        ops.router(isa, ptr(x), 3, score, group_score, experts, k, 5, 2, ptr(bias) if biased else 0, renormalise, eps,
                   scale, ptr(weights), ptr(ids))  # fmt: skip
        return weights, ids

    clean_w, clean_ids = run(logits)
    dirty = logits.clone()
    dirty[1, 3] = float("nan")
    w, ids = run(dirty)
    assert torch.isnan(w[1]).any()
    assert all(len(set(row.tolist())) == k and min(row) >= 0 and max(row) < experts for row in ids)
    for row in (0, 2):
        assert torch.equal(w[row], clean_w[row]) and torch.equal(ids[row], clean_ids[row])
