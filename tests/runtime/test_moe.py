"""The MoE driver against numpy, over the reference kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktc.layout import QuantScheme
from tests.runtime.layers import Layer, run

_runtime = pytest.importorskip("ktc._runtime")

INT4 = QuantScheme("int4", "integer", 64)
SCHEMES = [
    QuantScheme("fp32"),
    QuantScheme("bf16"),
    QuantScheme("int8", "channel"),
    QuantScheme("int8", "group", 64),
    QuantScheme("int4", "group", 32),
    QuantScheme("int4", "integer", 16),
    QuantScheme("int4", "codebook", 16),
]


def close(got: np.ndarray, want: np.ndarray, data_type: str) -> None:
    # bf16 and the integer formats may round an activation the other way than float64 does.
    limit = 2e-6 if data_type == "fp32" else 3e-3
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 17, 50])
def test_s1_s5_matches_numpy(reference_lib: Any, pool: Any, scheme: QuantScheme, tokens: int) -> None:
    """failures.md S1, S5: tails in H (70), I (88) and the token count; experts that stay idle."""
    layer = Layer(7, 3, 70, 88, scheme)
    x, ids, weights = layer.route(tokens)
    close(run(layer.build(reference_lib, pool), x, ids, weights), layer.reference(x, ids, weights), scheme.data_type)


@pytest.mark.parametrize("activation", ["silu_mul", "silu_clamp", "swiglu_oai"])
@pytest.mark.parametrize("scheme", [QuantScheme("fp32"), INT4], ids=str)
def test_r7_activation_and_bias(reference_lib: Any, pool: Any, scheme: QuantScheme, activation: str) -> None:
    """failures.md R7: gpt-oss's clamp and biases."""
    layer = Layer(4, 2, 96, 64, scheme, activation, alpha=1.702, limit=1.5, bias=True)
    x, ids, weights = layer.route(9)
    close(run(layer.build(reference_lib, pool), x, ids, weights), layer.reference(x, ids, weights), scheme.data_type)


def test_no_tokens(reference_lib: Any, pool: Any) -> None:
    layer = Layer(4, 2, 64, 64, INT4)
    moe = layer.build(reference_lib, pool)
    moe.forward(0, 64, 0, 0, 0, 0, 64)
    moe.collect(moe.submit(0, 64, 0, 0, 0), 0, 64)


@pytest.mark.parametrize("scheme", [QuantScheme("bf16"), INT4, QuantScheme("int8", "channel")], ids=str)
def test_q5_same_bits_for_every_thread_count_and_schedule(reference_lib: Any, scheme: QuantScheme) -> None:
    """failures.md Q5: fixed summation order."""
    layer = Layer(6, 3, 160, 200, scheme, bias=True)
    x, ids, weights = layer.route(23)
    results = []
    for cpus in ([0], [0, 1], [0, 1, 0, 1, 0]):
        for scheduling in ("dynamic", "static"):
            moe = layer.build(reference_lib, _runtime.Pool([cpus], pin=False), scheduling=scheduling)
            results += [run(moe, x, ids, weights) for _ in range(2)]
            assert moe.report()["threads"] == len(cpus) and moe.report()["scheduling"] == scheduling
    assert all(np.array_equal(r, results[0]) for r in results)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_q5_one_token_same_bits_however_its_experts_are_shared(reference_lib: Any, scheme: QuantScheme) -> None:
    """failures.md Q5: whole experts to each thread, what is left over divided, all of them divided; biases, tails,
    a NaN row before, an expert named twice and a poisoned output (`run`) must not show."""
    layer = Layer(9, 7, 262, 200, scheme, bias=True)
    x, ids, weights = layer.route(2)
    x[0] = np.nan
    one = slice(1, 2)
    routed = np.sort(ids, axis=1)
    for k, repeated in [(k, False) for k in range(1, 8)] + [(k, True) for k in range(2, 8)]:
        ids = routed.copy()
        if repeated:  # the last one, which would be divided: a router names none twice, a caller may
            ids[:, k - 2] = ids[:, k - 1]
        want = layer.reference(x[one], ids[one, :k], weights[one, :k])
        results = []
        for threads in (1, 2, 3, 4, 5, 8):
            for scheduling in ("dynamic", "static"):
                pool = _runtime.Pool([[0] * threads], pin=False)
                moe = layer.build(reference_lib, pool, scheduling=scheduling, top_k=k)
                run(moe, x[:1], ids[:1, :k], weights[:1, :k])
                results.append(run(moe, x[one], ids[one, :k], weights[one, :k]))
        assert all(np.array_equal(r, results[0]) for r in results)
        close(results[0], want, scheme.data_type)


@pytest.mark.parametrize("nodes", [2, 3])
def test_s4_nodes(reference_lib: Any, nodes: int) -> None:
    """failures.md S4: an uneven split over emulated nodes gives the result of one node, and fixed bits."""
    for scheme in (QuantScheme("fp32"), QuantScheme("int8", "group", 64), INT4):
        layer = Layer(5, 2, 96, 200, scheme, bias=True)
        x, ids, weights = layer.route(21)
        results = []
        for node in ([0], [0, 1]):
            pool = _runtime.Pool([node] * nodes, pin=False)
            for scheduling in ("dynamic", "static"):
                results.append(run(layer.build(reference_lib, pool, scheduling=scheduling), x, ids, weights))
        assert all(np.array_equal(r, results[0]) for r in results)
        close(results[0], layer.reference(x, ids, weights), scheme.data_type)
        one = run(layer.build(reference_lib, _runtime.Pool([[0]], pin=False)), x, ids, weights)
        assert np.linalg.norm(one - results[0]) <= 1e-6 * np.linalg.norm(one)


