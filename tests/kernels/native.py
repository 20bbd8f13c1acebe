"""Drive a kernel library through ctypes: abi.h in Python, without the runtime."""

from __future__ import annotations

import ctypes as C
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktc.layout import ABI_VERSION, STEP_K, QuantScheme, round_up
from tests.kernels.reference import Array, Weights, groups_of

FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
SCALES = {"none": 0, "channel": 1, "group": 2, "integer": 3, "codebook": 4}
EPILOGUES = {"store": 0, "scatter_add": 1, "silu_mul": 2, "silu_clamp": 3, "swiglu_oai": 4}
ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 0x1023, 18


class Act(C.Structure):
    _fields_ = (("tiles", C.c_void_p), ("scale", C.c_void_p), ("sums", C.c_void_p))


class Weight(C.Structure):
    _fields_ = (("tiles", C.c_void_p), ("scale", C.c_void_p), ("mult", C.c_void_p), ("bias", C.c_void_p))


class GemmArgs(C.Structure):
    _fields_ = (
        ("struct_size", C.c_uint32), ("flags", C.c_uint32), ("k", C.c_int64),
        ("m_begin", C.c_int64), ("m_end", C.c_int64), ("block_begin", C.c_int64), ("block_end", C.c_int64),
        ("n_out", C.c_int64), ("act", Act), ("weight", Weight), ("out", C.c_void_p), ("ld_out", C.c_int64),
        ("row_index", C.c_void_p), ("row_weight", C.c_void_p), ("row_amax", C.c_void_p),
        ("act_alpha", C.c_float), ("act_limit", C.c_float), ("scratch", C.c_void_p),
    )  # fmt: skip


class QuantArgs(C.Structure):
    _fields_ = (
        ("struct_size", C.c_uint32), ("flags", C.c_uint32), ("k_valid", C.c_int64), ("k", C.c_int64),
        ("m_begin", C.c_int64), ("m_end", C.c_int64), ("x", C.c_void_p), ("ld_x", C.c_int64),
        ("dst_row", C.c_void_p), ("copies", C.c_int64), ("amax", C.c_void_p), ("act", Act),
    )  # fmt: skip


class KernelStruct(C.Structure):
    _fields_ = (
        ("struct_size", C.c_uint32), ("format", C.c_int32), ("scale", C.c_int32), ("epilogue", C.c_int32),
        ("group", C.c_int32), ("min_rows", C.c_int32), ("k", C.c_int64), ("scratch_bytes", C.c_int64),
        ("gemm", C.CFUNCTYPE(C.c_int, C.POINTER(GemmArgs))), ("quantize", C.CFUNCTYPE(C.c_int, C.POINTER(QuantArgs))),
        ("name", C.c_char_p),
    )  # fmt: skip


class LibStruct(C.Structure):
    _fields_ = (
        ("struct_size", C.c_uint32), ("abi_version", C.c_uint32), ("layout_version", C.c_uint32),
        ("kernel_count", C.c_uint32), ("kernels", C.POINTER(KernelStruct)), ("variant", C.c_char_p),
        ("required_features", C.c_char_p), ("source_key", C.c_char_p),
        ("thread_init", C.c_void_p), ("thread_fini", C.c_void_p),
    )  # fmt: skip


