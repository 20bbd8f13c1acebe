"""CPU detection, kernel library loading, pools and weight buffers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import forbidden

_runtime = pytest.importorskip("ktc._runtime")
HUGE = 2 << 20


def test_s14_features_agree_with_the_kernel() -> None:
    """failures.md S14: what we claim must be usable; /proc/cpuinfo is the kernel's view of the same thing."""
    features = _runtime.cpu_features()
    assert features == sorted(features) and "sse2" in features
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    assert set(features) <= set(lines[0].split(":")[1].split())
    granted, reason = _runtime.amx_permission()
    assert granted == ("amx_tile" in features) and reason
    assert _runtime.amx_permission() == (granted, reason)


def test_numa_nodes_hold_the_usable_cpus() -> None:
    cpus = [cpu for node in _runtime.numa_nodes() for cpu in node]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


# ---- kernel libraries -----------------------------------------------------------------------------


def test_library_attributes(reference_lib: Any) -> None:
    assert (reference_lib.variant, reference_lib.source_key) == ("reference", "0")
    assert reference_lib.required_features == ["sse2"]
    first = reference_lib.kernels()[0]
    assert first == {
        "name": "reference_few",
        "format": "fp32",
        "scale": "none",
        "epilogue": "store",
        "group": 0,
        "k": 0,
        "min_rows": 0,
    }


STUB = """
#include "ktc/abi.h"
static int gemm(const ktc_gemm_args *) { return KTC_OK; }
static int quantize(const ktc_quant_args *) { return KTC_OK; }
static const ktc_gemm_kernel kernel = {sizeof(ktc_gemm_kernel), 0, 0, 0, 0, 0, 0, 0, &gemm, &quantize, "stub"};
static const ktc_kernel_lib lib = {sizeof(ktc_kernel_lib), ABI, LAYOUT, COUNT, &kernel, "stub", NEEDS, "", 0, 0};
extern "C" const ktc_kernel_lib *NAME(uint32_t) { return ANSWER; }
"""


@pytest.mark.parametrize(
    "change,message",
    [
        ({"NAME": "other"}, "does not export ktc_kernel_query"),
        ({"ANSWER": "nullptr"}, "does not support kernel ABI 1"),
        ({"ABI": "2"}, "has kernel ABI 2"),
        ({"LAYOUT": "7"}, "reads tile layout 7"),
        ({"COUNT": "0"}, "holds no kernels"),
        ({"NEEDS": '"sse2 avx1024"'}, "needs the CPU feature avx1024"),
    ],
)
def test_i4_s14_wrong_library_is_refused(
    tmp_path: Path, compile_lib: Callable[..., Path], change: dict[str, str], message: str
) -> None:
    """failures.md I4: a versioned ABI, checked before use. S14: nothing that the CPU lacks is ever run."""
    source = tmp_path / "stub.cpp"
    source.write_text(STUB)
    macros = {
        "NAME": "ktc_kernel_query",
        "ANSWER": "&lib",
        "ABI": "1",
        "LAYOUT": "1",
        "COUNT": "1",
        "NEEDS": '""',
        **change,
    }
    flags = [f"-D{k}={v}" for k, v in macros.items()]
    path = compile_lib(source, f"stub-{'-'.join(change)}", "-Wno-unused-variable", *flags)
    with pytest.raises(RuntimeError, match=message) as caught:
        _runtime.KernelLib(str(path))
    assert str(path) in str(caught.value)


def test_not_a_library(tmp_path: Path) -> None:
    path = tmp_path / "libbad.so"
    path.write_bytes(b"not ELF")
    for name in (path, tmp_path / "missing.so"):
        with pytest.raises(RuntimeError, match=str(name)):
            _runtime.KernelLib(str(name))


# ---- pools ----------------------------------------------------------------------------------------


def test_pool_shape_and_bad_cpus() -> None:
    """A CPU that cannot be pinned to is a warning."""
    pool = _runtime.Pool([[0, 1], [0, 4000, -1]])
    assert (pool.threads, pool.nodes) == (5, 2)
    assert [w for w in pool.warnings() if "4000" in w] and [w for w in pool.warnings() if "-1" in w]
    for nodes in ([], [[0], []]):
        with pytest.raises(ValueError, match=r"at least one node|has no CPUs"):
            _runtime.Pool(nodes)


# ---- weight buffers -------------------------------------------------------------------------------


def contents(buffer: Any) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_char * buffer.nbytes).from_address(buffer.ptr), np.uint8)


