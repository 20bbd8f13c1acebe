"""Types of the native runtime (runtime/src/bindings*.cpp). Pointers are plain integers: the runtime links no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# ---- the machine -------------------------------------------------------------------------------
def cpu_features() -> list[str]:
    """Feature names as in /proc/cpuinfo that the CPU *and* the OS let a process use (sorted)."""

def amx_permission() -> tuple[bool, str]:
    """Ask once per process for AMX tile state (arch_prctl). Returns (granted, reason)."""

def numa_nodes() -> list[list[int]]:
    """CPUs this process may use, per NUMA node that has any."""

# ---- quantise and pack: bit-identical on every host (built without ISA flags or contraction) -----
def pack_matrix(
    src: int,
    src_dtype: str,  # "fp32" | "bf16" | "fp16"
    rows: NDArray[np.int64],  # source row of each stored row, -1 = a zero row; length n_pad
    k: int,  # valid source columns
    ld: int,  # source elements between rows
    col_stride: int,  # source elements between columns (1 unless the source is transposed)
    data_type: str,
    scale: str,
    group: int,
    out_tiles: int,
    out_scale: int,
    out_mult: int,
) -> int:
    """Quantise W and write its tiles, scales and multipliers. Releases the GIL, single-threaded.

    Returns the flat index (row * k + column, in source rows) of the first NaN or infinity, or -1.
    """

def unpack_matrix(
    tiles: int, scale_ptr: int, mult: int, n_pad: int, k_pad: int, data_type: str, scale: str, group: int, out_f32: int
) -> None:
    """Inverse of pack_matrix: dequantised W [n_pad, k_pad] in stored row order."""

# ---- kernel libraries ---------------------------------------------------------------------------
class KernelLib:
    def __init__(self, path: str | bytes) -> None:
        """dlopen(RTLD_LOCAL), query, check ABI, layout version and CPU features (asks for AMX permission where
        the library needs it). RuntimeError with the reason."""

    variant: str
    source_key: str
    required_features: list[str]
    def kernels(self) -> list[dict[str, object]]:
        """name, format, scale, epilogue, group, k, min_rows of each kernel."""

# ---- threads ------------------------------------------------------------------------------------
class Pool:
    """One pool per process: a list of nodes, each with its pinned workers; the caller's thread works too."""

    def __init__(self, nodes: Sequence[Sequence[int]], pin: bool = True, caller_works: bool = True) -> None:
        """`nodes[i]` = cpu ids of node i; a cpu may appear several times (emulated nodes).

        caller_works: off = every cpu has a worker, and a thread that waits only waits (one that stands for a device).
        """

    threads: int
    nodes: int
    caller_works: bool
    def warnings(self) -> list[str]: ...

# ---- memory -------------------------------------------------------------------------------------
class HugeBuffer:
    """2 MB-aligned anonymous memory with MADV_HUGEPAGE, filled by threads of its node."""

    def __init__(self, nbytes: int, node: int = -1) -> None: ...
    ptr: int
    nbytes: int
    node_id: int
    """The node of /sys/devices/system/node that its pages belong on; -1 = anywhere."""
    def read_file(self, path: str | bytes, file_offset: int, nbytes: int, dst_offset: int, pool: Pool) -> None:
        """Parallel pread by the node's threads. RuntimeError names file and offset."""
    def huge_bytes(self) -> int:
        """Bytes that are really in huge pages (smaps AnonHugePages)."""
    def close(self) -> None: ...

# ---- what the machine can do at most (runtime/src/machine_limits.h) ------------------------------------------
def compute_kinds() -> list[str]:
    """Of amx_int8, amx_bf16, avx512_vnni, avx512_bf16, fp32_fma: those that this process may use."""

def measure_compute(kind: str, cpus: Sequence[int], seconds: float) -> float:
    """Peak operations/s (multiply and add are two) with one pinned thread per cpu."""

class ReadProbe:
    """A touched buffer of 2 MB or of 4 KB pages, to read through."""

    def __init__(self, nbytes: int, huge: bool) -> None: ...
    nbytes: int
    def sample(self, cpus: Sequence[int]) -> float:
        """Bytes/s of reading the next 64 MB per thread, one pinned thread per cpu; goes round the buffer."""

