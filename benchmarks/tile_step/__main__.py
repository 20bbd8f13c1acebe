"""What a step of the AMX kernels is made of, in nanoseconds and clock cycles of one core.

    python -m benchmarks.tile_step [--rows 96,384]

A step is four tile products, which alone take 64 cycles. The kernels' other work is cut out and put back part by part
(tile_step.cpp): storing and loading sums between sweeps, ending rows, unpacking int4, calling later weights. Weights
lie in L2, and for the whole kernel also in DRAM. The clock is taken right after each call: AMX lowers it, and more so
for real operands than for zeros. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ktc.codegen.compiler import find_compiler
from ktc.codegen.paths import data_dir
from ktc.codegen.variants import VARIANTS
from ktc.host import this_host
from ktc.perf.report import table

SOURCE = Path(__file__).with_name("tile_step.cpp")
CYCLES = 64  # of four tile products


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="96,384", help="rows of activations, comma separated, at most 512")
    parser.add_argument("--rounds", type=int, default=21, help="timed turns of every part")
    args = parser.parse_args()
    missing = set(VARIANTS["amx"].required_features) - set(this_host().features)
    if missing:
        print(f"this CPU lacks {', '.join(sorted(missing))}: the AMX kernels do not run here", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "tile_step"
        command = [*find_compiler().command, "-std=c++17", "-O3", "-ffp-contract=off", "-Wno-psabi"]
        command += [*VARIANTS["amx"].machine_flags, f"-I{data_dir('include')}", str(SOURCE), "-o", str(program)]
        if subprocess.run(command).returncode != 0:
            return 1
        done = subprocess.run(
            [program, str(args.rounds), *args.rows.split(",")], check=True, stdout=subprocess.PIPE, text=True
        )
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    print("ns per step of 32 rows (cycles at the clock measured right after)")
    print(_table(figures))
    return 0


def _table(figures: list[dict[str, Any]]) -> str:
    parts = ["tiles", "+sums", "+rows", "+unpack", "all"]
    from_dram = {(f["format"], f["rows"]): f["parts"]["all"] for f in figures if f["weights"] == "DRAM"}
    lines: list[list[str]] = []
    for figure in (f for f in figures if f["weights"] == "L2"):
        times = [*(figure["parts"].get(part) for part in parts), from_dram[figure["format"], figure["rows"]]]
        cells = ["" if time is None else f"{time[0]:.1f} ({time[0] * time[1]:.0f})" for time in times]
        ns, ghz = times[-1]
        lines.append([figure["format"], str(figure["rows"]), *cells, f"{ghz:.2f}", f"{CYCLES / (ns * ghz):.2f}"])
    return table(["kernel", "rows", *parts, "all, DRAM", "GHz", "of peak"], lines)


if __name__ == "__main__":
    sys.exit(main())
