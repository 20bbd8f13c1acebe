"""Which device a plan puts the model on, and whether this machine has it. Judges; moves nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.errors import BundleError, KtcError

if TYPE_CHECKING:
    from ktc.plan.ir import ModulePlan, Plan

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


def lane_device(plan: Plan) -> str | None:
    """The one CUDA device of a plan, or None for a plan that stays on the CPU.

    Modules that no rule decides, and everything inside a MoE block but its experts, follow the rest of the model.

    Raises:
        BundleError: several devices, or a module that a rule puts on the CPU in a model that is on the GPU.
    """
    used = sorted({m.device for m in plan.modules if m.device != "cpu"})
    if not used:
        return None
    if len(used) > 1:
        raise BundleError(
            f"the plan spreads the model over {', '.join(used)}; ktc runs on one GPU so far",
            f"put every rule on device: {used[0]}",
        )
    for module in plan.modules:
        if module.device == "cpu" and _decided(plan, module):
            assert module.rule is not None
            raise BundleError(
                f"{module.name} is on the cpu ({plan.rules[module.rule].where}) and the rest of the model on {used[0]};"
                " only routed experts can stay behind",
                f"give that rule device: {used[0]}, or leave its device out",
            )
    return used[0]


def _decided(plan: Plan, module: ModulePlan) -> bool:
    """Whether a rule for this very module says cpu (not for a MoE block around it)."""
    if module.rule is None or module.operator == "moe":
        return False
    return not any(m.rule == module.rule and m.operator == "moe" for m in plan.modules)


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