# ---- operators ----------------------------------------------------------------------------------
class Linear:
    """y [M, n] = x [M, k] @ W^T + b on packed tiles; x and y are f32."""

    def __init__(
        self,
        lib: KernelLib,
        pool: Pool,
        n: int,
        k: int,
        data_type: str,
        scale: str,
        group: int,
        tiles: int,
        scale_ptr: int,
        mult: int,
        bias: int,
        force: str = "",  # kernel-name substring to force, e.g. "avx512"
        min_rows: Mapping[str, int] = ...,  # kernel name prefix -> rows from which it is preferred here
    ) -> None: ...
    def forward(self, x: int, ld_x: int, m: int, y: int, ld_y: int) -> None: ...
    def report(self) -> dict[str, object]:
        """kernel names used so far and how often."""

class Moe:
    """The routed experts of one layer: quantise, gate+up+act, down, weighted sum in expert order."""

    def __init__(
        self,
        lib: KernelLib,
        pool: Pool,
        *,
        experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        activation: str,
        alpha: float,
        limit: float,
        data_type: str,
        scale: str,
        group: int,
        splits: Sequence[tuple[int, int]],
        weights: Sequence[Sequence[dict[str, int]]],
        # weights[node][expert] = {gate_up, gate_up_scale, gate_up_mult, gate_up_bias,
        #                          down, down_scale, down_mult, down_bias}:
        # pointers (0 = none); down_bias is present on node 0 only (added once).
        force: str = "",
        scheduling: str = "dynamic",  # or "static"
        min_rows: Mapping[str, int] = ...,  # kernel name prefix -> tokens from which it is preferred here
    ) -> None: ...
    def submit(self, x: int, ld_x: int, tokens: int, ids: int, weights: int, k: int = 0) -> int:
        """Hand over x f32 [T, H], ids i64 [T, k], weights f32 [T, k] (copied before this returns). Returns a ticket.

        k: experts a token of this call, 1 to top_k; 0 = top_k."""
    def collect(self, ticket: int, out: int, ld_out: int) -> None:
        """Wait for that ticket and write out f32 [T, H]. An exception in a worker is raised here."""
    def forward(self, x: int, ld_x: int, tokens: int, ids: int, weights: int, out: int, ld_out: int) -> None: ...
    def scratch_bytes(self, tokens: int) -> int:
        """Scratch of one submitted call: work for at most chunk_tokens tokens, plus staging of all of them."""

    chunk_tokens: int
    """Tokens worked on at once; longer calls go through in chunks, so that scratch is bounded."""
    def report(self) -> dict[str, object]: ...

# ---- the decode graph (runtime/src/graph); use ktc.graph.build.GraphExecutor ----------------------
class DenseScratch:
    """Scratch that the unpacked experts of one executor share."""

class GraphExperts:
    """Unpacked experts of one layer, for `Executor.add`."""

class TableFile:
    """An embedding table that stays in its file, for `Executor.add`; the file is open as long as this object lives."""

    def __init__(self, path: str | bytes, tensor: str, offset: int, dtype: str, rows: int, cols: int) -> None:
        """[rows, cols] of "fp32", "bf16" or "fp16" from `offset` on. RuntimeError names the file: it cannot be opened,
        or ends before the table."""

class Executor:
    """Replays a program: `add` its nodes in order, then `step`. One step at a time."""

    def __init__(
        self,
        pool: Pool | None,
        buffers: Sequence[tuple[str, int]],  # ("T" | "R" | "scratch", bytes of a row)
        states: Sequence[int],  # f32 of each cache
        # (max rows, arena bytes, offset of each buffer; -1 = logits)
        layouts: Sequence[tuple[int, int, Sequence[int]]],
        context: int,
        vocab: int,
        n_deferred: int = -1,
        n_skipped: int = 0,
        trivial: bool = False,
        isa: str = "",
    ) -> None: ...
    def add(
        self,
        op: str,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        states: Sequence[int],
        params: Mapping[str, float],
        weights: Mapping[str, tuple[int, str, int, int]],
        linear: Linear | None = None,
        experts: Moe | GraphExperts | None = None,
        callback: object = None,
        table: TableFile | None = None,  # of an `embed` node without weights
    ) -> None: ...
    def dense_experts(self, scratch: DenseScratch, **options: object) -> GraphExperts: ...
    def step(self, ids: NDArray[np.int64], position: int, decode: bool, logits: NDArray[np.float32]) -> None:
        """IndexError: context full, or an id outside the vocabulary. Worker exceptions are raised here."""
    def set_deferral(self, n_deferred: int, n_skipped: int) -> None:
        """From the next decode step on; n_deferred -1 = as the program says. ValueError: a layer cannot."""
    def profile(self, on: bool) -> None: ...
    def times(self) -> dict[str, tuple[int, int]]:
        """operator -> (nanoseconds, calls) since `profile(True)`."""
    arena_bytes: int
    arena: int
    state_bytes: int
    max_rows: int
    isa: str
    has_bf16: bool

