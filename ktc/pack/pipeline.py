"""Runs packing over the cores: shards are opened, filled step by step, finished and journalled.

It knows tasks (some shards that are filled together) and steps (one expert, one parameter), and
neither models nor checkpoints, so `ktc compile` and `ktc repack` are the same loop. Memory is
bounded by one step per worker: a step is started only when a worker is free for it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ktc.errors import DiskError
from ktc.pack.journal import Journal
from ktc.pack.writer import ShardLayout, ShardWriter
from ktc.progress import Progress, format_bytes

Writers = tuple[ShardWriter, ...]


@dataclass(frozen=True)
class Step:
    """One unit of work: fills some rows of the task's shards. `nbytes` is what it reads (for the rate)."""

    run: Callable[[Writers], None]
    nbytes: int
    label: str


@dataclass(frozen=True)
class Task:
    """Shards that are filled together, and the steps that fill every byte of them."""

    files: tuple[str, ...]
    layouts: tuple[ShardLayout, ...]
    steps: Sequence[Step]

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @property
    def size(self) -> int:
        return sum(layout.size for layout in self.layouts)


def default_jobs() -> int:
    """Cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def unfinished(journal: Journal, tasks: Iterable[Task]) -> list[Task]:
    """What an earlier, interrupted run did not finish."""
    return [task for task in tasks if any(file not in journal.finished for file in task.files)]


def check_space(out: Path, needed: int) -> None:
    """Refuse before the first byte if the disk cannot hold what is still to be written.

    Raises:
        DiskError: says how much is missing.
    """
    folder = out.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskError(
            f"the bundle needs {format_bytes(needed)} more on the disk of {folder}, which has {format_bytes(free)}",
            f"free {format_bytes(needed - free)}, or choose another disk with -o",
        )


class _Running:
    """A task under way."""

    def __init__(self, task: Task, root: Path) -> None:
        self.task, self.left = task, len(task.steps)
        self.writers: Writers = ()
        opened: list[ShardWriter] = []
        try:
            for file, layout in zip(task.files, task.layouts, strict=True):
                opened.append(ShardWriter(root / file, layout))
        except BaseException:
            for writer in opened:
                writer.abort()
            raise
        self.writers = tuple(opened)


def run_tasks(journal: Journal, tasks: Iterable[Task], progress: Progress, jobs: int) -> None:
    """Fill every task's shards that the journal does not list as finished.

    Raises:
        the first error of any step; shards under way are dropped, finished ones stay in the journal.
    """
    lock, failed = threading.Lock(), threading.Event()
    running: set[_Running] = set()

    def work(state: _Running, step: Step) -> None:
        if failed.is_set():
            return
        step.run(state.writers)
        progress.update(step.nbytes, step.label)
        with lock:
            state.left -= 1
            last = state.left == 0
        if last:
            finish(state)

    def finish(state: _Running) -> None:
        digests = [writer.finish() for writer in state.writers]
        with lock:
            for file, digest in zip(state.task.files, digests, strict=True):
                journal.add(file, digest)
            running.discard(state)

    pending: set[Future[None]] = set()
    with ThreadPoolExecutor(jobs, "pack") as pool:
        try:
            for task in tasks:
                if all(file in journal.finished for file in task.files):
                    continue
                state = _Running(task, journal.bundle)
                with lock:
                    running.add(state)
                for step in task.steps:
                    while len(pending) >= jobs:
                        done, pending = wait(pending, return_when=FIRST_COMPLETED)
                        for future in done:
                            future.result()
                    pending.add(pool.submit(work, state, step))
            for future in pending:
                future.result()
        except BaseException:
            failed.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for state in running:
                for writer in state.writers:
                    writer.abort()
            raise
