"""Names of groups of modules."""

from __future__ import annotations

import pytest

from ktc.plan.names import group_name, pattern


def test_pattern() -> None:
    assert pattern("model.layers.3.mlp") == "model.layers.*.mlp"
    assert pattern("model.layers.12") == "model.layers.*"
    assert pattern("lm_head") == "lm_head" and pattern("model.conv2d.w1") == "model.conv2d.w1"


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        ([3], "3"),
        ([0, 1, 2], "{0-2}"),
        ([3, 4, 5, 9], "{3-5,9}"),
        ([0, 2, 4], "{0-4/2}"),
        ([0, 2], "{0,2}"),
        ([1, 3, 4], "{1,3-4}"),
        ([5, 3, 4], "{3-5}"),
    ],
)
def test_ranges_of_layers(layers: list[int], shown: str) -> None:
    assert group_name([f"model.layers.{i}.mlp" for i in layers]) == f"model.layers.{shown}.mlp"


def test_the_model_itself_has_a_name() -> None:
    assert group_name([""]) == "(model)"
