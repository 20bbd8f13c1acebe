"""Process start to the first token with nothing in the page cache, against reading the same weights from the disk.

    python benchmarks/cold_start.py BUNDLE [-r 5]

In turns: the bundle's shards read by `dd bs=4M iflag=direct` one after the other, the same with four at a time, by
`dd` into the page cache (which needs as much fresh memory as ktc does, where a direct dd needs one block of it), and
`ktc run` (greedy, one token) in a fresh process. Before each, all files of the bundle are dropped from the page cache:
`posix_fadvise`, so no rights are needed, and `mincore` is asked whether they really are gone.

A virtual machine that reports its free pages to the host has to be given them back page by page: touching 4 GiB then
takes seconds before anything is read. So before each contestant another process touches as much memory as the weights
need and ends, again until that is quick; `--as-is` leaves it out. Bytecode is compiled by one untimed run.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("-p", "--prompt", default="ROMEO. ")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--as-is", action="store_true", help="do not touch memory before each contestant")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("-r: at least 1")
    if shutil.which("dd") is None:
        sys.exit("cold_start.py: needs dd (coreutils)")
    files = sorted(path for path in options.bundle.rglob("*") if path.is_file() and path.stat().st_size)
    shards = [path for path in files if path.suffix == ".safetensors" and "weights" in path.parts]
    size = sum(path.stat().st_size for path in shards)
    if not shards:
        sys.exit(f"cold_start.py: {options.bundle}: no weights/**/*.safetensors")
    contestants = {
        "dd iflag=direct": lambda: read(shards, 1, direct=True),
        "dd iflag=direct, four at a time": lambda: read(shards, 4, direct=True),
        "dd into the page cache": lambda: read(shards, 1, direct=False),
        "ktc run, first token": lambda: first_token(options.bundle, options.prompt),
    }
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    first_token(options.bundle, options.prompt)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    touched: list[float] = []
    for _ in range(options.repetitions):
        for name, contestant in contestants.items():
            drop(files)
            if not options.as_is:
                touched.append(back_memory(size))
            seconds[name].append(contestant())
    print(f"{size / 1e9:.2f} GB of weights in {len(shards)} shards, medians of {options.repetitions} in turns")
    if touched:
        print(f"memory touched before each: {min(touched):.2f} to {max(touched):.2f} s for {size / 1e9:.2f} GB")
    best = min(statistics.median(times) for name, times in seconds.items() if name.startswith("dd"))
    print("| | median | fastest | slowest | GB/s | x faster dd |")
    print("|---|---|---|---|---|---|")
    for name, times in seconds.items():
        median = statistics.median(times)
        cells = [f"{seconds:.2f} s" for seconds in (median, min(times), max(times))]
        print(f"| {name} | {' | '.join(cells)} | {size / median / 1e9:.2f} | {median / best:.2f} |")


def back_memory(size: int) -> float:
    """Seconds of the last of two to six touches: until one is no quicker than the one before."""
    seconds = touch(size)
    for _ in range(5):
        before, seconds = seconds, touch(size)
        if seconds > 0.9 * before:
            break
    return seconds


def touch(size: int) -> float:
    """Seconds in which another process touches `size` bytes and leaves them to the kernel, backed by the host."""
    code = f"""
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
pages = mmap(-1, {size}, flags=MAP_PRIVATE | MAP_ANONYMOUS)
pages.madvise(MADV_HUGEPAGE)
for i in range(0, {size}, 4096):
    pages[i] = 1
"""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def drop(files: list[Path]) -> None:
    """Drop the files from the page cache; an error if more than a hundredth of their pages stays."""
    os.sync()  # dirty pages cannot be dropped
    for path in files:
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cached = sum(cached_pages(path) for path in files)
    total = sum(-(-path.stat().st_size // mmap.PAGESIZE) for path in files)
    if cached > total / 100:
        sys.exit(f"cold_start.py: {cached} of {total} pages stay in the page cache (mapped, or a tmpfs?)")


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache, from mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    # A private writable map: ctypes wants a writable buffer, and nothing is written.
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3) as pages:
        there = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(pages)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(pages)), there)
        del anchor  # the map cannot be closed while it is exported
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        return sum(byte & 1 for byte in there)


def read(shards: list[Path], at_once: int, direct: bool) -> float:
    """Seconds that dd takes for all shards."""

    def one(path: Path) -> None:
        command = ["dd", f"if={path}", "of=/dev/null", "bs=4M", *(["iflag=direct"] if direct else [])]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as readers:
        list(readers.map(one, shards))
    return time.perf_counter() - start


def first_token(bundle: Path, prompt: str) -> float:
    """Seconds from just before `ktc run` is started to its first byte of text."""
    command = [sys.executable, "-m", "ktc", "run", str(bundle), "-p", prompt, "--greedy", "--max-tokens", "1"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        got = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
        error = process.stderr.read().decode(errors="replace")
    if process.returncode or not got:
        sys.exit(f"cold_start.py: ktc run ended with {process.returncode}: {error.strip()}")
    return seconds


if __name__ == "__main__":
    main()