def cpu_features() -> set[str]:
    """Of /proc/cpuinfo; AMX only if the kernel grants tile data to this process."""
    text = Path("/proc/cpuinfo").read_text()
    features = set(next(line for line in text.splitlines() if line.startswith("flags")).split(":")[1].split())
    if "amx_tile" in features:
        libc = C.CDLL(None, use_errno=True)
        if libc.syscall(158, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0:
            features -= {"amx_tile", "amx_int8", "amx_bf16"}
    return features


def guarded(nbytes: int, fill: int = 0) -> NDArray[np.uint8]:
    """Bytes that end where the address space does: one byte past them is an unmapped page.

    64-byte aligned when `nbytes` is a multiple of 64. A kernel that reads or writes past its operands dies here.
    """
    size = round_up(max(nbytes, 1), mmap.PAGESIZE)
    space = mmap.mmap(-1, size + mmap.PAGESIZE)
    whole = np.frombuffer(space, np.uint8)
    whole[:size] = fill
    if C.CDLL(None).mprotect(C.c_void_p(whole.ctypes.data + size), C.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise OSError("mprotect failed")
    return whole[size - nbytes : size]


def ptr(a: Array | None) -> int | None:
    return None if a is None else a.ctypes.data


def guarded_copy(a: Array | None) -> NDArray[np.uint8] | None:
    if a is None:
        return None
    out = guarded(a.nbytes)
    out[:] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    return out


@dataclass
class Packed:
    """Packed activations of `rows` rows: the arrays behind a ktc_act."""

    scheme: QuantScheme
    rows: int
    k_pad: int
    tiles: NDArray[np.uint8] = field(init=False)
    scale: NDArray[np.float32] = field(init=False)
    sums: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        steps = self.k_pad // STEP_K[self.scheme.data_type]
        # Everything a kernel must not read is poison: 0x7f bytes are huge numbers or NaNs.
        self.tiles = guarded(round_up(self.rows, 16) // 16 * steps * 1024, 0xFF)
        self.scale = guarded(4 * self.rows, 0xFF).view(np.float32)
        groups = groups_of(self.scheme, self.k_pad)
        self.sums = guarded(4 * self.rows * groups, 0x3F).view(np.int32).reshape(self.rows, groups)

    @property
    def struct(self) -> Act:
        return Act(ptr(self.tiles), ptr(self.scale), ptr(self.sums))


class Kernel:
    """One row of a library's table."""

    def __init__(self, struct: KernelStruct) -> None:
        self.struct = struct
        self.name: str = struct.name.decode()

    def quantize_raw(self, args: QuantArgs) -> int:
        return int(self.struct.quantize(C.byref(args)))

    def gemm_raw(self, args: GemmArgs) -> int:
        return int(self.struct.gemm(C.byref(args)))

    def quantize(
        self,
        x: Array,
        scheme: QuantScheme,
        *,
        dst_row: Array | None = None,
        copies: int = 1,
        amax: Array | None = None,
        rows: int | None = None,
    ) -> Packed:
        """x [M, K] -> packed rows; `rows` of the destination (default M * copies)."""
        m, k = x.shape
        source = guarded(4 * x.size).view(np.float32).reshape(x.shape)
        source[:] = x
        x = source
        packed = Packed(scheme, m * copies if rows is None else rows, round_up(k, 64))
        amax = None if amax is None else np.ascontiguousarray(amax, np.float32)
        dst_row = None if dst_row is None else np.ascontiguousarray(dst_row, np.int64)
        args = QuantArgs(
            struct_size=C.sizeof(QuantArgs), k_valid=k, k=packed.k_pad, m_begin=0, m_end=m, x=ptr(x), ld_x=k,
            dst_row=ptr(dst_row), copies=copies, amax=ptr(amax), act=packed.struct,
        )  # fmt: skip
        assert self.quantize_raw(args) == 0
        return packed

    def gemm(
        self,
        act: Packed,
        w: Weights,
        out: NDArray[np.float32],
        *,
        rows: tuple[int, int] | None = None,
        blocks: tuple[int, int] | None = None,
        n_out: int | None = None,
        bias: NDArray[np.float32] | None = None,
        row_index: NDArray[np.int64] | None = None,
        row_weight: NDArray[np.float32] | None = None,
        row_amax: NDArray[np.float32] | None = None,
        alpha: float = 0.0,
        limit: float = 0.0,
    ) -> None:
        """out [rows, ld_out] is written in place; defaults: all rows, all blocks, n_out = w.n (w.n / 2 if gated)."""
        layout = w.layout
        gated = self.struct.epilogue >= 2
        tiles, scale, mult = guarded_copy(w.tiles), guarded_copy(w.scale), guarded_copy(w.mult)
        bias = None if bias is None else guarded_copy(bias).view(np.float32)  # type: ignore[union-attr]
        scratch = guarded(int(self.struct.scratch_bytes), 0xFF)
        m_begin, m_end = rows or (0, act.rows)
        first, last = blocks or (0, layout.blocks)
        args = GemmArgs(
            struct_size=C.sizeof(GemmArgs), k=layout.k_pad, m_begin=m_begin, m_end=m_end,
            block_begin=first, block_end=last, n_out=(w.n // (2 if gated else 1)) if n_out is None else n_out,
            act=act.struct, weight=Weight(ptr(tiles), ptr(scale), ptr(mult), ptr(bias)),
            out=ptr(out), ld_out=out.shape[1], row_index=ptr(row_index), row_weight=ptr(row_weight),
            row_amax=ptr(row_amax), act_alpha=alpha, act_limit=limit, scratch=ptr(scratch),
        )  # fmt: skip
        assert self.gemm_raw(args) == 0


class KernelLibrary:
    """A dlopened library; `thread_init` runs for the calling thread."""

    def __init__(self, path: Path) -> None:
        self.dll = C.CDLL(str(path))
        query = self.dll.ktc_kernel_query
        query.restype = C.POINTER(LibStruct)
        query.argtypes = (C.c_uint32,)
        self.query = query
        self.lib: LibStruct = query(ABI_VERSION).contents
        self.variant: str = self.lib.variant.decode()
        self.kernels = [Kernel(self.lib.kernels[i]) for i in range(self.lib.kernel_count)]
        if self.lib.thread_init:
            assert C.CFUNCTYPE(C.c_int)(self.lib.thread_init)() == 0

    def find(self, scheme: QuantScheme, epilogue: str, k: int = 0, label: str = "") -> list[Kernel]:
        """Kernels of this scheme and epilogue; `label` is the part of the name before the colon."""
        want = (FORMATS[scheme.data_type], SCALES[scheme.scale], scheme.group, EPILOGUES[epilogue], k)
        return [
            kernel
            for kernel in self.kernels
            if (kernel.struct.format, kernel.struct.scale, kernel.struct.group, kernel.struct.epilogue, kernel.struct.k)
            == want
            and kernel.name.startswith(label)
        ]
