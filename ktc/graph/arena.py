"""Gives every buffer a place in one arena by liveness, for a given number of rows.

A buffer lives from the node that writes it to the last that reads it; buffers whose lives do not overlap
may share bytes. The executor has one layout for decode (few bytes, stays in the cache) and one for a
prefill chunk; the largest is the whole scratch of a run, whatever the prompt's length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ktc.graph.ir import LOGITS, Program
from ktc.layout import round_up

ALIGN = 64
ScratchSize = Callable[[str, dict[str, float], int, int], int]
"""(operator, params, threads, rows) -> bytes; `_runtime.graph_scratch`."""


@dataclass(frozen=True)
class ArenaLayout:
    """Offsets in bytes by buffer id; -1 is the caller's logits."""

    max_rows: int
    nbytes: int
    offsets: tuple[int, ...]


def lifetimes(program: Program) -> dict[int, tuple[int, int]]:
    """Buffer id -> (node that writes it, last node that touches it)."""
    lives: dict[int, tuple[int, int]] = {}
    for index, node in enumerate(program.nodes):
        for b in node.outputs:
            lives[b] = (index, index)
        for b in node.inputs:
            lives[b] = (lives[b][0], index)
    return lives


def plan_arena(program: Program, max_rows: int, threads: int, scratch: ScratchSize) -> ArenaLayout:
    """First fit, largest first: buffers that are alive together never overlap."""
    sizes: dict[int, int] = {}
    for buffer in program.buffers:
        if buffer.rows != "scratch" and buffer.name != LOGITS:
            sizes[buffer.id] = max_rows * buffer.row_bytes
    for node in program.nodes:
        for b in node.outputs:
            if program.buffers[b].rows == "scratch":
                sizes[b] = scratch(node.op, node.params, threads, max_rows)
    lives = lifetimes(program)
    offsets = [-1] * len(program.buffers)
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    total = 0
    for b in sorted(sizes, key=lambda i: (-sizes[i], i)):
        first, last = lives[b]
        size = round_up(max(sizes[b], 1), ALIGN)
        at = 0
        for begin, end, other_first, other_last in sorted(placed):
            if other_last < first or last < other_first:
                continue
            if begin - at >= size:
                break
            at = max(at, end)
        offsets[b] = at
        placed.append((at, at + size, first, last))
        total = max(total, at + size)
    return ArenaLayout(max_rows, total, tuple(offsets))
