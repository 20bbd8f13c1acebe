"""KtcFusedMoE around Hugging Face's own experts: routing, shared experts, contracts, for every family.

The native operator is replaced by one that reads and writes through the same pointers but calls the
original experts, so what is compared is everything the module does besides the experts' arithmetic (which
tests/parity covers with the real runtime).
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ktc.engine import ops
from ktc.engine.moe import KtcFusedMoE
from ktc.models.registry import family_for
from ktc.plan.ir import MoePlan
from tests.tiny import TINY, tiny_model


def floats(address: int, *shape: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(address)).reshape(shape)


class TorchExperts:
    """The interface of `_runtime.Moe` over a Hugging Face experts module."""

    def __init__(self, experts: torch.nn.Module, hidden: int, top_k: int) -> None:
        self.experts, self.hidden, self.top_k = experts, hidden, top_k
        self.open: dict[int, torch.Tensor] = {}
        self.tickets = 0
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def submit(self, x: int, ld_x: int, tokens: int, ids: int, weights: int) -> int:
        rows = np.lib.stride_tricks.as_strided(floats(x, tokens * ld_x or 1), (tokens, self.hidden), (ld_x * 4, 4))
        index = np.ctypeslib.as_array((ctypes.c_int64 * (tokens * self.top_k)).from_address(ids))
        index = torch.from_numpy(index.reshape(tokens, self.top_k).copy())
        scores = torch.from_numpy(floats(weights, tokens, self.top_k).copy())
        self.seen.append((index, scores))
        self.tickets += 1
        self.open[self.tickets] = self.experts(torch.from_numpy(rows.copy()), index, scores)
        return self.tickets

    def collect(self, ticket: int, out: int, ld_out: int) -> None:
        result = self.open.pop(ticket)
        floats(out, *result.shape)[:] = result.detach().numpy()


def moe_plan(family, config) -> MoePlan:
    s = family.shape(config)
    splits = ((0, 64),)
    return MoePlan(s.experts, s.top_k, s.hidden, s.intermediate, s.activation, s.alpha, s.limit, s.bias,
                   "fp32", "none", 0, "auto", 0, splits)  # fmt: skip


def replaced(name: str, **overrides):
    """(config, HF block, KtcFusedMoE over the same weights, its native) of the last layer."""
    model = tiny_model(name, **overrides)
    family = family_for(model.config)
    block = next(m for n, m in reversed(list(model.named_modules())) if type(m).__name__ == family.moe_class)
    experts, plan = block.experts, moe_plan(family, model.config)
    module = KtcFusedMoE(block, family, plan)
    native = TorchExperts(experts, plan.hidden, plan.top_k)
    module.attach(native)
    return model.config, block, module.eval(), native


@torch.no_grad()
@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("shape", [(1, 1), (2, 7)])
def test_block_equals_hf(name: str, shape: tuple[int, int]) -> None:
    # failures R1-R7: scale once, fp32 bias for the choice only, groups, softmax order, sigmoid gate: all the router's
    config, block, module, _ = replaced(name)
    x = torch.randn(*shape, config.hidden_size, generator=torch.Generator().manual_seed(1))
    expected, got = block(x.clone()), module(x.clone())
    if isinstance(expected, tuple):
        assert torch.equal(got[1], expected[1])
        expected, got = expected[0], got[0]
    assert got.shape == expected.shape and got.dtype == torch.float32
    assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()


@torch.no_grad()
def test_r1_scaling_is_applied_once_and_not_to_the_shared_expert() -> None:
    # failure R1: routed_scaling_factor twice, or on the shared expert too
    config, _, module, native = replaced("deepseek_v3", routed_scaling_factor=3.0)
    x = torch.randn(5, config.hidden_size)
    module(x)
    _, weights = native.seen[-1]
    torch.testing.assert_close(weights.sum(1), torch.full((5,), 3.0), rtol=1e-5, atol=1e-5)
    module.native.experts = lambda x, i, w: torch.zeros_like(x)
    torch.testing.assert_close(module(x), module.shared_experts(x))


@torch.no_grad()
def test_r2_r3_the_bias_chooses_in_fp32_and_does_not_weigh() -> None:
    # failure R2: bias rounded to bf16; failure R3: weights taken from biased scores
    config, _, module, native = replaced("deepseek_v3", n_group=1, topk_group=1, routed_scaling_factor=1.0)
    gate = module.gate
    gate.weight.zero_()  # all scores are 0.5: only the bias decides
    gate.e_score_correction_bias.copy_(1.0 + torch.arange(8) * 2.0**-10)  # equal after rounding to bf16
    module(torch.randn(3, config.hidden_size))
    ids, weights = native.seen[-1]
    assert sorted(ids[0].tolist()) == [6, 7]
    torch.testing.assert_close(weights, torch.full_like(weights, 0.5))


@torch.no_grad()
def test_r6_the_shared_experts_gate_is_applied() -> None:
    # failure R6: the sigmoid gate skipped
    config, _, module, _ = replaced("qwen2_moe")
    module.native.experts = lambda x, i, w: torch.zeros_like(x)
    x = torch.randn(4, config.hidden_size)
    gate = torch.sigmoid(x @ module.shared_expert_gate.weight.T)
    torch.testing.assert_close(module(x), gate * module.shared_expert(x))
    assert not torch.allclose(module(x), module.shared_expert(x), rtol=0.1)


@torch.no_grad()
def test_s9_top_1_with_a_scale() -> None:
    # failure S9: top-k = 1 with a routed scale other than 1 read uninitialised output
    config, block, module, _ = replaced("deepseek_v3", num_experts_per_tok=1, n_group=1, topk_group=1)
    x = torch.randn(6, config.hidden_size)
    torch.testing.assert_close(module(x), block(x))


@torch.no_grad()
def test_a_failing_shared_expert_leaves_no_open_ticket() -> None:
    config, _, module, native = replaced("deepseek_v3")
    x = torch.randn(2, config.hidden_size)
    expected = module(x)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shared expert failed")

    forward, module.shared_experts.forward = module.shared_experts.forward, fail
    with pytest.raises(RuntimeError, match="shared expert failed"):
        module(x)
    module.shared_experts.forward = forward
    assert not native.open
    assert torch.equal(module(x), expected)


@torch.no_grad()
def test_r8_nothing_assumes_sorted_routing() -> None:
    # failure R8: topk(sorted=False) comes in any order; the sum must not depend on it
    config, _, module, _ = replaced("deepseek_v3")
    x = torch.randn(4, config.hidden_size)
    expected = module(x)
    route = module.route
    module.route = lambda x: tuple(t.flip(1) for t in route(x))
    torch.testing.assert_close(module(x), expected)


def test_operators_have_shapes_without_data() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 5, 64, dtype=torch.bfloat16)
        assert ops.linear(x, 0, 96).shape == (3, 5, 96) and ops.linear(x, 0, 96).dtype == torch.float32
        rows = torch.empty(15, 64)
        ticket = ops.moe_submit(rows, torch.empty(15, 2, dtype=torch.int64), torch.empty(15, 2), 0)
        assert ticket.shape == () and ticket.dtype == torch.int64
        assert ops.moe_collect(ticket, rows, 0).shape == (15, 64)


def test_a_dead_handle_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="its model was deleted"):
        ops.linear(torch.ones(1, 4), 1 << 40, 4)
