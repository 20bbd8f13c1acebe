"""Profiles made from measurements: a device that is slower in proportion, and the machine as it was measured.

The first makes CPU and device shares what they are elsewhere (the paper's 74 : 28); the second is what `ktc simulate`
is asked, to compare its answer with the emulated lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktc.errors import UsageError
from ktc.plan.ir import Plan
from ktc.simulate.hardware import UNBOUNDED, Cpu, Hardware, Host, Kernels, Link

MEASURED = "measured"


def parse_shares(text: str) -> tuple[float, float]:
    """ "74:28" -> (74.0, 28.0), CPU and device.

    Raises:
        UsageError: something else.
    """
    parts = text.split(":")
    try:
        cpu, device = (float(p) for p in parts)
    except ValueError:
        cpu = device = 0.0
    if not (0 < cpu <= 1000 and 0 < device <= 1000):
        raise UsageError(f"shares {text!r} are not CPU:DEVICE", "for example --shares 74:28, the paper's")
    return cpu, device


def slower_device(hardware: Hardware, factor: float) -> Hardware:
    """Device and link take `factor` times as long for everything (less than 1: faster). Callbacks are not changed."""
    device, link = hardware.device, hardware.link
    return replace(
        hardware,
        device=replace(
            device,
            memory_rate=device.memory_rate / factor,
            peak=device.peak / factor,
            kernel_time=device.kernel_time * factor,
        ),
        link=Link(link.rate / factor, link.latency * factor),
    )


def as_measured(
    hardware: Hardware,
    plan: Plan,
    layer_seconds: float,
    submit: float,
    sync: float,
    job: float = 0.0,
    start: float = 0.0,
    cores: int = 1,
) -> Hardware:
    """The emulated machine as a profile: `hardware`'s device, and measured experts and callbacks.

    Args:
        layer_seconds: of all routed experts of one layer, one token, in one job that finds the pool idle; every layer
            takes as long as its bytes ask.
        job: seconds of it that are the job's own, which a second one adds; start: those that a job behind another
            does without. Experts take a tenth at the least.
        cores: those that the experts ran on here.
    """
    most = 0.9 * layer_seconds
    job = min(job, most)
    start = min(start, most - job)
    moe = next(m.moe for m in plan.moe_modules() if m.moe)
    nbytes = sum(moe.node_bytes(n) for n in range(len(moe.splits))) * moe.top_k / moe.experts
    rate = nbytes / (layer_seconds - job - start)
    cpu = Cpu(
        sockets=1,
        cores=cores,
        dram_local=rate,
        dram_remote=rate,
        peak={"avx512": UNBOUNDED},
        amx_min_tokens=hardware.cpu.amx_min_tokens,
        kernels={MEASURED: Kernels(1.0, 1.0)},
        job=job,
        start=start,
    )
    return replace(hardware, name=f"{hardware.name}, {MEASURED}", cpu=cpu, host=Host(submit, sync))


def profile_yaml(hardware: Hardware, remarks: Sequence[str] = ()) -> str:
    """The profile as a file that `ktc simulate --hardware` reads."""
    import yaml

    cpu, device, link, host = hardware.cpu, hardware.device, hardware.link, hardware.host
    data: dict[str, Any] = {
        "version": 1,
        "name": hardware.name,
        "description": hardware.description,
        "measured": {"by": "ktc bench emulate", "remarks": list(remarks)},
        "cpu": {
            "sockets": cpu.sockets,
            "cores_per_socket": cpu.cores,
            "dram_local_gbs": cpu.dram_local / 1e9,
            **({"dram_remote_gbs": cpu.dram_remote / 1e9} if cpu.sockets > 1 else {}),
            "peak_tflops": {unit: value / 1e12 for unit, value in cpu.peak.items()},
            "amx_min_tokens": cpu.amx_min_tokens,
            "job_us": cpu.job * 1e6,
            "start_us": cpu.start * 1e6,
            "kernels": {
                name: {"dram_fraction": k.dram_fraction, "compute_fraction": k.compute_fraction}
                for name, k in cpu.kernels.items()
            },
        },
        "device": {
            "kind": device.kind,
            "name": device.name,
            "hbm_gbs": device.memory_rate / 1e9,
            "hbm_fraction": device.memory_fraction,
            "peak_tflops": device.peak / 1e12,
            "compute_fraction": device.compute_fraction,
            "kernel_us": device.kernel_time * 1e6,
            "kernels": dict(device.kernels),
        },
        "link": {"gbs": link.rate / 1e9, "latency_us": link.latency * 1e6},
        "host": {"submit_us": host.submit * 1e6, "sync_us": host.sync * 1e6},
    }
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    return text


def write_profile(path: Path, hardware: Hardware, remarks: Sequence[str] = ()) -> None:
    """
    Raises:
        DiskError: the file cannot be written.
    """
    from ktc.errors import DiskError

    try:
        path.write_text(profile_yaml(hardware, remarks))
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}") from error
