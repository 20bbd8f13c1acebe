"""Plan and hardware -> seconds of work per layer. Says how long things take, not when they run (schedule.py).

Every time is a roofline: bytes over a rate or operations over a peak, whichever is longer, and on a
GPU a fixed least time per kernel on top. Letters: T tokens, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ktc.errors import RecipeError, UsageError
from ktc.plan.caches import cache_width
from ktc.plan.hot import ALL_UP_TO
from ktc.plan.ir import ModulePlan, MoePlan, Plan
from ktc.simulate.hardware import Hardware, Kernels, Numa

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_BF16_BYTES, _F32_BYTES = 2, 4
_ADDS = 2  # residual additions of a decoder layer; a MoE layer adds one more, the routed experts to the shared


@dataclass(frozen=True)
class LayerCost:
    """Seconds of work of one decoder layer.

    Attributes:
        index: layer number.
        attention: on the device, before the experts: norms, attention, router; a dense layer's MLP too.
        shared: on the device, beside the experts.
        merge: on the device, after the experts.
        top_k: routed experts per token; 0 for a layer without a MoE block.
        routed: for each socket in use, its seconds for *all* top_k routed experts of all tokens, without what the
            jobs that they are handed over in take by themselves (`Costs.job`).
    """

    index: int
    attention: float
    shared: float = 0.0
    merge: float = 0.0
    top_k: int = 0
    routed: tuple[float, ...] = ()


@dataclass(frozen=True)
class Costs:
    """A whole forward pass of `tokens` tokens.

    Attributes:
        head: seconds of the final norm and lm_head on the device.
        copy: seconds of one copy of the MoE input (or output) over the link, latency included.
        submit, sync: of the host's callbacks.
        job: seconds that one expert job takes on every socket, whatever it reads; start: more, where the
            socket stood idle before.
        shared_lane: the device is the expert pool itself, so nothing overlaps.
    """

    tokens: int
    layers: tuple[LayerCost, ...]
    head: float
    copy: float
    submit: float
    sync: float
    shared_lane: bool
    job: float = 0.0
    start: float = 0.0

    @property
    def sockets(self) -> int:
        return max((len(layer.routed) for layer in self.layers), default=1) or 1

    @property
    def max_deferred(self) -> int:
        """The most experts that may be deferred: two of every layer must stay immediate."""
        return max(0, min((c.top_k for c in self.layers if c.top_k), default=0) - 2)


def decode_costs(
    plan: Plan, hardware: Hardware, *, context: int = 1024, numa: Numa = "tp", kernels: str | None = None
) -> Costs:
    """Times of one decode step of one sequence whose cache holds `context` tokens.

    Raises:
        UsageError: no such kernels, or the plan is split over another number of nodes than the mode uses.
        RecipeError: the plan has no MoE block that ktc runs.
    """
    return _costs(plan, hardware, tokens=1, context=context, numa=numa, kernels=kernels)


def prefill_costs(
    plan: Plan, hardware: Hardware, *, tokens: int, numa: Numa = "tp", kernels: str | None = None
) -> Costs:
    """Times of one prompt of `tokens` tokens, read at once. Raises as `decode_costs`."""
    return _costs(plan, hardware, tokens=tokens, context=tokens / 2, numa=numa, kernels=kernels)


def _costs(plan: Plan, hardware: Hardware, *, tokens: int, context: float, numa: Numa, kernels: str | None) -> Costs:
    _, reached = hardware.kernels(kernels)
    moes = plan.moe_modules()
    if not moes:
        raise RecipeError("the plan has no MoE block, so there is nothing to divide between CPU and device")
    cpu = _CpuCosts(hardware, reached, numa, tokens)
    device = _DeviceCosts(plan, hardware, cpu, tokens, context)
    hidden = max(m.moe.hidden for m in moes if m.moe)
    payload = hidden * tokens * _BF16_BYTES
    cuda = hardware.device.kind == "cuda"
    return Costs(
        tokens=tokens,
        layers=tuple(device.layer(i, cpu) for i in range(plan.layers)),
        head=device.head(),
        copy=hardware.link.latency + payload / hardware.link.rate if cuda else 0.0,
        submit=hardware.host.submit if cuda else 0.0,
        sync=hardware.host.sync if cuda else 0.0,
        shared_lane=not cuda,
        job=hardware.cpu.job,
        start=hardware.cpu.start,
    )


class _CpuCosts:
    """The expert pool in one NUMA mode.

    tp: every socket reads its own slice from its own memory. single: one socket does everything.
    unaware: the sockets share the work but not the memory; a phase ends with its slowest threads, and
    those are the ones whose weights are in the other socket, so both sockets run at the remote rate.
    """

    def __init__(self, hardware: Hardware, reached: Kernels, numa: Numa, tokens: int) -> None:
        cpu = hardware.cpu
        self.cpu, self.reached, self.numa, self.tokens = cpu, reached, numa, tokens
        self.sockets = 1 if numa == "single" else cpu.sockets
        self.profile = hardware.name
        self.hot_on_device = hardware.device.kind == "cuda"
        slow = numa == "unaware" and cpu.sockets > 1
        self.rate = (cpu.dram_remote if slow else cpu.dram_local) * reached.dram_fraction

    def routed(self, moe: MoePlan) -> tuple[float, ...]:
        """Seconds per socket for the routed experts of one layer."""
        touched = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** self.tokens)  # expected, uniform routing
        flops = 2 * self.tokens * moe.top_k * 3 * moe.hidden * moe.intermediate
        peak = self.cpu.peak_for(moe.data_type, self.tokens * moe.top_k / touched) * self.reached.compute_fraction
        nbytes = sum(moe.node_bytes(n) for n in range(len(moe.splits))) * touched / moe.experts
        seconds = [max(share * nbytes / self.rate, share * flops / peak) for share in self._shares(moe)]
        elsewhere = moe.hot_share if self.tokens == 1 and self.hot_on_device else 0.0
        return tuple((1 - elsewhere) * s for s in seconds)

    def _shares(self, moe: MoePlan) -> list[float]:
        if self.numa != "tp" or self.sockets == 1:
            return [1 / self.sockets] * self.sockets
        if len(moe.splits) != self.sockets:
            raise UsageError(
                f"the experts are split over {len(moe.splits)} NUMA node{'s' * (len(moe.splits) > 1)}, and the hardware"
                f" profile {self.profile} describes {self.sockets} sockets",
                f"use --numa unaware or --numa single, or a bundle that `ktc repack --nodes {self.sockets}` has made",
            )
        nbytes = [moe.node_bytes(node) for node in range(self.sockets)]
        return [n / sum(nbytes) for n in nbytes]

    def dense(self, nbytes: float, flops: float) -> float:
        """Seconds of a dense operator on all sockets in use (where the device is the pool itself)."""
        unit = "amx_bf16" if self.tokens >= self.cpu.amx_min_tokens and "amx_bf16" in self.cpu.peak else "avx512"
        peak = self.cpu.peak[unit] * self.reached.compute_fraction
        return max(nbytes / (self.rate * self.sockets), flops / (peak * self.sockets))


class _DeviceCosts:
    """Everything that is not a routed expert, from the modules of the plan."""

    def __init__(self, plan: Plan, hardware: Hardware, cpu: _CpuCosts, tokens: int, context: float) -> None:
        self.device, self.cpu, self.tokens, self.context = hardware.device, cpu, tokens, context
        self.link = hardware.link
        self.plan = plan
        self.by_layer: dict[int | None, list[ModulePlan]] = {}
        for module in plan.modules:
            found = _LAYER.search(module.name)
            self.by_layer.setdefault(int(found[1]) if found else None, []).append(module)

    def layer(self, index: int, cpu: _CpuCosts) -> LayerCost:
        modules = self.by_layer.get(index, [])
        block = next((m for m in modules if m.moe is not None), None)
        if block is None or block.moe is None:
            return LayerCost(index, self._time(modules) + self._attention(modules) + self._kernels("add", _ADDS))
        inside = [m for m in modules if m is not block and m.name.startswith(f"{block.name}.")]
        shared = [m for m in inside if m.role != "router"]
        before = [m for m in modules if m not in shared]
        shared_time = self._time(shared)
        if any(m.linear or _elements(m) for m in shared):
            shared_time += self._kernels("activation", 1)
        shared_time += self._hot(block.moe)
        return LayerCost(
            index,
            attention=self._time(before) + self._attention(modules) + self._kernels("add", 1),
            shared=shared_time,
            merge=self._kernels("add", _ADDS),
            top_k=block.moe.top_k,
            routed=cpu.routed(block.moe),
        )

    def _hot(self, moe: MoePlan) -> float:
        """Hot experts of a decode step: all of them where they are few, else a gather of top_k."""
        if not moe.hot or self.tokens != 1 or self.device.kind == "cpu":
            return 0.0
        read = moe.hot_elements * min(1.0, ALL_UP_TO * moe.top_k / len(moe.hot))
        return (
            self._roofline(_BF16_BYTES * read, 2 * read) + self._kernels("linear", 2) + self._kernels("activation", 1)
        )

    def head(self) -> float:
        """Final norm and lm_head; of the embedding one row per token is read, which is nothing."""
        return self._time([m for m in self.by_layer.get(None, []) if m.role != "embedding"], tokens=1)

    def _time(self, modules: list[ModulePlan], tokens: int | None = None) -> float:
        tokens = self.tokens if tokens is None else tokens
        return sum(
            self._roofline(m.nbytes, 2 * tokens * _elements(m)) + self._kernels(*_kernel_kind(m)) for m in modules
        )

    def _roofline(self, nbytes: float, flops: float) -> float:
        if self.device.kind == "cpu":
            return self.cpu.dense(nbytes, flops)
        rate = self.device.memory_rate * self.device.memory_fraction
        return max(nbytes / rate, flops / (self.device.peak * self.device.compute_fraction))

    def _kernels(self, kind: str, count: int) -> float:
        return self.device.kernels.get(kind, 0) * count * self.device.kernel_time

    def _attention(self, modules: list[ModulePlan]) -> float:
        """The core of attention: the cache is read once, every new token meets `context` cached ones. From host memory
        it comes over the link."""
        width = {m.name.rpartition(".")[2]: _shape(m) for m in modules if len(_shape(m)) == 2}
        query = next((width[name][0] for name in ("q_b_proj", "q_proj") if name in width), 0)
        value = width["o_proj"][1] if "o_proj" in width else 0
        nbytes = cache_width(modules) * _BF16_BYTES * max(self.context, self.tokens)
        flops = 2 * self.tokens * self.context * (query + value)
        away = self.device.kind == "cuda" and any(m.kv_cache == "host" for m in modules)
        link = nbytes / self.link.rate if away else 0.0
        return max(link, self._roofline(nbytes, flops)) + self._kernels("attention", 1)


def _shape(module: ModulePlan) -> tuple[int, ...]:
    if module.linear is not None:
        return (module.linear.n, module.linear.k)
    return module.params["weight"][0] if "weight" in module.params else ()


def _elements(module: ModulePlan) -> int:
    """Weights that meet every token."""
    if module.linear is not None:
        return module.linear.n * module.linear.k
    return sum(math.prod(shape) for shape, _ in module.params.values() if len(shape) >= 2)


def _kernel_kind(module: ModulePlan) -> tuple[str, int]:
    """Which kernels a module takes, and how many times. Containers take none: their children do."""
    if module.role in ("router", "norm"):
        return module.role, 1
    if module.linear is not None or module.role in ("linear", "protected_linear", "lm_head"):
        return "linear", 0 if module.name.endswith(".kv_b_proj") else 1  # kv_b_proj is absorbed by attention
    if module.role == "dense_mlp":
        return "activation", 1
    return "add", 0
