"""Everything that needs a GPU, in one go: `python tests/cuda/run_all.py [--out FILE] [--seconds N]`.

Prints a Markdown report: the machine, decode tokens/s of artifacts/demo for K = 0 .. top_k - 2 deferred experts with
the graph on and off (with two GPUs, also for layers split over both), and every test of tests/cuda with its outcome
(CUDA sources under nvcc among them). A part that fails is reported and the next one runs; the report is written after
each part. The exit code is 0 only if all passed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
STARTED = time.monotonic()
PROMPT_TOKENS, DECODE_TOKENS, REPETITIONS = 64, 128, 3


class Report:
    """Sections of Markdown, written to a file as they come."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.failed = path, False
        self.text = ""

    def section(self, title: str, make: Callable[[], tuple[str, bool]]) -> None:
        """`make` returns (Markdown, ok)."""
        began = time.monotonic()
        try:
            body, ok = make()
        except BaseException:
            body, ok = f"```\n{traceback.format_exc()[-3000:]}```\n", False
            if isinstance(sys.exc_info()[1], KeyboardInterrupt):
                raise
        self.failed |= not ok
        part = f"## {title}\n\n{body}\n({time.monotonic() - began:.0f} s)\n\n"
        self.text += part
        print(part, flush=True)
        if self.path is not None:
            self.path.write_text(self.text)


def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines) + "\n"


def machine() -> tuple[str, bool]:
    import torch

    from ktc.host import cpu_model, package_versions, this_host

    host = this_host()
    rows = [
        ["CPU", f"{cpu_model()}, {os.cpu_count()} logical, {len(host.nodes)} nodes; {host.amx}"],
        ["Python, torch, CUDA of torch", f"{platform.python_version()}, {torch.__version__}, {torch.version.cuda}"],
        ["packages", ", ".join(f"{k} {v}" for k, v in package_versions(("transformers", "flashinfer-python")).items())],
    ]
    there = torch.cuda.is_available()
    if there:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        total = torch.cuda.mem_get_info()[1] / 2**30
        rows.append(["GPU", f"{torch.cuda.get_device_name()}, compute capability {capability}, {total:.0f} GiB"])
    return table(["what", "here"], rows) + ("" if there else "\nNo CUDA device: nothing below ran on one.\n"), there


def tests(seconds: float) -> tuple[str, bool]:
    """Every test of tests/cuda in a process of its own, so that a crash is a line of the report."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "out.xml"
        files = [str(p) for p in (ROOT / "tests/cuda").glob("test_*.py")]
        files.sort(key=lambda p: "gpu" not in Path(p).name)  # what only this machine can show comes first
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={xml}", *files]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
            tail = done.stdout[-2500:] + done.stderr[-500:]
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            return f"did not finish in {seconds:.0f} s\n```\n{output[-4000:].decode('utf-8', 'replace')}\n```\n", False
        if not xml.exists():
            return f"pytest ended with {done.returncode}\n```\n{tail}\n```\n", False
        rows, failures = [], ""
        for case in ET.parse(xml).getroot().iter("testcase"):
            bad = case.find("failure") if case.find("failure") is not None else case.find("error")
            skipped = case.find("skipped")
            outcome = "FAILED" if bad is not None else "skipped" if skipped is not None else "passed"
            why = (skipped.get("message") or "") if skipped is not None else ""
            file = (case.get("classname") or "").rpartition(".")[2]
            rows.append(
                [f"{file}: {case.get('name')}", outcome + (f" ({why})" if why else ""), f"{case.get('time')} s"]
            )
            if bad is not None:
                failures += f"\n{case.get('name')}\n{(bad.text or bad.get('message') or '')[-1500:]}\n"
        ok = done.returncode == 0
        passed = sum(outcome == "passed" for _, outcome, _ in rows)
        head = f"{passed} passed of {len(rows)}\n\n"
        return head + table(["test", "outcome", "time"], rows) + (f"\n```{failures}```\n" if failures else ""), ok


SECOND_GPU = r"""
  - match: {name: '^(model\.layers\.[3-9]|model\.norm|lm_head)$'}
    replace: {class: default, device: cuda:1}
"""


def two_gpus(folder: Path) -> Path:
    """int4-cuda with the demo's last layers on a second GPU."""
    text = (ROOT / "recipes/int4-cuda.yaml").read_text()
    path = folder / "int4-two-gpus.yaml"
    path.write_text(text.replace("\nrules:\n", f"\nrules:{SECOND_GPU}", 1))
    return path


def decode_speed(split: bool = False) -> tuple[str, bool]:
    """Tokens/s of the demo model; variants take turns, so that whatever else the machine does hits all of them."""
    import numpy as np

    import ktc
    from ktc.compile import compile_checkpoint
    from ktc.cuda.session import CudaSession

    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "demo.ktc"
        recipe = two_gpus(Path(folder)) if split else "int4-cuda"
        compile_checkpoint(ROOT / "artifacts/demo", recipe, bundle, variants=(), jobs=os.cpu_count() or 1)
        model = ktc.load(bundle)
        sessions = {graph: CudaSession(model, graph=graph, n_deferred=0) for graph in (True, False)}
        top_k = model.ktc_lane.top_k
        prompt = np.random.default_rng(0).integers(3, 4000, PROMPT_TOKENS)
        rates: dict[tuple[int, bool], list[float]] = {}
        waits: dict[tuple[int, bool], list[float]] = {}
        for _ in range(REPETITIONS):
            for deferred in range(top_k - 1):
                for graph, session in sessions.items():
                    session.reset()
                    session.split(deferred)
                    session.prefill([int(t) for t in prompt])
                    token, before = 5, model.ktc_lane.native.stats()["wait_ns"]
                    began = time.perf_counter()
                    for _ in range(DECODE_TOKENS):
                        token = int(session.decode(token).argmax())
                    spent = time.perf_counter() - began
                    rates.setdefault((deferred, graph), []).append(DECODE_TOKENS / spent)
                    waited = (model.ktc_lane.native.stats()["wait_ns"] - before) / 1e9
                    waits.setdefault((deferred, graph), []).append(waited / spent)
        rows = []
        for deferred in range(top_k - 1):
            cells = [str(deferred)]
            for graph in (True, False):
                samples = rates[deferred, graph]
                spread = statistics.stdev(samples) if len(samples) > 1 else 0.0
                cells.append(f"{statistics.mean(samples):.0f} ± {spread:.0f}")
            cells.append(f"{statistics.mean(waits[deferred, True]):.0%}")
            rows.append(cells)
        header = ["deferred experts K", "tokens/s, graph", "tokens/s, no graph", "time in collects, graph"]
        about = f"artifacts/demo, {Path(recipe).stem}, graphs a token: {len(model.ktc_pipeline.stages)},"
        about += f" {model.ktc_report.summary()}; attention: {sessions[True].attention};"
        about += f" {DECODE_TOKENS} greedy tokens a sample\n\n"
        return about + table(header, rows), True


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--out", type=Path, help="also write the report here, after each part")
    options.add_argument("--seconds", type=float, default=600, help="for the tests; default %(default)s")
    given: Any = options.parse_args()
    report = Report(given.out)
    report.section("Machine", machine)
    report.section("Decode speed", decode_speed)
    if gpus() > 1:
        report.section("Decode speed, layers on two GPUs", lambda: decode_speed(split=True))
    report.section("Tests", lambda: tests(given.seconds))
    if shutil.which("nvcc") is None:
        print("nvcc is not on the PATH: the test of the CUDA sources was skipped")
    print(f"{'FAILED' if report.failed else 'all passed'} in {time.monotonic() - STARTED:.0f} s")
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