class RoutingCounter:
    """Counts the experts that an executor's steps choose, as long as it lives."""

    def __init__(self, executor: Executor, blocks: Sequence[tuple[int, int, int, int]]) -> None:
        """`blocks`: per MoE layer its moe_submit node, the buffer of its ids, top_k, experts."""
    def counts(self) -> list[list[int]]:
        """Uses of each expert, per block."""

class EmulatedLane:
    """Decode steps whose device takes the time that it is told (runtime/src/emulate.h); see ktc.emulate."""

    def __init__(
        self,
        executor: Executor,
        pool: Pool,  # made with caller_works=False
        # submit node, collect node, buffers of x, weights, ids and y, top_k, hidden
        blocks: Sequence[tuple[int, int, int, int, int, int, int, int]],
    ) -> None: ...
    def set_times(self, times: Sequence[tuple[int, int, int]], tail: int) -> None:
        """ns of the device before submit, until collect and after it, for each block; and after the last block."""
    def record(self, token: int, position: int, logits: NDArray[np.float32]) -> int:
        """One real decode step; returns the number of its record."""
    def replay(self, number: int) -> dict[str, Any]:
        """A recorded step on the clock (ns, monotonic): `blocks` i64 [blocks, 8], `jobs` i64 [jobs, 4], `end`,
        `differing` (blocks whose output is not the recorded one), `lane_cpu` (ns of its own), `realtime`."""
    def time_jobs(self, number: int) -> NDArray[np.int64]:
        """The experts of a recorded step without a timeline: ns of each block, as one job, or as two where the
        executor defers."""
    def forget(self) -> None: ...
    recorded: int

class ops:
    """Single native operators, for tests: runtime/src/ops/bindings_ops.cpp."""

    @staticmethod
    def available() -> list[str]:
        """Instruction sets that they may be forced to here (`KTC_OPS_ISA`)."""

def bf16_attention() -> bool:
    """Whether attention over many rows can be bf16 on this CPU, where a program allows it."""

def graph_scratch(op: str, params: Mapping[str, float], threads: int, rows: int) -> int:
    """Bytes of scratch that an operator needs for steps of up to `rows`."""

# ---- the CUDA lane (runtime/src/cuda); use ktc.cuda.experts.ExpertLane ----------------------------
def cuda_send_layout(hidden: int, top_k: int, rows: int) -> tuple[int, int, int]:
    """Where weights and ids start in a send buffer (x f32 at 0, weights f32, ids i64), and its bytes."""

def view_memory(address: int, shape: Sequence[int], type: str, device: int) -> object:
    """Contiguous memory as a capsule for `torch.from_dlpack`, on CUDA device N or, with -1, on the CPU. `type`: bf16,
    fp16 or fp32. Whoever calls keeps the memory. ValueError: no such type, or no address."""

class CudaLane:
    """The MoE layers of a model beside a CUDA stream. Works with what libcudart the process has; links none."""

    def __init__(self, layers: Sequence[Moe], cudart: str = "", help: bool = False) -> None:
        """RuntimeError: there is no libcudart."""
    cudart: str
    def bind(
        self, layer: int, rows: int, decode: bool, host_send: int, host_receive: int, partial: bool = False
    ) -> int:
        """A handle for visits of `layer` over this staging (pinned; send layout, and f32 [rows, hidden]).

        `partial`: one row, of which experts with the id -1 are left to the device."""
    def submit(self, stream: int, call: int, device_send: int) -> None:
        """Enqueue the copy to the host and the callback that hands the rows to the pool. May be captured."""
    def collect(self, stream: int, call: int, device_out: int) -> None:
        """Enqueue the callback that waits, and the copy to the device, f32 [rows, hidden]. May be captured."""
    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None:
        """Enqueue a copy, either way. May be captured."""
    def synchronize(self, stream: int) -> None: ...
    def split(self, deferred: Sequence[int], skipped: Sequence[int]) -> None:
        """Per layer, for decode steps from now on; the stream must be idle. ValueError: they do not fit."""
    def check(self) -> None:
        """After `synchronize`: RuntimeError with the first worker exception since the last check."""
    def stats(self) -> dict[str, int]:
        """submits, collects, errors, wait_ns (nanoseconds that collects waited)."""
