"""The packing loop: bounded, and clean when a step fails."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from ktc.errors import DiskError
from ktc.pack.journal import Journal
from ktc.pack.pipeline import Step, Task, check_space, run_tasks
from ktc.pack.writer import ShardLayout, TensorSpec
from ktc.progress import Progress

KEY = {"k": 1}


def make_task(index: int, steps: int = 4, run=None) -> Task:
    layout = ShardLayout([TensorSpec("t", "U8", (steps, 8))])

    def step(row: int):
        def work(writers) -> None:
            if run is not None:
                run(index, row)
            writers[0].write("t", bytes([index]) * 8, row)

        return work

    return Task((f"w/{index}.safetensors",), (layout,), [Step(step(r), 8, f"{index}/{r}") for r in range(steps)])


def files(journal: Journal) -> list[str]:
    return sorted(p.relative_to(journal.bundle).as_posix() for p in journal.bundle.rglob("*") if p.is_file())


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_shard_is_finished_and_journalled(tmp_path: Path, jobs: int) -> None:
    with Journal(tmp_path / "m", KEY) as journal:
        run_tasks(journal, [make_task(i) for i in range(6)], Progress("t"), jobs)
        assert files(journal) == sorted(journal.finished) == [f"w/{i}.safetensors" for i in range(6)]


@pytest.mark.parametrize("jobs", [1, 3])
def test_m1_no_more_steps_at_a_time_than_workers(tmp_path: Path, jobs: int) -> None:
    # failure M1: memory grew with the model. Here: one step (one expert) per worker, whatever the queue holds.
    lock, now, most = threading.Lock(), 0, 0

    def work(index: int, row: int) -> None:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        time.sleep(0.002)
        with lock:
            now -= 1

    with Journal(tmp_path / "m", KEY) as journal:
        run_tasks(journal, [make_task(i, run=work) for i in range(10)], Progress("t"), jobs)
    assert most <= jobs


@pytest.mark.parametrize("jobs", [1, 2])
def test_c11_a_failing_step_keeps_finished_shards_and_drops_open_ones(tmp_path: Path, jobs: int) -> None:
    # failure C11: disk full half way.
    def work(index: int, row: int) -> None:
        if (index, row) == (3, 2):
            raise DiskError("cannot write x: No space left on device")

    with Journal(tmp_path / "m", KEY) as journal:
        with pytest.raises(DiskError, match="No space left"):
            run_tasks(journal, [make_task(i, run=work) for i in range(6)], Progress("t"), jobs)
        done = sorted(journal.finished)
        assert files(journal) == done and "w/3.safetensors" not in done and len(done) >= 2
    again: list[tuple[int, int]] = []
    with Journal(tmp_path / "m", KEY) as journal:
        assert sorted(journal.finished) == done
        run_tasks(journal, [make_task(i, run=lambda *at: again.append(at)) for i in range(6)], Progress("t"), jobs)
        assert len(journal.finished) == 6
    assert {f"w/{i}.safetensors" for i, _ in again} == {f"w/{i}.safetensors" for i in range(6)} - set(done)


def test_an_interrupt_leaves_no_half_written_shard(tmp_path: Path) -> None:
    def work(index: int, row: int) -> None:
        if index == 2:
            raise KeyboardInterrupt

    with Journal(tmp_path / "m", KEY) as journal:
        with pytest.raises(KeyboardInterrupt):
            run_tasks(journal, [make_task(i, run=work) for i in range(4)], Progress("t"), 2)
        assert files(journal) == sorted(journal.finished)


def test_c11_opening_a_shard_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal(tmp_path / "m", KEY) as journal:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskError, match="No space left"):
            run_tasks(journal, [make_task(0)], Progress("t"), 2)
        assert files(journal) == []


def test_c11_space_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    check_space(tmp_path / "a" / "b" / "m.ktc", 1)
    with pytest.raises(DiskError, match=r"the bundle needs .* more on the disk of .*, which has") as error:
        check_space(tmp_path / "a" / "m.ktc", 1 << 60)
    assert (error.value.hint or "").startswith("free ")
    assert list(tmp_path.iterdir()) == []
