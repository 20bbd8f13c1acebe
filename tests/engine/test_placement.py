"""Where pages lie, out of numa_maps: the text that a kernel with two nodes prints, and this machine's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktc import _runtime
from ktc.engine.placement import NUMA_MAPS, NodePlacement, check, misplaced, parse_numa_maps, placement

MIB = 1 << 20
TWO_NODES = """\
00400000 default file=/usr/bin/python3.11 mapped=702 mapmax=9 N0=300 N1=402 kernelpagesize_kB=4
01b51000 default heap anon=3000 dirty=3000 active=0 N0=2999 N1=1 kernelpagesize_kB=4
2aaaaac00000 interleave:0-1 file=/anon_hugepage\\040(deleted) huge anon=8 dirty=8 N0=3 N1=5 kernelpagesize_kB=2048
7f0000000000 bind:0 anon=2048 dirty=2048 active=0 N0=2048 kernelpagesize_kB=4
7f0000800000 default
7f0000a00000 bind:1 anon=1024 dirty=1024 active=0 N0=256 N1=768 kernelpagesize_kB=4
7f0001000000 bind:1 anon=1024 dirty=1024 N1=1024 kernelpagesize_kB=4
7ffd0e000000 default stack anon=12 dirty=12 N1=12 kernelpagesize_kB=4
"""


def test_lines_of_a_machine_with_two_nodes() -> None:
    ranges = parse_numa_maps(TWO_NODES)
    assert [r.start for r in ranges[:3]] == [0x400000, 0x1B51000, 0x2AAAAAC00000]
    assert ranges[0].nbytes == {0: 300 * 4096, 1: 402 * 4096}
    assert ranges[2].nbytes == {0: 6 * MIB, 1: 10 * MIB}  # pages of 2 MB
    assert ranges[4].nbytes == {}
    assert parse_numa_maps("") == []


def test_bytes_are_counted_per_node() -> None:
    ranges = parse_numa_maps(TWO_NODES)
    wanted = [(0x7F0000000000, 8 * MIB, 0), (0x7F0000A00000, 4 * MIB, 1), (0x7F0001000000, 4 * MIB, 1)]
    found = placement(ranges, wanted)
    assert found == [NodePlacement(0, 8 * MIB, 8 * MIB), NodePlacement(1, 8 * MIB, 7 * MIB)]
    assert [p.share for p in found] == [1.0, 0.875]
    assert misplaced(found) == ["only 88% of 8.00 MiB of node 1 in its own memory"]
    assert misplaced([NodePlacement(0, 1000, 991), NodePlacement(1, 0, 0)]) == []


def test_buffers_that_share_a_range_count_once() -> None:
    ranges = parse_numa_maps(TWO_NODES)
    halves = [(0x7F0001000000, 2 * MIB, 1), (0x7F0001200000, 2 * MIB, 1)]  # the second begins inside the range
    assert placement(ranges, halves) == [NodePlacement(1, 4 * MIB, 4 * MIB)]


def test_memory_of_no_node_is_not_checked() -> None:
    assert check([_runtime.HugeBuffer(MIB)]) == []


def test_m5_pages_lie_on_their_node(tmp_path: Path) -> None:
    """failures.md M5: on a machine that has several nodes, for each of them."""
    nodes = _runtime.numa_nodes()
    if len(nodes) < 2 or not NUMA_MAPS.exists():
        pytest.skip("this machine has one NUMA node")
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * (16 * MIB // 256))
    pool = _runtime.Pool(nodes)
    buffers = [_runtime.HugeBuffer(16 * MIB, node) for node in range(len(nodes))]
    for buffer in buffers:
        buffer.read_file(str(tmp_path / "weights.bin"), 0, 16 * MIB, 0, pool)
    if any("cannot bind" in warning for warning in pool.warnings()):
        pytest.skip("binding memory is forbidden here")
    found = check(buffers)
    assert [p.nbytes for p in found] == [16 * MIB] * len(nodes) and misplaced(found) == []
