"""Linears over the same rows run together: the same bits as one after the other, and an error names its own node."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktc import _runtime
from ktc.errors import KtcError
from ktc.native import NativeModel, open_native

IDS = list(range(5, 40))
FAILS = 1  # of fault_lib.cpp


def logits(model: NativeModel) -> Any:
    model.reset()
    first = model.prefill(IDS)
    return np.stack([first, *[model.decode(i) for i in (7, 8, 9)]])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_as_one_by_one(
    bundle: Callable[..., Path], library: Callable[[str], Path], best_variant: str, name: str, threads: int
) -> None:
    model = open_native(bundle(name, "int4"), kernel_library=library(best_variant), threads=threads)
    together = logits(model)
    counter = _runtime.RoutingCounter(model.graph.native, [])  # whatever looks on between nodes gets them one by one
    one_by_one = logits(model)
    del counter
    assert np.array_equal(together, one_by_one)
    assert np.array_equal(together, logits(model))


def test_an_error_names_its_own_node(
    bundle: Callable[..., Path],
    library: Callable[[str], Path],
    compile_lib: Callable[..., Path],
    best_variant: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every product of a step fails in turn: the error names its node, and the next step is right."""
    path = compile_lib(Path(__file__).parents[1] / "runtime" / "fault_lib.cpp", "faults_of_linears", "-ldl")
    monkeypatch.setenv("KTC_FAULT_INNER", str(library(best_variant)))
    model = open_native(bundle("qwen3_moe", "int4"), kernel_library=path, threads=1)
    arm = ctypes.CDLL(str(path)).ktc_fault_arm
    want = logits(model)
    blamed = []
    for product in range(1, 200):
        model.position = len(IDS)
        arm(FAILS, ctypes.c_int64(product))
        try:
            model.decode(7)
        except KtcError as error:
            found = re.fullmatch(r"the model failed: (\S+ \S+) at position 35: kernel \S+ rejected .*", error.message)
            assert found is not None, error.message
            blamed.append(found[1])
        else:
            break
        model.position = len(IDS)
        assert np.array_equal(model.decode(7), want[1])
    arm(0, ctypes.c_int64(0))
    order = [f"{n.op} {n.module or n.name}" for n in model.graph.program.nodes]
    assert [b for b in dict.fromkeys(blamed) if b.startswith("linear")] == [
        n for n in order if n.startswith("linear") and n in blamed
    ]
    assert {f"linear model.layers.0.self_attn.{which}_proj" for which in "qkvo"} <= set(blamed)
