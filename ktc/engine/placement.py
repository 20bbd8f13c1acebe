"""Where the kernel put the pages of weights: /proc/self/numa_maps, read and added up (failures M4, M5).

Only a machine with more than one NUMA node has anything to check. Binding is the runtime's (huge_buffer.cpp).
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktc.progress import format_bytes

NUMA_MAPS = Path("/proc/self/numa_maps")
MOSTLY = 0.99
"""Share of a node's weights that must lie in its own memory; the kernel may put single pages elsewhere."""


@dataclass(frozen=True)
class PageRange:
    """One line of numa_maps: a range of the address space from `start` to the next line's.

    Attributes:
        nbytes: node id -> bytes that lie there.
    """

    start: int
    nbytes: dict[int, int]


@dataclass(frozen=True)
class NodePlacement:
    """Memory that belongs on one node: its bytes, and how many of them lie there."""

    node: int
    nbytes: int
    local: int

    @property
    def share(self) -> float:
        return self.local / self.nbytes if self.nbytes else 1.0

    def line(self) -> str:
        return f"{self.share:.0%} of {format_bytes(self.nbytes)} of node {self.node} in its own memory"


def parse_numa_maps(text: str) -> list[PageRange]:
    """Lines such as `7f0000000000 bind:1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4`, by address."""
    ranges = []
    for line in text.splitlines():
        start, *fields = line.split() or [""]
        pages, unit = {}, 4096
        for field in fields:
            name, _, value = field.partition("=")
            if name == "kernelpagesize_kB":
                unit = int(value) * 1024
            elif name[:1] == "N" and name[1:].isdigit():
                pages[int(name[1:])] = int(value)
        if start:
            ranges.append(PageRange(int(start, 16), {node: count * unit for node, count in pages.items()}))
    return sorted(ranges, key=lambda r: r.start)


def placement(ranges: list[PageRange], wanted: Iterable[tuple[int, int, int]]) -> list[NodePlacement]:
    """How much of each node's weights lies in its memory.

    Args:
        ranges: of `parse_numa_maps`; what a buffer shares its range with counts with it, once.
        wanted: (address, bytes, node id) of every buffer that belongs on a node.
    """
    starts = [r.start for r in ranges]
    held: dict[int, set[int]] = {}  # node -> indices of ranges
    for address, nbytes, node in wanted:
        first = max(0, bisect_right(starts, address) - 1)
        held.setdefault(node, set()).update(range(first, bisect_right(starts, address + nbytes - 1)))
    found = []
    for node, indices in sorted(held.items()):
        inside = [ranges[i].nbytes for i in indices]
        found.append(NodePlacement(node, sum(sum(n.values()) for n in inside), sum(n.get(node, 0) for n in inside)))
    return found


def check(buffers: Iterable[Any]) -> list[NodePlacement]:
    """Of filled `_runtime.HugeBuffer`s; empty where none belongs on a node, or where the kernel does not say."""
    wanted = [(b.ptr, b.nbytes, b.node_id) for b in buffers if b.node_id >= 0]
    if not wanted:
        return []
    try:
        return placement(parse_numa_maps(NUMA_MAPS.read_text()), wanted)
    except OSError:
        return []


def misplaced(found: Iterable[NodePlacement]) -> list[str]:
    """A sentence for each node whose weights are elsewhere: it reads them over the link between the sockets."""
    return [f"only {p.line()}" for p in found if p.share < MOSTLY]


def trial(nodes: int, nbytes: int = 4 << 20) -> list[NodePlacement]:
    """Whether memory can be bound here: a little is touched for each node. Empty on a machine of one node."""
    from ktc import _runtime

    buffers = [_runtime.HugeBuffer(nbytes, node) for node in range(nodes)]
    for buffer in buffers:
        ctypes.memset(buffer.ptr, 1, buffer.nbytes)
    return check(buffers)
