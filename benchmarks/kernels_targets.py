"""The expert kernels' targets, checked on this machine: one table of target, figure and verdict.

    python benchmarks/kernels_targets.py                      everything, several minutes on a quiet machine
    python benchmarks/kernels_targets.py --quick              the first shape only, short timings
Every ratio comes from one interleaved run (ktc/perf); floors are made of limits measured in that run. Exit code 1 when
a target is missed, so that a change to a kernel can be judged by a script. Where not even a call at the machine's limit
would be so much faster than a peer, the target is out of reach, and that is said instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ktc.perf import breakdown, figures, kernel_bench, report
from ktc.perf.shapes import SHAPES, arithmetic_kind

# format -> tokens -> the multiple of its floor that a call may take (v2lite)
X_FLOOR = {
    "int4": {1: 1.2, 4: 1.4, 16: 1.4, 1024: 1.8},
    "int8": {1: 1.2, 1024: 1.5},
    "bf16": {1: 1.2, 1024: 1.5},
}
OTHER_SHAPES = 1.15  # their multiples may be this much worse
PEAK_TOKENS, PEAK_SHARE = 4096, 0.5  # of the measured AMX int8 peak, int4 and int8
VS_GROUPED_MM = {("int4", 1): 7.0, ("int4", 1024): 8.0, ("bf16", 1024): 3.0}
HYBRID_TOKENS, HYBRID_GAIN = (1, 2, 4, 8), 5.0
NOISE = 1.03  # "never slower" allows for what two runs of the same thing differ by
MAX_BITS, MAX_ERROR = 4.5, 0.125


@dataclass(frozen=True)
class Verdict:
    what: str
    target: str
    figure: str
    ok: bool
    at_floor: str = ""  # the figure of a call at the machine's limit, where that would miss the target as well

    def __str__(self) -> str:
        return "ok" if self.ok else f"out of reach: {self.at_floor} at the floor" if self.at_floor else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--int4", default="int4", help="the 4-bit format to judge (ktc bench kernels --format)")
    parser.add_argument("--seconds", type=float, default=1.0, help="timing of each figure")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", type=Path, help="write every figure as JSON")
    args = parser.parse_args()
    seconds = min(args.seconds, 0.2) if args.quick else args.seconds

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    def options(shapes: list[str], tokens: list[int], formats: list[str], peers: list[str]) -> kernel_bench.Options:
        return kernel_bench.Options(
            [SHAPES[s] for s in shapes], tokens, formats, peers, seconds=seconds, threads=args.threads
        )

    formats = [args.int4, "int8", "bf16"]
    shapes = ["v2lite"] if args.quick else list(SHAPES)
    runs = [kernel_bench.run(options(shapes, [1, 4, 16, 1024], formats, ["grouped_mm"]), say=say)]
    runs.append(kernel_bench.run(options(["v2lite"], [PEAK_TOKENS], [args.int4, "int8"], []), say=say))
    choice = breakdown.run(options(["v2lite"], [*HYBRID_TOKENS, 1024], [args.int4], []), say=say)
    verdicts = [
        *floors(runs[0], args.int4),
        *peak(runs[1]),
        *against_torch(runs[0], args.int4),
        *hybrid(choice),
        *quality(runs[0], args.int4),
    ]
    for run in runs:
        print(report.render(run, "md"), "\n")
    print(report.render_breakdown(choice, "md"), "\n")
    body = [[v.what, v.target, v.figure, str(v)] for v in verdicts]
    print(report.table(["what", "target", "here", ""], body))
    if args.save:
        record = {"runs": [run.to_json() for run in runs], "breakdown": choice.to_json(), "verdicts": body}
        args.save.write_text(json.dumps(record, indent=1))
    return 0 if all(v.ok or v.at_floor for v in verdicts) else 1


def rows_of(run: figures.Report, fmt: str) -> Iterator[figures.Row]:
    return (row for row in run.rows if row.name == f"ktc {fmt}")


def floors(run: figures.Report, int4: str) -> Iterator[Verdict]:
    for base, limits in X_FLOOR.items():
        for row in rows_of(run, int4 if base == "int4" else base):
            if row.tokens not in limits:
                continue
            limit = limits[row.tokens] * (1.0 if row.shape == "v2lite" else OTHER_SHAPES)
            what = f"{row.shape} {row.name}, {row.tokens} tokens: x floor"
            yield Verdict(what, f"<= {limit:.2f}", f"{row.x_floor:.2f}", row.x_floor <= limit)


def peak(run: figures.Report) -> Iterator[Verdict]:
    for row in run.rows:
        limits = run.limits[row.shape]
        share = row.tops * 1e12 / limits.rate(arithmetic_kind("int8", limits))
        yield Verdict(
            f"{row.shape} {row.name}, {row.tokens} tokens: share of peak arithmetic",
            f">= {PEAK_SHARE}",
            f"{share:.2f}",
            share >= PEAK_SHARE,
        )


def against_torch(run: figures.Report, int4: str) -> Iterator[Verdict]:
    for (base, tokens), target in VS_GROUPED_MM.items():
        for row in rows_of(run, int4 if base == "int4" else base):
            if row.shape == "v2lite" and row.tokens == tokens and row.vs_torch is not None:
                what = f"{row.shape} {row.name}, {tokens} tokens: x faster than grouped_mm"
                best = row.vs_torch * row.x_floor
                at_floor = f"{best:.1f}" if best < target else ""
                yield Verdict(what, f">= {target:g}", f"{row.vs_torch:.2f}", row.vs_torch >= target, at_floor)


def hybrid(choice: breakdown.Breakdown) -> Iterator[Verdict]:
    def ms(tokens: int, wanted: Callable[[breakdown.BreakdownRow], bool]) -> float | None:
        rows = [r for r in choice.rows if r.table == "kernel" and r.loads == "even" and r.tokens == tokens]
        return next((r.ms for r in rows if wanted(r)), None)

    for tokens in HYBRID_TOKENS:
        mixed, tile = ms(tokens, lambda r: r.kernel == "hybrid"), ms(tokens, lambda r: r.kernel == "amx")
        if mixed and tile:
            yield Verdict(
                f"hybrid against pure AMX, {tokens} tokens", f">= {1 / NOISE:.2f}", f"{tile / mixed:.2f}",
                mixed <= tile * NOISE,
            )  # fmt: skip
    mixed, vector = ms(1024, lambda r: r.kernel == "hybrid"), ms(1024, lambda r: r.kernel == "avx512")
    if mixed and vector:
        gain = vector / mixed
        yield Verdict(
            "hybrid against pure AVX-512, 1024 tokens", f">= {HYBRID_GAIN:g}", f"{gain:.2f}", gain >= HYBRID_GAIN
        )


def quality(run: figures.Report, int4: str) -> Iterator[Verdict]:
    for row in rows_of(run, int4):
        if row.tokens == 1 and row.error is not None:
            ok = row.error <= MAX_ERROR and row.bits <= MAX_BITS
            figure = f"{row.error:.4f} at {row.bits:.2f}"
            yield Verdict(f"{row.shape} {row.name}: output error", f"<= {MAX_ERROR} at <= {MAX_BITS} bits", figure, ok)


if __name__ == "__main__":
    sys.exit(main())
