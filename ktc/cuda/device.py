"""Which devices a plan puts the model on, and whether this machine has them. Judges; moves nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.errors import BundleError, KtcError

if TYPE_CHECKING:
    from ktc.plan.ir import Plan
    from ktc.plan.stages import Placement

_CUDA = re.compile(rb'"device"\s*:\s*\{[^{}]*"kind"\s*:\s*"cuda"')
_ELSEWHERE = "run it on a machine with an NVIDIA GPU, or compile the checkpoint again with device: cpu in the recipe"


def wants_cuda(bundle: Path) -> bool:
    """Whether a bundle's manifest asks for a CUDA device. False for anything that is not a readable bundle.

    Every start of `ktc run` asks, and a manifest can be megabytes: it is parsed only if what to look for is in it.
    """
    try:
        data = (bundle / "manifest.json").read_bytes()
        if _CUDA.search(data) is None:  # quotes inside a JSON string are escaped, so text cannot look like this
            return False
        return bool(json.loads(data)["device"]["kind"] == "cuda")
    except (OSError, ValueError, KeyError, TypeError):
        return False  # whoever opens the bundle says what is wrong with it


def lane_devices(plan: Plan) -> tuple[Placement, dict[str, Any]] | None:
    """Where a plan's modules are, and the `torch.device` of every device in it, checked; None for a plan on the CPU.

    Raises:
        BundleError: no way to run the plan (`place`). KtcError: no such device, or a torch without CUDA; it says which.
    """
    from ktc.plan.stages import place

    try:
        placement = place(plan)
    except KtcError as error:
        raise BundleError(error.message, error.hint) from error
    if placement is None:
        return None
    return placement, {name: open_device(name) for name in sorted(placement.devices)}


def open_device(name: str) -> Any:
    """`torch.device` of "cuda:N", checked.

    Raises:
        BundleError: no such device here, or one too old.
        KtcError: a torch without CUDA.
    """
    import torch

    if torch.version.cuda is None:
        raise KtcError(
            f"the bundle runs on {name}, and torch {torch.__version__} is built without CUDA",
            "install torch with CUDA (pip install torch --index-url https://download.pytorch.org/whl/cu130)",
        )
    if not torch.cuda.is_available():
        raise BundleError(f"the bundle runs on {name}, and torch finds no usable CUDA device here", _ELSEWHERE)
    device = torch.device(name)
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise BundleError(
            f"the bundle runs on {name}, and this machine has {count} CUDA device{'s' * (count != 1)}",
            "compile the checkpoint again with a device that exists",
        )
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise BundleError(
            f"{name} is {torch.cuda.get_device_name(device)}; compute capability 8.0 is needed", _ELSEWHERE
        )
    return device


def check_memory(device: Any, needed: int) -> None:
    """
    Raises:
        KtcError: the device has less free memory than `needed` bytes.
    """
    import torch

    from ktc.progress import format_bytes

    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise KtcError(
            f"the model needs {format_bytes(needed)} of memory on {device}, {format_bytes(free)} are free",
            "a smaller --context, or fewer bits per weight for the linears",
        )
