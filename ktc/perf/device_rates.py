"""What a GPU and its link reach, as a hardware profile's `device`, `link` and `host` say it.

Written for CUDA and run only where there is one; the tests run the same code on torch's CPU device, where the figures
mean nothing. A rate is the median of a few samples over buffers that no cache holds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ktc.perf.machine_profile import TimedKernels

SAMPLES = 7
STREAM_BYTES = 1 << 30
LINK_BYTES = 64 << 20
TINY = 200
"""Kernels in the graph, copies in the queue, and visits whose mean is the time of one."""
_VECTOR = (7168, 2048)  # of the matrix times vector: a linear as models have them
_MATRIX = 8192
_GEMM = (1024, 7168, 2048)  # tokens, in, out


def first_gpu(kernels: TimedKernels, say: Callable[[str], None]) -> tuple[dict[str, Any] | None, str]:
    """`device`, `link` and `host` of cuda:0, or None and why not."""
    try:
        import torch
    except ImportError:
        return None, "There is a GPU, but torch is not installed to measure it: device cpu."
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None, "There is a GPU, but this torch cannot use it: device cpu."
    device = torch.device("cuda:0")
    with torch.inference_mode(), torch.cuda.device(device):
        found = rates(device, say)
        submit, sync = callback_us(kernels, device, found["link"]["latency_us"])
    found["device"] |= {
        "name": torch.cuda.get_device_name(device),
        "memory_gb": round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1),
    }
    found["host"] = {"submit_us": submit, "sync_us": sync}
    return found, f"{found['device']['name']}: rates are what torch's kernels reach, not a data sheet's."


def rates(
    device: torch.device,
    say: Callable[[str], None] = lambda _: None,
    *,
    stream_bytes: int = STREAM_BYTES,
    link_bytes: int = LINK_BYTES,
    matrix: int = _MATRIX,
) -> dict[str, Any]:
    """`device` (but for its name and memory) and `link`."""
    say("memory of the device")
    stream, vector = _memory(device, stream_bytes)
    say("arithmetic of the device")
    peak, gemm = _arithmetic(device, matrix)
    say("kernels and link")
    link, latency = _link(device, link_bytes)
    return {
        "device": {
            "kind": "cuda",
            "hbm_gbs": _round(stream / 1e9),
            "hbm_fraction": min(1.0, _round(vector / stream)),
            "peak_tflops": _round(peak / 1e12),
            "compute_fraction": min(1.0, _round(gemm / peak)),
            "kernel_us": _round(_kernel(device) * 1e6),
        },
        "link": {"gbs": _round(link / 1e9), "latency_us": _round(latency * 1e6)},
    }


def _memory(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Bytes/s of a copy (read and write), and of matrix times vector over matrices that no cache holds."""
    import torch

    source = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    rows, columns = _VECTOR
    bank = source[: nbytes // (2 * rows * columns) * rows * columns].view(-1, rows, columns)
    x = torch.ones(columns, dtype=torch.bfloat16, device=device)
    copied = seconds(device, lambda: target.copy_(source))
    read = seconds(device, lambda: [torch.mv(matrix, x) for matrix in bank])
    return 2 * nbytes / copied, 2 * bank.numel() / read


def _arithmetic(device: torch.device, size: int) -> tuple[float, float]:
    """bf16 operations/s of a large square product, and of a prompt's product."""
    import torch

    square = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    tokens, k, n = (min(d, size) for d in _GEMM)
    large = seconds(device, lambda: square @ square)
    prompt = seconds(device, lambda: square[:tokens, :k] @ square[:k, :n])
    return 2 * size**3 / large, 2 * tokens * k * n / prompt


def _kernel(device: torch.device) -> float:
    """Seconds of the smallest kernel inside a replayed graph."""
    import torch

    tiny = torch.ones(16, device=device)
    return seconds(device, replay(device, lambda: [tiny.add_(1) for _ in range(TINY)])) / TINY


def _link(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Bytes/s of a large copy from pinned memory, and seconds of a small one."""
    import torch

    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    large = seconds(device, lambda: there.copy_(pinned, non_blocking=True))
    small = seconds(device, lambda: [there[:64].copy_(pinned[:64], non_blocking=True) for _ in range(TINY)])
    return nbytes / large, small / TINY


def callback_us(
    kernels: TimedKernels, device: torch.device, latency_us: float, cudart: str = ""
) -> tuple[float, float]:
    """Microseconds of a submit and of a sync callback: what a visit of a layer takes beyond its experts and two copies.

    The two cannot be told apart from outside, so each gets half.
    """
    import torch

    from ktc import _runtime

    moe = kernels.contestant._moes[0]
    shape = kernels.contestant.weights.shape
    lane = _runtime.CudaLane([moe], cudart)
    weights_at, ids_at, nbytes = _runtime.cuda_send_layout(shape.hidden, shape.top_k, 1)
    cuda = device.type == "cuda"
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda)
    received = torch.zeros(shape.hidden, pin_memory=cuda)
    send = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    send[ids_at:].view(torch.int64)[:] = torch.arange(shape.top_k)
    send[weights_at : weights_at + 4 * shape.top_k].view(torch.float32)[:] = 1 / shape.top_k
    out = torch.zeros(shape.hidden, device=device)
    call = lane.bind(0, 1, False, host.data_ptr(), received.data_ptr())
    stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0

    def visits() -> None:
        for _ in range(TINY):
            lane.submit(stream, call, send.data_ptr())
            lane.collect(stream, call, out.data_ptr())
        lane.synchronize(stream)
        lane.check()

    began = time.perf_counter()
    x = torch.zeros(shape.hidden)
    ids, mixed = torch.arange(shape.top_k), torch.full((shape.top_k,), 1 / shape.top_k)
    for _ in range(TINY):  # the same experts without callbacks: warm, as in the visits
        moe.forward(x.data_ptr(), shape.hidden, 1, ids.data_ptr(), mixed.data_ptr(), received.data_ptr(), shape.hidden)
    experts = (time.perf_counter() - began) / TINY
    visits()
    began = time.perf_counter()
    visits()
    visit = (time.perf_counter() - began) / TINY
    each = _round(max(0.0, (visit - experts) * 1e6 - 2 * latency_us) / 2)
    return each, each


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Median seconds of `work` on the device's stream, after one call to warm up."""
    import torch

    work()
    samples: list[float] = []
    for _ in range(SAMPLES):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            work()
            samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def replay(device: torch.device, work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` as a captured graph; on another device `work` itself."""
    import torch

    if device.type != "cuda":
        return work
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _round(value: float) -> float:
    return float(f"{value:.4g}")
