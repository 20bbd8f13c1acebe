from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ktc.engine import pool
from ktc.engine.pool import crowded, place, usable_threads
from ktc.errors import KtcError


@pytest.fixture(autouse=True)
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "cpu_quota", lambda: None)


def test_one_node_takes_every_cpu() -> None:
    assert place([[0, 1, 2, 3]], 1, None) == [[0, 1, 2, 3]]
    assert place([[0, 1], [2, 3]], 1, None) == [[0, 1, 2, 3]]
    assert place([[0, 1, 2, 3]], 1, 2) == [[0, 1]]


def test_more_threads_than_cpus_share_them() -> None:
    assert place([[0, 1]], 1, 5) == [[0, 1, 0, 1, 0]]
    assert crowded([[0, 1]], 2) == crowded([[0, 1]], None) == []
    usable = usable_threads([[0, 1]])
    assert crowded([[0, 1]], 5) == [f"5 threads share {usable} usable CPU{'s' * (usable > 1)}: slower than {usable}"]


def test_real_nodes_keep_their_cpus() -> None:
    assert place([[0, 1], [2, 3]], 2, None) == [[0, 1], [2, 3]]
    assert place([[0, 1], [2, 3]], 2, 3) == [[0, 1], [2]]


def test_emulated_nodes_are_dealt_the_cpus() -> None:
    assert place([[0, 1]], 2, None, emulate=True) == [[0], [1]]
    assert place([[0, 1]], 3, 3, emulate=True) == [[0], [1], [0]]
    assert place([[0]], 3, 1, emulate=True) == [[0], [0], [0]]


def test_nodes_that_are_not_there_are_refused() -> None:
    with pytest.raises(KtcError, match=r"split over 3 NUMA nodes and this machine has 1") as caught:
        place([[0, 1]], 3, None)
    assert "ktc repack" in str(caught.value)
    with pytest.raises(KtcError, match="at least 1"):
        place([[0]], 1, 0)


def test_more_threads_than_the_system_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc import _runtime

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("cannot start worker thread: Resource temporarily unavailable")

    monkeypatch.setattr(_runtime, "Pool", refuse)
    with pytest.raises(KtcError, match=r"cannot start 3 threads: .*unavailable") as caught:
        pool.get_pool([[0, 0, 0]])
    assert "--threads" in (caught.value.hint or "")


def test_a_child_after_a_fork_gets_a_pool_of_its_own() -> None:
    mine = pool.get_pool([[0, 0]])
    assert pool.get_pool([[0, 0]]) is mine
    child = os.fork()
    if child == 0:
        os._exit(0 if pool.get_pool([[0, 0]]) is not mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.get_pool([[0, 0]]) is mine


def test_the_default_respects_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "cpu_quota", lambda: 1.5)
    assert place([[0, 1, 2, 3]], 1, None) == [[0, 1]]


def test_importing_the_engine_is_cheap() -> None:
    modules = "ktc.engine, ktc.engine.sampling, ktc.engine.pool, ktc.cli.run_cmd, ktc.cli.bench_cmd"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True)
    assert out.stdout.strip() == "False"
