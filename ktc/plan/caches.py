"""KV caches of a plan: how wide they are, and which memory holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ktc.plan.ir import ModulePlan, Plan

SHOWN_POSITIONS = 8192
"""What `ktc plan` counts; a session's context unless the model's own is shorter or --context says otherwise."""
_BYTES = 2  # bf16 or fp16
_PROJECTION = re.compile(r"^(.*)\.(kv_a_proj_with_mqa|k_proj|v_proj)$")


@dataclass(frozen=True)
class CacheBytes:
    """Of the layers of one device, for some number of positions.

    Attributes:
        device: on the device, with one layer's working copy of those in host memory.
        host: in host memory.
        plain: on the device if no rule said host.
        layers: how many; host_layers: of them with their cache in host memory.
    """

    device: int = 0
    host: int = 0
    plain: int = 0
    layers: int = 0
    host_layers: int = 0


def in_host_memory(module: ModulePlan) -> ModulePlan:
    """The plan of an attention module whose rule says kv_cache: host."""
    note = "its KV cache is in pinned host memory, which decode steps read over PCIe"
    if module.device == "cpu":
        note = "kv_cache: host means nothing on the cpu, where the cache is in host memory anyway"
    return replace(module, kv_cache="host", note="; ".join(filter(None, (module.note, note))))


def cache_width(modules: Iterable[ModulePlan]) -> int:
    """Elements that one attention module caches per position, from the projections among `modules`: keys and values of
    all key heads, or the latent and the rotated key."""
    return sum(_rows(m) for m in modules if _PROJECTION.match(m.name))


def cache_bytes(plan: Plan, positions: int = SHOWN_POSITIONS) -> dict[str, CacheBytes]:
    """Per device, in 16 bits."""
    layers: dict[str, list[ModulePlan]] = {}
    for module in plan.modules:
        if found := _PROJECTION.match(module.name):
            layers.setdefault(found[1], []).append(module)
    host = {m.name for m in plan.modules if m.kv_cache == "host"}
    out: dict[str, CacheBytes] = {}
    working: dict[str, int] = {}
    for attention, projections in layers.items():
        nbytes, device = _BYTES * positions * cache_width(projections), projections[0].device
        before = out.get(device, CacheBytes())
        apart = attention in host and device != "cpu"
        if apart:
            working[device] = max(working.get(device, 0), nbytes)
        out[device] = CacheBytes(
            before.device + (0 if apart else nbytes),
            before.host + (nbytes if apart else 0),
            before.plain + nbytes,
            before.layers + 1,
            before.host_layers + apart,
        )
    return {name: replace(each, device=each.device + working.get(name, 0)) for name, each in out.items()}


def host_layers(plan: Plan) -> frozenset[int]:
    """Numbers of the decoder layers whose cache a rule puts into host memory."""
    found = (re.search(r"(?:^|\.)layers\.(\d+)\.", m.name) for m in plan.modules if m.kv_cache == "host")
    return frozenset(int(match[1]) for match in found if match)


def _rows(module: ModulePlan) -> int:
    if module.linear is not None:
        return module.linear.n
    return module.params["weight"][0][0]
