"""Prefill attention of one layer, by tiles against by rows, at two models' shapes: milliseconds and share of AMX.

    taskset -c 0 python benchmarks/prefill_attention.py [--tokens 512,2048,8192] [--repeat 5]

A prompt goes through in chunks of 512, on one thread; ways are interleaved and medians of the thread's CPU time are
printed. Work is counted as the two products over visible keys in heads: what a way does beside it (masked corners of
blocks, expanding keys and values from the latent cache) is not work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ktc import _runtime

CHUNK = 512
F32, BF16, ROWS = 0, 1, 2  # runtime/src/ops/attention.h
Run = Callable[[str, int], None]  # (ISA, way): the whole prompt


class Work(NamedTuple):
    name: str
    flops: float
    run: Run


def _rope(total: int, half: int) -> list[np.ndarray]:
    angles = np.arange(total)[:, None] * 1e4 ** (-np.arange(half) / half)
    return [np.ascontiguousarray(f(angles), dtype=np.float32) for f in (np.cos, np.sin)]


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def gqa(total: int, heads: int = 32, kv_heads: int = 4, dim: int = 128) -> Work:
    """Qwen3-30B-A3B."""
    q, k, v = (_normal(CHUNK, n * dim) for n in (heads, kv_heads, kv_heads))
    keys, values = _normal(kv_heads, total, dim), _normal(kv_heads, total, dim)
    (cos, sin), out = _rope(total, dim // 2), np.empty((CHUNK, heads * dim), dtype=np.float32)

    def run(isa: str, way: int) -> None:
        for at in range(0, total, CHUNK):
            _runtime.ops.gqa(
                isa, None, heads, kv_heads, dim, dim // 2, 0, 0, dim**-0.5, 1e-6, 0.0, q.ctypes.data, k.ctypes.data,
                v.ctypes.data, cos[at:].ctypes.data, sin[at:].ctypes.data, 0, 0, 0, keys.ctypes.data,
                values.ctypes.data, total, at, CHUNK, out.ctypes.data, way)  # fmt: skip

    return Work(f"GQA {heads}/{kv_heads} heads of {dim}", 2.0 * heads * 2 * dim * total * (total + 1) / 2, run)


def mla(total: int, heads: int = 16, nope: int = 128, rope: int = 64, v_dim: int = 128, rank: int = 512) -> Work:
    """DeepSeek-V2-Lite."""
    q, kv, cache = _normal(CHUNK, heads * (nope + rope)), _normal(CHUNK, rank + rope), _normal(total, rank + rope)
    norm, out = np.ones(rank, dtype=np.float32), np.empty((CHUNK, heads * v_dim), dtype=np.float32)
    kv_b = _normal(heads * (nope + v_dim), rank) * np.float32(rank**-0.5)
    kv_b = (kv_b.view(np.uint32) >> 16).astype(np.uint16)  # bf16
    cos, sin = _rope(total, rope // 2)

    def run(isa: str, way: int) -> None:
        for at in range(0, total, CHUNK):
            _runtime.ops.mla(
                isa, None, heads, nope, rope, v_dim, rank, 2, (nope + rope) ** -0.5, 1e-6, q.ctypes.data,
                kv.ctypes.data, cos[at:].ctypes.data, sin[at:].ctypes.data, norm.ctypes.data, kv_b.ctypes.data,
                "bf16", cache.ctypes.data, at, CHUNK, out.ctypes.data, way)  # fmt: skip

    flops = 2.0 * heads * (nope + rope + v_dim) * total * (total + 1) / 2
    return Work(f"MLA {heads} heads of {nope} + {rope}, {v_dim}", flops, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="512,2048,8192")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    have = _runtime.ops.available()
    ways = [(isa, BF16) for isa in ("amx", "avx512_bf16") if isa in have]
    ways += [(isa, F32) for isa in ("avx512", "avx2") if isa in have]
    ways.append((have[-1], ROWS))
    for tokens in map(int, args.tokens.split(",")):
        for work in (gqa(tokens), mla(tokens)):
            times: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
            peaks = []
            for _ in range(args.repeat):
                if "amx" in have:
                    peaks.append(_runtime.measure_compute("amx_bf16", [min(os.sched_getaffinity(0))], 0.05))
                for way in ways:
                    began = time.thread_time()
                    work.run(*way)
                    times[way].append(time.thread_time() - began)
            rows = statistics.median(times[ways[-1]])
            print(f"{work.name}, {tokens} tokens")
            for isa, way in ways:
                seconds = statistics.median(times[isa, way])
                share = f", {work.flops / seconds / statistics.median(peaks):.0%} of AMX" if isa == "amx" else ""
                print(
                    f"  {'rows' if way == ROWS else isa:<12}{seconds * 1e3:10.1f} ms"
                    f"  {work.flops / seconds / 1e9:7.0f} GFLOP/s  {rows / seconds:5.2f}x{share if way == BF16 else ''}"
                )


if __name__ == "__main__":
    main()
