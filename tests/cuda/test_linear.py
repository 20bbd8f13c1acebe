"""Dense linears of the lane: stored integers recovered exactly, the int4 kernel against plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ktc.cuda import linear
from ktc.layout import QuantScheme
from ktc.plan.ir import LinearPlan
from tests.runtime.layers import pack, plain_rows


def parts(n: int, k: int, scheme: QuantScheme, bias: bool = False) -> tuple[LinearPlan, linear.PackedParts, np.ndarray]:
    w = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32)
    packed = pack(w, plain_rows(n), scheme)
    plan = LinearPlan(n, k, bias, scheme.data_type, scheme.scale, scheme.group)
    arrays: dict[str, Any] = {"tiles": packed.tiles, "scale": packed.scale, "mult": packed.mult}
    arrays = {key: value for key, value in arrays.items() if value.size}
    if bias:
        arrays["bias"] = np.random.default_rng(0).standard_normal(plan.layout.n_pad).astype(np.float32)
    return plan, linear.PackedParts(plan, arrays), packed.dense


@pytest.mark.parametrize(
    "scheme", [QuantScheme("int4", "integer", 32), QuantScheme("int4", "group", 64), QuantScheme("int4", "group", 128)]
)
def test_integers_and_scales_give_the_stored_weights(scheme: QuantScheme) -> None:
    plan, stored, dense = parts(96, 256, scheme)
    q, scale = stored.integers(), stored.group_scales()
    assert q.min() >= -8 and q.max() <= 7 and q.unique().numel() > 10
    again = q.float() * scale.repeat_interleave(scheme.group, 1)
    assert (again - torch.from_numpy(dense)).abs().max() <= 1e-6 * np.abs(dense).max()
    assert torch.equal(stored.dense(), torch.from_numpy(dense)[: plan.n, : plan.k])


@pytest.mark.parametrize("scheme", [QuantScheme("int4", "integer", 32), QuantScheme("int4", "group", 128)])
@pytest.mark.parametrize(("n", "bias"), [(96, True), (72, False)])
def test_the_int4_kernel_equals_the_dequantised_matrix(scheme: QuantScheme, n: int, bias: bool) -> None:
    plan, stored, dense = parts(n, 256, scheme, bias)
    module = linear.LaneLinear(plan)
    module.load(stored, torch.device("cpu"), torch.bfloat16)
    assert module.kernel == "int4" and module.weight is None
    x = torch.randn(2, 3, 256, dtype=torch.bfloat16)
    want = x.float() @ torch.from_numpy(dense)[:n].T
    if bias:
        assert stored.bias is not None
        want = want + torch.from_numpy(stored.bias)[:n]
    got = module(x)
    assert got.dtype == torch.bfloat16 and got.shape == (2, 3, n)
    assert (got.float() - want).abs().max() < 0.02 * want.abs().max()


@pytest.mark.parametrize(
    ("scheme", "k", "dtype"),
    [(QuantScheme("int4", "integer", 32), 256, torch.float32),
     (QuantScheme("int4", "integer", 16), 256, torch.bfloat16),
     (QuantScheme("int4", "integer", 32), 80, torch.bfloat16), (QuantScheme("int8", "channel"), 256, torch.bfloat16),
     (QuantScheme("bf16"), 256, torch.bfloat16)],
)  # fmt: skip
def test_what_the_kernel_does_not_take_is_dequantised(scheme: QuantScheme, k: int, dtype: torch.dtype) -> None:
    plan, stored, dense = parts(64, k, scheme)
    module = linear.LaneLinear(plan)
    module.load(stored, torch.device("cpu"), dtype)
    assert module.kernel == str(dtype).removeprefix("torch.") and module.packed is None
    x = torch.randn(5, k, dtype=dtype)
    want = x.float() @ torch.from_numpy(dense)[:64, :k].T
    assert (module(x).float() - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.02) * want.abs().max()


def test_q2_all_zero_groups_stay_zero() -> None:
    # failure Q2: near-zero rows; here a scale of 0 must not divide
    scheme = QuantScheme("int4", "group", 32)
    w = np.zeros((32, 64), np.float32)
    w[3, :32] = 1.0
    packed = pack(w, plain_rows(32), scheme)
    plan = LinearPlan(32, 64, False, "int4", "group", 32)
    stored = linear.PackedParts(plan, {"tiles": packed.tiles, "scale": packed.scale})
    module = linear.LaneLinear(plan)
    module.load(stored, torch.device("cpu"), torch.bfloat16)
    out = module(torch.ones(1, 64, dtype=torch.bfloat16))
    assert torch.isfinite(out).all() and out[0, 3] == 32.0 and out[0].count_nonzero() == 1
