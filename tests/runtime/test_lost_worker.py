"""A worker thread that ends amid a task, and kernels that go wrong once: no hang, an error, then right again.

failure M8: a hang with no message when a worker dies.
"""

from __future__ import annotations

import ctypes
import faulthandler
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktc.layout import QuantScheme
from tests.runtime.layers import Layer, run

_runtime = pytest.importorskip("ktc._runtime")

FAILS, NAN, THREAD_ENDS = 1, 2, 3
SCHEME = QuantScheme("int8", "channel")


@pytest.fixture(scope="module")
def faulty(compile_lib: Callable[..., Path], reference_path: Path) -> tuple[Any, Any]:
    """(kernel library around the reference one, its handle for ctypes)."""
    path = compile_lib(Path(__file__).with_name("fault_lib.cpp"), "faults", "-ldl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KTC_FAULT_INNER", str(reference_path))
        return _runtime.KernelLib(str(path)), ctypes.CDLL(str(path))


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def arm(lib: Any, kind: int, after: int = 1) -> None:
    lib.ktc_fault_arm(kind, ctypes.c_int64(after))


def until_lost(moe: Any, call: Any, lib: Any) -> str:
    """Calls until a worker got to a task and ended there; the message."""
    arm(lib, THREAD_ENDS)
    for _ in range(200):
        try:
            run(moe, *call)
        except RuntimeError as error:
            return str(error)
    pytest.fail("no worker came to a task")


@pytest.mark.parametrize("scheduling", ["dynamic", "static"])
@pytest.mark.parametrize("threads", [2, 4])
def test_the_others_go_on(faulty: tuple[Any, Any], scheduling: str, threads: int) -> None:
    lib, handle = faulty
    layer = Layer(5, 2, 128, 256, SCHEME)
    pool = _runtime.Pool([[0] * threads], pin=False)
    moe = layer.build(lib, pool, scheduling=scheduling)
    call = layer.route(9, 3)
    want = run(moe, *call)
    for lost in range(1, threads):
        assert "worker thread was ended" in until_lost(moe, call, handle)
        for _ in range(5):
            assert np.array_equal(run(moe, *call), want), f"{lost} of {threads} threads ended"
    assert any("was ended" in warning for warning in pool.warnings())


def test_a_node_without_workers_is_said(faulty: tuple[Any, Any]) -> None:
    lib, handle = faulty
    layer = Layer(5, 2, 128, 256, SCHEME)
    moe = layer.build(lib, _runtime.Pool([[0], [0]], pin=False))
    call = layer.route(9, 4)
    x, ids, weights = call
    arm(handle, THREAD_ENDS)
    tickets, out = [], np.empty_like(x)
    messages: list[str] = []
    for _ in range(3):  # how many get in depends on how soon the worker comes to its task
        try:
            tickets.append(moe.submit(x.ctypes.data, x.shape[1], len(x), ids.ctypes.data, weights.ctypes.data))
        except RuntimeError as error:
            messages.append(str(error))
    for ticket in tickets:  # those that were queued behind fail as well: none of them hangs
        try:
            moe.collect(ticket, out.ctypes.data, x.shape[1])
        except RuntimeError as error:
            messages.append(str(error))
    assert len(messages) == 3 and all("ended" in message for message in messages)
    with pytest.raises(RuntimeError, match="every worker thread of node 1 was ended"):
        run(moe, *call)


def test_in_a_process_that_has_thrown_nothing() -> None:
    """The unwinder that is linked into the runtime is ready before its first exception."""
    test = f"{Path(__file__)}::test_the_others_go_on[2-dynamic]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("after", [1, 2, 4, 7, 11])
def test_of_several_queued_jobs_one_fails(faulty: tuple[Any, Any], after: int) -> None:
    """Idle workers begin the job behind the head's last tasks, and may be ended there: only that one fails."""
    lib, handle = faulty
    layer = Layer(5, 2, 128, 256, SCHEME)
    moe = layer.build(lib, _runtime.Pool([[0, 0, 0, 0]], pin=False))
    call = layer.route(1, 5)
    x, ids, weights = call
    want, out = run(moe, *call), np.empty_like(x)
    arm(handle, THREAD_ENDS, after)
    failed = 0
    for _ in range(200):
        tickets = [moe.submit(x.ctypes.data, x.shape[1], 1, ids.ctypes.data, weights.ctypes.data) for _ in range(4)]
        for ticket in tickets:
            try:
                moe.collect(ticket, out.ctypes.data, x.shape[1])
                assert np.array_equal(out, want)
            except RuntimeError as error:
                assert "worker thread was ended" in str(error)
                failed += 1
        if failed:
            break
    assert failed == 1
    assert np.array_equal(run(moe, *call), want)


def test_a_kernel_that_fails_once(faulty: tuple[Any, Any]) -> None:
    lib, handle = faulty
    layer = Layer(5, 2, 128, 256, SCHEME)
    moe = layer.build(lib, _runtime.Pool([[0, 0]], pin=False))
    call = layer.route(9, 5)
    want = run(moe, *call)
    for after in (1, 2, 5):
        arm(handle, FAILS, after)
        with pytest.raises(RuntimeError, match="rejected its arguments"):
            run(moe, *call)
        assert np.array_equal(run(moe, *call), want)


def test_s6_a_nan_from_a_kernel_stays_in_its_row(faulty: tuple[Any, Any]) -> None:
    lib, handle = faulty
    layer = Layer(5, 2, 128, 256, SCHEME)
    moe = layer.build(lib, _runtime.Pool([[0, 0]], pin=False))
    call = layer.route(9, 6)
    want = run(moe, *call)
    arm(handle, NAN)
    got = run(moe, *call)
    poisoned = np.isnan(got).any(axis=1)
    assert poisoned.sum() == 1 and np.array_equal(got[~poisoned], want[~poisoned])
    assert np.array_equal(run(moe, *call), want)
