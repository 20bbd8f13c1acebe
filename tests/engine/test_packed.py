"""Addresses of experts out of a bundle's tensors: spans split over files, and what a damaged bundle may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktc.bundle.reader import TensorRef
from ktc.engine.packed import expert_pointers
from ktc.errors import BundleError


def part(key: str, experts: int, address: int, each: int = 100) -> tuple[str, TensorRef, int]:
    return key, TensorRef(Path("L001.safetensors"), 0, experts * each, "U8", (experts, each)), address


WHOLE = [
    part("0-1.gate_up.tiles", 2, 1000),
    part("2-2.gate_up.tiles", 1, 5000),
    part("0-2.gate_up.scale", 3, 9000, each=8),
    part("0-2.down.tiles", 3, 2000),
]


def test_spans_of_experts_are_put_together() -> None:
    found = expert_pointers(WHOLE, 3, "m.ktc: mlp on node 0")
    assert [e["gate_up"] for e in found] == [1000, 1100, 5000]
    assert [e["gate_up_scale"] for e in found] == [9000, 9008, 9016]
    assert [e["down"] for e in found] == [2000, 2100, 2200]
    assert all(e["down_scale"] == e["gate_up_bias"] == 0 for e in found)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (WHOLE[:1] + WHOLE[2:], r"m\.ktc: mlp on node 0 lacks experts \[2\]"),
        (WHOLE[:3], r"lacks experts \[0, 1, 2\]"),
        ([*WHOLE, part("1-3.down.mult", 3, 1)], r"L001\.safetensors does not hold experts 1-3 of 3"),
        ([*WHOLE, part("0-1.down.mult", 3, 1)], r"does not hold experts 0-1 of 3: shape \[3, 100\]"),
    ],
)
def test_a_damaged_layer_is_refused(parts: list[tuple[str, TensorRef, int]], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        expert_pointers(parts, 3, "m.ktc: mlp on node 0")