def test_all_tokens_on_one_expert(reference_lib: Any, pool: Any) -> None:
    layer = Layer(8, 1, 64, 128, INT4)
    x, ids, weights = layer.route(100)
    ids[:] = 5
    close(run(layer.build(reference_lib, pool), x, ids, weights), layer.reference(x, ids, weights), "int4")


def test_s9_idle_experts_are_never_touched(reference_lib: Any, pool: Any) -> None:
    """failures.md S9: top-k 1, weights other than 1, an output full of NaN, idle experts full of NaN."""
    layer = Layer(6, 1, 64, 64, QuantScheme("int8", "channel"))
    for e in (0, 2, 5):
        layer.gate_up[e].scale[:] = np.nan
        layer.down[e].scale[:] = np.nan
    x, _, weights = layer.route(12)
    ids = np.resize(np.array([1, 3, 4], np.int64), (12, 1)).copy()
    weights[3] = 0
    weights[4] = -2.5
    got = run(layer.build(reference_lib, pool), x, ids, weights)
    close(got, layer.reference(x, ids, weights), "int8")
    assert not got[3].any()


def test_same_expert_twice_in_a_row(reference_lib: Any, pool: Any) -> None:
    layer = Layer(4, 3, 64, 64, QuantScheme("fp32"))
    x, ids, weights = layer.route(20)
    ids[:, 1] = ids[:, 0]
    close(run(layer.build(reference_lib, pool), x, ids, weights), layer.reference(x, ids, weights), "fp32")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_s6_nan_stays_in_its_row(reference_lib: Any, scheme: QuantScheme) -> None:
    """failures.md S6: K is no multiple of 64 and one token holds a NaN, another an infinity."""
    pool = _runtime.Pool([[0], [1]], pin=False)
    layer = Layer(4, 2, 70, 200, scheme)
    x, ids, weights = layer.route(19)
    moe = layer.build(reference_lib, pool)
    clean = run(moe, x, ids, weights)
    x[7, 69], x[11, 0] = np.nan, np.inf
    got = run(moe, x, ids, weights)
    others = np.delete(np.arange(19), [7, 11])
    assert np.array_equal(got[others], clean[others])
    assert np.isnan(got[7]).all() and not np.isfinite(got[11]).any()


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
def test_bad_expert_id(reference_lib: Any, pool: Any, bad: int) -> None:
    layer = Layer(4, 2, 64, 64, INT4)
    moe = layer.build(reference_lib, pool)
    x, ids, weights = layer.route(5)
    good = run(moe, x, ids, weights)
    ids[3, 1] = bad
    with pytest.raises(ValueError, match=f"token 3 is routed to expert {bad}, there are 4"):
        run(moe, x, ids, weights)
    ids[3, 1] = layer.route(5)[1][3, 1]
    assert np.array_equal(run(moe, x, ids, weights), good)


def test_s7_s8_many_experts_and_chunks(reference_lib: Any, pool: Any) -> None:
    """failures.md S8: 900 experts. More tokens than one chunk holds give the same as one by one."""
    layer = Layer(900, 2, 32, 16, QuantScheme("fp32"))
    moe = layer.build(reference_lib, pool)
    chunk = moe.chunk_tokens
    assert chunk == 4096 and moe.scratch_bytes(100 * chunk) < 2 * moe.scratch_bytes(50 * chunk)
    x, ids, weights = layer.route(chunk + 37)
    got = run(moe, x, ids, weights)
    assert np.array_equal(got[-37:], run(moe, x[-37:].copy(), ids[-37:].copy(), weights[-37:].copy()))
    assert np.array_equal(got[:5], run(moe, x[:5].copy(), ids[:5].copy(), weights[:5].copy()))
    close(got[-37:], layer.reference(x[-37:], ids[-37:], weights[-37:]), "fp32")


def test_kernel_per_expert_by_token_count(reference_lib: Any, pool: Any) -> None:
    """Experts with fewer than five tokens run on the kernel for few rows, the others on the one for many."""
    layer = Layer(3, 1, 64, 64, INT4)
    x, ids, weights = layer.route(11)
    ids[:, 0] = [0] * 4 + [2] * 7
    moe = layer.build(reference_lib, pool)
    run(moe, x, ids, weights)
    assert moe.report()["kernels"] == {"reference_few": 2, "reference_many": 2}  # gate_up and down
    forced = layer.build(reference_lib, pool, force="many")
    run(forced, x, ids, weights)
    assert forced.report()["kernels"] == {"reference_many": 4}
    with pytest.raises(ValueError, match=r"no kernel for int4.*name contains 'amx'; it has reference_few"):
        layer.build(reference_lib, pool, force="amx")


def test_rejects_what_does_not_fit(reference_lib: Any, pool: Any) -> None:
    layer = Layer(3, 1, 64, 128, INT4)
    _, weights = layer.node_weights(1)
    for options, message in [
        ({"splits": [(0, 64)]}, "splits end at 64"),
        ({"splits": [(0, 64), (64, 128)]}, "2 splits but weights of 1 nodes"),
        ({"splits": [(0, 64), (64, 128)], "weights": weights * 2}, "the pool has 1"),
        ({"weights": [weights[0][:2]]}, "weights of 2 experts instead of 3"),
        ({"weights": [[{**weights[0][0], "down_scale": 0}] * 3]}, "down of expert 0 on node 0: scales are missing"),
        ({"weights": [[{**weights[0][0], "gate_up": 72}] * 3]}, "64-byte aligned"),
        ({"activation": "gelu"}, "unknown activation 'gelu'"),
        ({"scheduling": "random"}, "'dynamic' or 'static'"),
        ({"scale": "channel", "group": 0}, "no scale mode"),
        ({"group": 48}, "no kernel for int4, scale integer, group 48"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer.build(reference_lib, pool, **options)
