"""Thousands of decode steps under load while things go wrong: failing kernels, NaNs, Ctrl-C, a worker thread that ends.

    python benchmarks/soak.py demo-int4.ktc --steps 10000

Texts are generated greedily, with Expert Deferral, and compared with those of an undisturbed run. Whatever happens to
one text, what was shown of it must be right, the error must say what happened, and the next text must be whole and
right. A hang ends the run with every thread's stack. Faults come from a kernel library around the bundle's own
(tests/runtime/fault_lib.cpp): the shipped ones have no hook for them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktc.errors import KtcError

ROOT = Path(__file__).parents[1]
FAULTS = {"none": 0, "kernel fails": 1, "NaN": 2, "Ctrl-C": 0, "thread ends": 3}
MESSAGES = {"kernel fails": "status", "NaN": "NaN logits", "thread ends": "worker thread was ended"}
PROMPTS = ("ROMEO. ", "The king ", "What say you", "O ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--steps", type=int, default=10000, help="decode steps in all (default 10000)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of a text (default 40)")
    parser.add_argument("--deferred", type=int, default=2)
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="busy processes beside (default: one a CPU)")
    parser.add_argument("--hang", type=float, default=120.0, help="seconds of one text that count as a hang")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel-library", type=Path, help="instead of the bundle's own")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: None)  # a text may have ended before its Ctrl-C comes
    with tempfile.TemporaryDirectory() as folder, busy(options.load):
        soak = Soak(options, Path(folder))
        soak.run()
    print(json.dumps(soak.summary(), indent=2))


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compete for the CPUs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


class Soak:
    """A model on the faulty library, and the texts that it must produce."""

    def __init__(self, options: Any, folder: Path) -> None:
        from ktc.bundle import kernel_for_host, open_bundle
        from ktc.native import open_native
        from ktc.native.generate import NativeGenerator
        from ktc.native.tokenizer import load_tokenizer

        self.options = options
        self.random = random.Random(options.seed)
        library = folder / "faults.so"
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'runtime' / 'include'}"]
        source = ROOT / "tests" / "runtime" / "fault_lib.cpp"
        subprocess.run([os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(library), "-ldl"], check=True)
        inner = options.kernel_library or kernel_for_host(open_bundle(options.bundle))
        os.environ["KTC_FAULT_INNER"] = str(inner)
        threads = max(2, os.cpu_count() or 2)
        self.model = open_native(
            options.bundle, kernel_library=library, threads=threads, n_deferred=options.deferred, context=256
        )
        self.faults = ctypes.CDLL(str(library))
        self.generator = NativeGenerator(self.model, load_tokenizer(options.bundle / "model"))
        self.steps = 0
        self.happened: Counter[str] = Counter()
        self.errors: dict[str, str] = {}
        began = time.perf_counter()
        self.right = {prompt: self.text(prompt)[:2] for prompt in PROMPTS}
        self.seconds_a_text = (time.perf_counter() - began) / len(PROMPTS)

    def text(self, prompt: str) -> tuple[list[int], str, str | None]:
        """(ids, text that was shown, message of the error that ended it or None)."""
        from ktc.engine.chat import encode_text

        shown: list[str] = []
        ids = encode_text(self.generator.tokenizer, prompt)
        faulthandler.dump_traceback_later(self.options.hang, exit=True)
        try:
            out = self.generator.generate(ids, max_tokens=self.options.tokens, on_text=shown.append, ignore_eos=True)
            self.steps += out.timings.decode_steps
            return out.ids, "".join(shown), out.finish_reason if out.finish_reason == "interrupted" else None
        except KtcError as error:
            return [], "".join(shown), error.message
        finally:
            faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        kinds = [kind for kind in FAULTS if kind not in ("none", "thread ends")]
        while self.steps < self.options.steps:
            for kind in kinds:
                self.disturb(kind, self.random.choice(PROMPTS))
                self.undisturbed()
        self.disturb("thread ends", PROMPTS[0])  # last: from here on there is one thread less
        for _ in PROMPTS:
            self.undisturbed()

    def undisturbed(self) -> None:
        for prompt in PROMPTS[: self.random.randint(1, len(PROMPTS))]:
            ids, shown, error = self.text(prompt)
            if error is not None or (ids, shown) != self.right[prompt]:
                raise SystemExit(f"soak: wrong after {dict(self.happened)}: {error or ids}")

    def disturb(self, kind: str, prompt: str) -> None:
        """One text with a fault somewhere in it."""
        if self.random.random() < 0.5:
            self.generator.reset()  # so that faults meet prompts too
        timer = threading.Timer(self.random.random() * self.seconds_a_text, os.kill, (os.getpid(), signal.SIGINT))
        before = self.faults.ktc_fault_happened()
        if kind == "Ctrl-C":
            timer.start()
        else:
            far = 1 if kind == "thread ends" else self.random.randint(1, 3000)
            self.faults.ktc_fault_arm(FAULTS[kind], ctypes.c_int64(far))
        try:
            ids, shown, error = self.text(prompt)
        finally:
            timer.cancel()
            if kind == "Ctrl-C":
                timer.join()
            self.faults.ktc_fault_arm(0, ctypes.c_int64(0))
        right_ids, right = self.right[prompt]
        if not right.startswith(shown.rstrip("\ufffd")):  # the beginning of a character that did not get its end
            raise SystemExit(f"soak: {kind}: wrong text was shown: {shown!r} instead of {right!r}")
        if error is None:
            if ids != right_ids:
                raise SystemExit(f"soak: {kind}: wrong ids without an error: {ids}")
            if kind == "thread ends" or (kind == "kernel fails" and self.faults.ktc_fault_happened() > before):
                raise SystemExit(f"soak: {kind}: no error")
            return  # the fault came too late, or where it touches nothing that is used
        if MESSAGES.get(kind, "interrupted") not in error:
            raise SystemExit(f"soak: {kind}: the error does not say so: {error}")
        self.happened[kind] += 1
        self.errors[kind] = error

    def summary(self) -> dict[str, Any]:
        return {
            "decode_steps": self.steps,
            "texts_ended_by": dict(self.happened),
            "last_messages": self.errors,
            "threads": self.model.graph.pool.threads,
            "warnings": self.model.graph.pool.warnings(),
            "busy_processes": self.options.load,
        }


if __name__ == "__main__":
    main()
