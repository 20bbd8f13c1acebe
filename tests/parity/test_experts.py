"""Layers of experts on every variant's kernels: accuracy against a peer's own bounds, and many calls in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ktc import _runtime
from ktc.codegen.variants import VARIANTS
from ktc.layout import QuantScheme
from ktc.perf.dense_experts import DenseExpert, random_experts, reference
from ktc.perf.experts import KtcExperts, KtcWeights
from ktc.perf.routing import Routing, draw
from ktc.perf.shapes import SCHEMES, MoeShape
from tests.runtime.layers import Layer, run

DEEPSEEK_V3 = MoeShape("DeepSeek-V3", 8, 7168, 2048, 8, "experts of its shape, a few of them")
PEER_BOUNDS = {"int4": 0.20, "int8": 0.05, "bf16": 0.02}
"""mean |out - ref| / mean |ref| that kt-kernel's tests allow its experts on this shape and these inputs (int4: in
groups)."""
MARGIN = 0.7
CALLS = 10_000
LEAK = 2 << 20
"""Bytes: 230 a call."""


@pytest.fixture(scope="module")
def deepseek_v3() -> tuple[list[DenseExpert], np.ndarray, Routing, np.ndarray]:
    """Experts of weights N(0, 1), x [T, H] of N(0, 1) / 100, a routing, and the output in fp32."""
    small = random_experts(DEEPSEEK_V3, distinct=2)
    dense = [DenseExpert(e.gate * 50, e.up * 50, e.down * 50).bf16() for e in small]  # they are of N(0, 0.02)
    x = np.random.default_rng(1).standard_normal((32, DEEPSEEK_V3.hidden), dtype=np.float32) / 100
    route = draw(np.random.default_rng(2), DEEPSEEK_V3, 32)
    return dense, x, route, reference(dense, x, route)


@pytest.mark.parametrize("form", list(PEER_BOUNDS))
def test_a_peers_accuracy_bounds_hold(
    form: str,
    deepseek_v3: tuple[list[DenseExpert], np.ndarray, Routing, np.ndarray],
    library: Callable[[str], Path],
    best_variant: str,
) -> None:
    dense, x, route, want = deepseek_v3
    weights = KtcWeights(DEEPSEEK_V3, SCHEMES[form], 1, dense, 1)
    ours = KtcExperts(weights, _runtime.KernelLib(str(library(best_variant))), _runtime.Pool([[0, 1]], pin=False))
    ours.prepare(0, x, route)()
    error = np.abs(ours.output() - want).mean() / np.abs(want).mean()
    assert 0 < error < PEER_BOUNDS[form] * MARGIN, error


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_thousand_calls_do_not_leak(variant: str, library: Callable[[str], Path]) -> None:
    """Random routing and token counts, formats in turn, a call that fails now and then; the same bits to the end."""
    lib, pool = _runtime.KernelLib(str(library(variant))), _runtime.Pool([[0, 1]], pin=False)
    schemes = [QuantScheme("bf16"), QuantScheme("int8", "channel"), QuantScheme("int4", "codebook", 16)]
    layers = [Layer(8, 2, 64, 64, scheme) for scheme in schemes]
    moes = [layer.build(lib, pool) for layer in layers]
    inputs = [layers[0].route(tokens, seed) for seed, tokens in enumerate([1, 1, 1, 2, 3, 5, 17, 40])]
    first = [[run(moe, *call) for call in inputs] for moe in moes]
    rng = np.random.default_rng(0)
    warm = 0
    for call in range(CALLS):
        if call == CALLS // 10:
            warm = resident()
        which, at = int(rng.integers(len(moes))), int(rng.integers(len(inputs)))
        if call % 100 == 0:
            x, ids, weights = inputs[at]
            with pytest.raises((ValueError, RuntimeError), match="expert"):
                run(moes[which], x, ids + 8, weights)
        assert np.array_equal(run(moes[which], *inputs[at]), first[which][at])
    assert resident() - warm < LEAK