@pytest.mark.parametrize("node", [-1, 0, 1, 2])
@pytest.mark.parametrize("nodes", [[[0]], [[0, 1]], [[0], [1], [0]]])
def test_m5_read_file(tmp_path: Path, nodes: list[list[int]], node: int) -> None:
    """failures.md M5: the node's own threads fill the memory; odd offsets, whole file, more nodes than the machine."""
    pool = _runtime.Pool(nodes, pin=False)
    data = np.random.default_rng(0).integers(0, 256, 20_000_003, np.uint8)
    path = tmp_path / "weights.bin"
    data.tofile(path)
    buffer = _runtime.HugeBuffer(21_000_000, node)
    assert buffer.ptr % HUGE == 0 and buffer.nbytes == 21_000_000
    buffer.read_file(str(path), 0, len(data), 64, pool)
    assert np.array_equal(contents(buffer)[64 : 64 + len(data)], data)
    assert not contents(buffer)[:64].any() and not contents(buffer)[64 + len(data) :].any()
    buffer.read_file(str(path), 12_345, 9_000_000, 5, pool)
    assert np.array_equal(contents(buffer)[5 : 5 + 9_000_000], data[12_345 : 12_345 + 9_000_000])
    buffer.read_file(str(path), 7, 0, 0, pool)
    buffer.close()
    buffer.close()
    assert buffer.nbytes == 0 and buffer.ptr == 0


UNCACHED = """
import os, sys
import numpy as np
from ktc import _runtime
from tests.forbidden import forbid
from tests.runtime.test_machine import contents

if sys.argv[2:]:
    forbid(*map(int, sys.argv[2:]))
data = np.random.default_rng(1).integers(0, 256, 30_000_000, np.uint8)
with open(sys.argv[1], "wb") as stream:
    data.tofile(stream)
    stream.flush()
    os.fsync(stream.fileno())
    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
pool = _runtime.Pool([[0, 0, 0]], pin=False)
buffer = _runtime.HugeBuffer(40_000_000)
buffer.read_file(sys.argv[1], 4096, 29_000_000, 8192, pool)  # past the page cache; the last piece is no whole page
assert np.array_equal(contents(buffer)[8192 : 8192 + 29_000_000], data[4096 : 4096 + 29_000_000])
assert not contents(buffer)[:8192].any() and not contents(buffer)[8192 + 29_000_000 :].any()
try:
    buffer.read_file(sys.argv[1], 8192, 30_000_000, 0, pool)
except RuntimeError as error:
    assert "file ends too early at offset 30000000" in str(error), error
else:
    raise AssertionError("read beyond the end of the file")
if not sys.argv[2:] and os.fork() == 0:  # a child has the pool's memory but not its threads' contexts
    pool = _runtime.Pool([[0]], pin=False)
    again = _runtime.HugeBuffer(8_000_000)
    again.read_file(sys.argv[1], 0, 8_000_000, 0, pool)
    os._exit(0 if np.array_equal(contents(again), data[:8_000_000]) else 7)
if not sys.argv[2:]:
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


@pytest.mark.parametrize(
    "forbid",
    [(), forbidden.ASYNCHRONOUS_READS, forbidden.COLLECTING_READS],
    ids=["asynchronous", "forbidden", "half forbidden"],
)
def test_reads_past_the_page_cache(tmp_path: Path, forbid: tuple[int, ...]) -> None:
    """Weights are read straight into their memory, also where a container forbids io_setup."""
    if forbid and not forbidden.works():
        pytest.skip("no seccomp filters here")
    command = [sys.executable, "-c", UNCACHED, str(tmp_path / "weights.bin"), *map(str, forbid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_c8_read_errors_name_file_and_offset(tmp_path: Path, pool: Any) -> None:
    """failures.md C8: a truncated shard."""
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(9_000_000))
    buffer = _runtime.HugeBuffer(30_000_000)
    with pytest.raises(RuntimeError, match=r"short\.bin: file ends too early at offset 9000000"):
        buffer.read_file(str(path), 100, 20_000_000, 0, pool)
    with pytest.raises(RuntimeError, match=r"gone\.bin: cannot open: No such file"):
        buffer.read_file(str(tmp_path / "gone.bin"), 0, 10, 0, pool)
    with pytest.raises(RuntimeError, match="Is a directory"):
        buffer.read_file(str(tmp_path), 0, 10, 0, pool)
    for nbytes, at in ((30_000_001, 0), (1, 30_000_000), (-1, 0), (5, -1)):
        with pytest.raises(ValueError, match="does not fit"):
            buffer.read_file(str(path), 0, nbytes, at, pool)


def test_huge_pages(tmp_path: Path, pool: Any) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no transparent huge pages here")
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(16 * HUGE))
    buffer = _runtime.HugeBuffer(16 * HUGE)
    assert buffer.huge_bytes() == 0
    buffer.read_file(str(path), 0, 16 * HUGE, 0, pool)
    assert 0 < buffer.huge_bytes() <= 16 * HUGE
