"""Time single kernels on one thread against this machine's limits. Not a benchmark of the runtime.

Weights lie in huge pages and exceed the caches (decode), activations are packed once; a task is a range of blocks as
the runtime would cut it. Reports GB/s of weight bytes and TOPS, and the limits measured in the same run:
DRAM read and the tile unit's peak on L1-resident operands.

    python benchmarks/micro_gemm.py --variant amx --scheme int4-g64 --rows 1,4,16,128,1024
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import re
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ktc.codegen.build import build_variants  # noqa: E402
from ktc.codegen.spec import KernelSpec, KernelSpecs  # noqa: E402
from ktc.layout import MatrixLayout, QuantScheme  # noqa: E402
from tests.kernels.native import Act, GemmArgs, Kernel, KernelLibrary, Weight, cpu_features, ptr  # noqa: E402


def parse_scheme(text: str) -> QuantScheme:
    if text in ("bf16", "fp32"):
        return QuantScheme(text)  # type: ignore[arg-type]
    if text == "int8-channel":
        return QuantScheme("int8", "channel")
    found = re.fullmatch(r"(int[48])-g(\d+)([fc]?)", text)
    if found is None:
        raise SystemExit(f"{text!r} is no scheme: bf16, fp32, int8-channel, int4-g64, int4-g32f, int4-g16c, ...")
    data_type, group, kind = found.groups()
    return QuantScheme(data_type, {"": "integer", "f": "group", "c": "codebook"}[kind], int(group))  # type: ignore[arg-type]


def huge(nbytes: int) -> np.ndarray:
    size = (nbytes + (4 << 20)) & ~((2 << 20) - 1)
    space = mmap.mmap(-1, size + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    space.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(space, np.uint8)
    start = -raw.ctypes.data % (2 << 20)
    return raw[start : start + nbytes]


def time_kernel(kernel: Kernel, scheme: QuantScheme, n: int, k: int, rows: int, blocks: int, copies: int) -> float:
    """Best CPU seconds for one pass over `copies` matrices [n, k], `blocks` blocks a task, with `rows` rows."""
    layout = MatrixLayout(n, k, scheme)
    rng = np.random.default_rng(0)
    tiles = huge(layout.tile_bytes * copies)
    tiles[:] = 0x77
    scale = np.ones(max(1, layout.scale_count), np.float32) * 1e-3
    mult = np.full(layout.mult_bytes + 64, 8, np.uint8)
    gated = kernel.struct.epilogue >= 2
    # As in the runtime: everything in huge pages, rows of the output an odd number of lines apart.
    columns = n // 2 if gated else n
    stride = (-(-columns // 16) | 1) * 16
    out = huge(rows * stride * 4).view(np.float32)
    act = kernel.quantize(rng.standard_normal((rows, k)).astype(np.float32), scheme)
    act_tiles = huge(act.tiles.nbytes)
    act_tiles[:] = act.tiles.reshape(-1).view(np.uint8)
    scratch = huge(int(kernel.struct.scratch_bytes) + 4096)
    times = []
    calls = []
    for c in range(copies):
        for b in range(0, layout.blocks, blocks):
            weight = Weight(tiles.ctypes.data + c * layout.tile_bytes, ptr(scale), ptr(mult), None)
            calls.append(
                GemmArgs(
                    struct_size=ctypes.sizeof(GemmArgs),
                    k=layout.k_pad,
                    m_begin=0,
                    m_end=rows,
                    block_begin=b,
                    block_end=min(b + blocks, layout.blocks),
                    n_out=columns,
                    act=Act(ptr(act_tiles), ptr(act.scale), ptr(act.sums)),
                    weight=weight,
                    out=ptr(out),
                    ld_out=stride,
                    scratch=ptr(scratch),
                )
            )
    gemm = kernel.struct.gemm
    pointers = [ctypes.byref(c) for c in calls]
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < 0.5:
        start = time.thread_time()  # not wall time: other processes may take the CPU
        for p in pointers:
            gemm(p)
        times.append(time.thread_time() - start)
    return min(times)


def dram_rate() -> float:
    """GB/s of a plain read of 256 MB in huge pages."""
    data = huge(256 << 20)
    data[:] = 1
    words = data.view(np.int64)
    best = 0.0
    for _ in range(3):
        start = time.thread_time()
        words.max()
        best = max(best, data.nbytes / (time.thread_time() - start) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="amx")
    parser.add_argument("--scheme", default="int4-g64,int8-channel,bf16")
    parser.add_argument("--rows", default="1,4,16,128")
    parser.add_argument("--n", type=int, default=2816)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--epilogue", default="silu_mul")
    parser.add_argument("--megabytes", type=int, default=256, help="weights per pass (decode must exceed the cache)")
    args = parser.parse_args()
    cpu_features()  # asks for tile permission
    schemes = [parse_scheme(s) for s in args.scheme.split(",")]
    specs = KernelSpecs(tuple(KernelSpec(s.data_type, s.scale, s.group, args.epilogue, args.k) for s in schemes))
    library = KernelLibrary(build_variants(specs, [args.variant])[args.variant].path)
    print(f"DRAM read, huge pages, 1 thread: {dram_rate():.1f} GB/s")
    print(f"{'kernel':44s} {'M':>5s} {'us':>9s} {'GB/s':>7s} {'TOPS':>7s}   (per matrix {args.n} x {args.k})")
    for scheme in schemes:
        layout = MatrixLayout(args.n, args.k, scheme)
        for rows in map(int, args.rows.split(",")):
            copies = max(1, (args.megabytes << 20) // layout.tile_bytes // max(1, rows // 8))
            for kernel in library.find(scheme, args.epilogue, args.k):
                t = time_kernel(kernel, scheme, args.n, args.k, rows, args.blocks, copies) / copies
                rate, ops = layout.nbytes / t / 1e9, 2 * rows * args.n * args.k / t / 1e12
                print(f"{kernel.name:44s} {rows:5d} {t * 1e6:9.1f} {rate:7.1f} {ops:7.3f}")


if __name__ == "__main__":
    main()
