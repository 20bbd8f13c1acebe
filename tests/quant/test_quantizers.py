"""Properties of the quantisers themselves, on the numpy definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ktc.layout import QuantScheme
from ktc.quant.int4_codebook import CODEBOOK, LEVELS, MULTIPLIERS
from ktc.quant.registry import QUANTIZERS, quantizer_for

GROUPS = {
    "int8-channel": (0,),
    "int8-group": (64,),
    "int4-group": (16, 64),
    "int4-integer": (16, 64),
    "int4-codebook": (16, 64),
}
CASES = [(name, group) for name, groups in GROUPS.items() for group in groups]


def gaussian(n: int = 48, k: int = 512) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, k)).astype(np.float32) * np.float32(0.02)


def error(name: str, w: np.ndarray, group: int) -> float:
    q = QUANTIZERS[name]
    return float(np.linalg.norm(q.dequantize(q.quantize(w, group), group) - w) / np.linalg.norm(w))


def test_registry_covers_every_stored_scheme() -> None:
    assert set(GROUPS) == set(QUANTIZERS)
    assert quantizer_for(QuantScheme("int4", "integer", 32)).name == "int4-integer"
    assert str(QUANTIZERS["int8-channel"].scheme(64)) == "int8-channel"
    with pytest.raises(ValueError, match="no quantiser gives bf16"):
        quantizer_for(QuantScheme("bf16"))


@pytest.mark.parametrize("name,group", CASES)
def test_ranges(name: str, group: int) -> None:
    quantized = QUANTIZERS[name].quantize(gaussian(), group)
    low, high = (-127, 127) if name.startswith("int8") else (-8, 7)
    assert quantized.q.min() >= low and quantized.q.max() <= high
    assert np.isfinite(quantized.scale).all()
    if name == "int4-codebook":
        assert quantized.mult is not None and quantized.mult.max() <= 15
        assert (quantized.mult < 8).any() and (quantized.mult >= 8).any()  # both signs
    elif quantized.mult is not None:
        assert quantized.mult.min() >= 1 and quantized.mult.max() <= 16
        product = quantized.mult.repeat(group, axis=1).astype(int) * quantized.q
        assert product.min() >= -128 and product.max() <= 112


def test_s13_int4_uses_minus_eight() -> None:
    """failures.md S13: -8 must occur, so that a kernel that gets its sign wrong is found out."""
    assert (QUANTIZERS["int4-group"].quantize(gaussian(), 64).q == -8).any()
    assert (QUANTIZERS["int4-integer"].quantize(gaussian(), 64).q == -8).any()
    assert (QUANTIZERS["int4-codebook"].quantize(gaussian(), 64).q == -8).any()


@pytest.mark.parametrize(
    "name,group,limit",
    [
        ("int8-channel", 0, 0.009),
        ("int8-group", 64, 0.007),
        ("int4-group", 32, 0.083),
        ("int4-group", 128, 0.099),
        ("int4-integer", 16, 0.080),
        ("int4-integer", 32, 0.091),
        ("int4-integer", 128, 0.105),
        ("int4-codebook", 16, 0.0698),
        ("int4-codebook", 32, 0.0785),
        ("int4-codebook", 128, 0.091),
    ],
)
def test_error_on_gaussian_weights(name: str, group: int, limit: float) -> None:
    assert error(name, gaussian(), group) < limit


@pytest.mark.parametrize("group", [32, 128])
def test_search_beats_amax(group: int) -> None:
    """A scale of amax / 7 (no search) is clearly worse."""
    w = gaussian().reshape(-1, group)
    scale = np.abs(w).max(axis=1, keepdims=True) / 7
    plain = np.linalg.norm(np.rint(w / scale) * scale - w) / np.linalg.norm(w)
    assert error("int4-group", gaussian(), group) < 0.93 * plain


def _heavy() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    n, k = 16, 1024
    outliers = rng.standard_normal((n, k))
    outliers[:, [5, 300, 900]] *= 12
    return {
        "laplace": rng.laplace(size=(n, k)),
        "student_t": rng.standard_t(4, (n, k)),
        "uneven columns": rng.standard_normal((n, k)) * np.exp(0.4 * rng.standard_normal((1, k))),
        "uneven blocks": rng.standard_normal((n, k)) * np.repeat(np.exp(0.6 * rng.standard_normal((1, 32))), 32, 1),
        "outlier columns": outliers,
        "one sided": np.abs(rng.standard_normal((n, k))),
    }


@pytest.mark.parametrize("kind", list(_heavy()))
def test_codebook_is_never_worse_than_integer_scales(kind: str) -> None:
    """Group 16 against integer group 32, which takes the same bits, off the bell curve too."""
    w = _heavy()[kind].astype(np.float32)
    assert error("int4-codebook", w, 16) < 0.96 * error("int4-integer", w, 32)


def test_codebook_levels() -> None:
    """Exactly the arithmetic of abi.h; zero is a level of every selector; negation is exact."""
    assert LEVELS.shape == (16, 16) and LEVELS.min() == -126 and LEVELS.max() == 126
    for selector in range(8):
        for code in range(16):
            level = math.floor(int(CODEBOOK[code]) * int(MULTIPLIERS[selector]) / 128 + 0.5)
            assert LEVELS[selector, code] == level and LEVELS[selector + 8, code] == -level
    assert not LEVELS[:, 8].any()
    assert (np.diff(LEVELS[:8], axis=1) > 0).all()


def test_codebook_takes_the_nearest_level_of_the_best_selector() -> None:
    """Against a search over everything under the channel scale that was chosen (positions are quarters of a level)."""
    w = gaussian(4, 128)
    quantized = QUANTIZERS["int4-codebook"].quantize(w, 16)
    assert quantized.mult is not None
    for row in range(4):
        # The quantiser's own scale before the fit: one of four.
        candidates = np.abs(w[row]).max() / np.array([126, 132, 137, 146], np.float32)
        found = []
        for channel in candidates:
            position = np.clip(np.rint(w[row] * (np.float32(4) / channel)), -640, 640).reshape(8, 16)
            distance = np.abs(position[:, None, :, None] - 4 * LEVELS[None, :, None, :])  # [group, selector, k, code]
            cost = (distance.min(axis=3) ** 2).sum(axis=2)
            found.append((cost.min(axis=1).sum() * float(channel) ** 2, cost.argmin(axis=1), distance))
        _, selector, distance = min(found, key=lambda f: f[0])
        assert np.array_equal(quantized.mult[row], selector)
        chosen = LEVELS[np.repeat(selector, 16), quantized.q[row] + 8].reshape(8, 16)
        best = distance[np.arange(8), selector].min(axis=2)
        channel = candidates[[f[1] is selector for f in found].index(True)]
        position = np.clip(np.rint(w[row] * (np.float32(4) / channel)), -640, 640).reshape(8, 16)
        assert np.array_equal(np.abs(position - 4 * chosen), best)


@pytest.mark.parametrize("name,group", CASES)
def test_q2_zero_and_tiny_rows(name: str, group: int) -> None:
    """failures.md Q2: all-zero and near-zero rows abort a peer's quantiser; here they are exact zeros."""
    w = gaussian(6, 256)
    w[1] = 0
    w[3] *= np.float32(1e-36)
    w[4, 64:] = 0
    quantized = QUANTIZERS[name].quantize(w, group)
    back = QUANTIZERS[name].dequantize(quantized, group)
    assert not back[1].any() and not back[3].any() and not back[4, 64:].any()
    assert back[4, :64].any()
    assert not quantized.scale[1].any() and not quantized.scale[3].any()


@pytest.mark.parametrize("name,group", CASES)
def test_partial_last_group(name: str, group: int) -> None:
    """k_pad = 192 with groups of 128: the last group has 64 columns and its own scale."""
    group = 128 if group else 0
    w = gaussian(4, 192)
    w[:, 128:] *= np.float32(50)
    quantized = QUANTIZERS[name].quantize(w, group)
    back = QUANTIZERS[name].dequantize(quantized, group)
    head = np.linalg.norm(back[:, :128] - w[:, :128]) / np.linalg.norm(w[:, :128])
    if name.endswith("group"):
        assert quantized.scale.shape == (4, 2)
        assert head < (0.02 if name.startswith("int8") else 0.12)


@pytest.mark.parametrize("name,group", CASES)
def test_scaling_by_a_power_of_two_changes_no_integer(name: str, group: int) -> None:
    w = gaussian(8, 256)
    a = QUANTIZERS[name].quantize(w, group)
    b = QUANTIZERS[name].quantize(w * np.float32(2.0**40), group)
    assert np.array_equal(a.q, b.q) and np.array_equal(a.scale * np.float32(2.0**40), b.scale)
