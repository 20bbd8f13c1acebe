"""Kill `ktc compile` with SIGKILL at random moments, resume it, and compare every byte with an uninterrupted bundle.

    python benchmarks/kill_resume.py CHECKPOINT REFERENCE_BUNDLE [--kills 20] [--recipe int4] [--seed 0]

REFERENCE_BUNDLE was compiled from the same checkpoint and recipe without a kill. The moments are drawn over the time
that the reference is said to need (--expect seconds), so most kills fall into packing. Exit code 1 on any difference.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def digests(bundle: Path) -> dict[str, str]:
    """SHA-256 of every weight shard, by path relative to the bundle."""
    out = {}
    for path in sorted((bundle / "weights").rglob("*.safetensors")):
        with path.open("rb") as f:
            out[str(path.relative_to(bundle))] = hashlib.file_digest(f, "sha256").hexdigest()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--expect", type=float, default=200.0, help="seconds an uninterrupted compile takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("kill-resume.ktc"))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    command = [sys.executable, "-m", "ktc", "compile", str(options.checkpoint), "--recipe", options.recipe]
    command += ["-o", str(options.work)]
    for stale in (options.work, Path(f"{options.work}.partial")):
        shutil.rmtree(stale, ignore_errors=True)
    start, landed = time.monotonic(), 0
    # Start-up is never resumed, so a kill must leave time beyond it or the run would not move.
    while landed < options.kills:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            child.wait(timeout=rng.uniform(1.0, 2.5 * options.expect / options.kills + 15.0))
            print(f"finished after {landed} kills", flush=True)
            break
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            landed += 1
            print(f"kill {landed} after {time.monotonic() - start:.0f} s", flush=True)
    if not options.work.is_dir():
        subprocess.run(command, check=True)
    ours, reference = digests(options.work), digests(options.reference)
    wrong = sorted(name for name in ours.keys() | reference.keys() if ours.get(name) != reference.get(name))
    print(f"{landed} kills, {len(reference)} shards, {len(wrong)} differ: {', '.join(wrong[:5]) or 'byte-identical'}")
    return 1 if wrong or landed < options.kills else 0


if __name__ == "__main__":
    raise SystemExit(main())
