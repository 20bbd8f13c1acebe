"""Process start to the first token on stdout: `ktc run` against the same through transformers, in turns.

    python benchmarks/first_token.py demo-int4.ktc artifacts/demo

Every run is a fresh process, greedy, one new token, with warm file cache and compiled bytecode (one untimed run of
each before the first). Times are from just before the process is started to its first byte of text, and to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

THROUGH_TRANSFORMERS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
ids = tokenizer(sys.argv[2], return_tensors="pt")
out = model.generate(**ids, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:]), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path, help="what the bundle was compiled from; a directory")
    parser.add_argument("-p", "--prompt", default="ROMEO. ")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run = ["-m", "ktc", "run", str(options.bundle), "-p", options.prompt, "--greedy", "--max-tokens", "1"]
    commands = {
        "ktc run": [sys.executable, *run],
        "transformers, bf16": [sys.executable, "-c", THROUGH_TRANSFORMERS, str(options.checkpoint), options.prompt],
    }
    rows = measure(commands, options.repetitions)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"| {options.repetitions} runs in turns | first token, median | fastest | slowest | process, median |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        first = row["first"]
        cells = [statistics.median(first), min(first), max(first), statistics.median(row["total"])]
        print(f"| {name} | " + " | ".join(f"{s:.2f} s" for s in cells) + " |")


def measure(commands: dict[str, list[str]], repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Name -> seconds to the first byte and to the end of each run."""
    rows: dict[str, dict[str, list[float]]] = {name: {"first": [], "total": []} for name in commands}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = dict(os.environ, PYTHONPYCACHEPREFIX=bytecode, HF_HUB_OFFLINE="1")
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for repetition in range(repetitions + 1):
            for name, command in commands.items():
                first, total = once(command, environment)
                if repetition:  # the first one warms up
                    rows[name]["first"].append(first)
                    rows[name]["total"].append(total)
    return rows


def once(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    with process:
        byte = process.stdout.read(1)
        first = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode or not byte:
        raise SystemExit(f"{' '.join(command[:4])} ... failed with {process.returncode}")
    return first, time.perf_counter() - begun


if __name__ == "__main__":
    main()
