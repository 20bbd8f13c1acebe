"""The device lane on the CPU: how torch's own work shares the CPUs with the native pool.

Experts and packed linears run on one native pool. What remains on torch (norms, rope, attention scores,
modules no rule matched) would use OpenMP threads, and those fight with the pool twice: they spin after
each region, and how many there are changes the last bits of a matrix product. So inside a model's forward torch
runs on one thread (`single_threaded`), and what is worth more threads is cut into pieces that do not depend on
how many there are (`Lane.run`), each computed on one thread. Results are the same bits on any number of threads.
`quiet_openmp`, for what runs outside a forward, only works before torch is imported: the command line calls it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def quiet_openmp() -> None:
    """Make OpenMP workers sleep between parallel regions. Only has an effect before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


class Lane:
    """Threads for pieces of torch work; started at first use, so a decode-only process never has them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor: ThreadPoolExecutor | None = None

    def __deepcopy__(self, memo: Any) -> Lane:
        return self  # threads are shared, not copied

    def run(self, function: Callable[[T], None], pieces: Sequence[T]) -> None:
        """function(piece) for every piece, the caller's thread included. The first exception is raised here."""
        if self.threads == 1 or len(pieces) == 1:
            for piece in pieces:
                function(piece)
            return
        import torch

        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="ktc-lane")
        # torch's modes belong to a thread: hand the caller's on
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        todo = iter(pieces)  # next() on an iterator is atomic: each piece is taken once

        def work() -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference):
                for piece in todo:
                    function(piece)

        others = [self._executor.submit(work) for _ in range(min(self.threads, len(pieces)) - 1)]
        try:
            for piece in todo:
                function(piece)
        finally:
            for other in others:
                other.exception()  # wait for all before anyone frees what they work on
        for other in others:
            other.result()


def single_threaded(model: Any) -> None:
    """Run every forward of `model` with one torch thread, and give the caller's setting back after it."""
    import torch

    before = threading.local()  # so is the number of OpenMP threads

    def enter(module: Any, args: Any) -> None:
        before.__dict__.setdefault("threads", []).append(torch.get_num_threads())
        if before.threads[-1] != 1:
            torch.set_num_threads(1)

    def leave(module: Any, args: Any, out: Any) -> None:
        threads = before.threads.pop()
        if threads != 1:
            torch.set_num_threads(threads)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
