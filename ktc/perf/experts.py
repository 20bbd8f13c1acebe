"""ktc's own experts as a contestant: random weights, packed as a bundle would hold them, in huge pages.

Only a few distinct experts are made (dense_experts.py) and packed; their bytes are then copied into memory of their own
for every expert, so that set-up is quick and the working set is real. Not here: timing (interleave.py).
Letters: E experts, H hidden, I expert intermediate size, k experts per token, T tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ktc.engine.packed import native_moe
from ktc.errors import UsageError
from ktc.layout import QuantScheme, round_up, split_intermediate, split_unit
from ktc.perf.dense_experts import DenseExpert
from ktc.perf.limits import l3_bytes
from ktc.perf.routing import Routing
from ktc.perf.shapes import MoeShape
from ktc.plan.ir import MoePlan

if TYPE_CHECKING:
    from ktc.codegen.spec import KernelSpecs
    from ktc.pack.experts import PackedExpert

_MIN_WORKING_SET = 256 << 20
_MAX_LAYERS = 64
"""A toy shape would need thousands of layers to be cold, each with buffers of its own; it is measured warm instead."""


class Contestant(Protocol):
    """Something that runs MoE layers and can be measured.

    Attributes:
        name: as in tables ("ktc int4", "torch bf16 grouped_mm").
        data_type: which arithmetic its floor assumes (shapes.arithmetic_kind).
        bits: stored bits per parameter.
        expert_bytes: stored bytes of one expert.
        layers: layers with weights of their own; calls go over them in turn.
        experts: experts of a layer.
        settle: seconds that threads of its own may go on spinning after a call.
    """

    name: str
    data_type: str
    bits: float
    expert_bytes: float
    layers: int
    experts: int
    settle: float

    def prepare(self, layer: int, x: NDArray[np.float32], routing: Routing) -> Callable[[], None]:
        """One call, ready to be timed; x is f32 [T, H]. Conversions of the input happen here."""

    def output(self) -> NDArray[np.float32]:
        """f32 [T, H] of the call that ran last."""

    def about(self) -> dict[str, Any]:
        """What it ran on, for the report."""


def layers_for(layer_bytes: float, working_set: int | None = None) -> int:
    """How many layers keep a strictly cyclic use of all experts out of the caches: twice the last-level cache."""
    wanted = max(_MIN_WORKING_SET, 2 * l3_bytes()) if working_set is None else working_set
    return min(_MAX_LAYERS, max(1, -(-wanted // int(max(1, layer_bytes)))))


def specs_for_shape(shape: MoeShape, scheme: QuantScheme, nodes: int = 1) -> KernelSpecs:
    """The kernels of one layer of this shape, the same that a plan would ask for."""
    from ktc.codegen.spec import KernelSpec, KernelSpecs

    key = (scheme.data_type, scheme.scale, scheme.group)
    specs = [KernelSpec(*key, "silu_mul", round_up(shape.hidden, 64))]
    for begin, end in moe_plan(shape, scheme, nodes).splits:
        specs += [KernelSpec(*key, "store", end - begin), KernelSpec(*key, "scatter_add", end - begin)]
    return KernelSpecs(tuple(specs))


def kernel_library(specs: KernelSpecs, variant: str | None = None) -> Any:
    """The native library of the best variant that this machine runs (or of `variant`), built if need be.

    Raises:
        BuildError: unknown variant, or it cannot be built or loaded here.
    """
    from ktc.codegen.build import build_and_say
    from ktc.codegen.variants import VARIANTS, runnable
    from ktc.engine.opening import open_library
    from ktc.errors import BuildError
    from ktc.host import this_host

    features = this_host().features
    name = variant or runnable(features)[0]
    if name in VARIANTS and (missing := set(VARIANTS[name].required_features) - features):
        raise BuildError(
            f"variant {name} needs {', '.join(sorted(missing))}, which this machine does not offer",
            f"variants for this CPU: {', '.join(runnable(features, automatic=False))}",
        )
    built = build_and_say(specs, [name])[name]
    return open_library(built.path)


def moe_plan(shape: MoeShape, scheme: QuantScheme, nodes: int) -> MoePlan:
    """A layer of this shape as a plan would have it.

    Raises:
        UsageError: its experts cannot be split over so many nodes.
    """
    try:
        splits = split_intermediate(shape.intermediate, nodes, split_unit(scheme))
    except ValueError as error:
        raise UsageError(f"{shape.name}: {error}") from error
    return MoePlan(
        experts=shape.experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        activation="silu_mul",
        alpha=0.0,
        limit=0.0,
        bias=False,
        data_type=scheme.data_type,
        scale=scheme.scale,
        group=scheme.group,
        backend="",
        n_deferred_experts=0,
        splits=tuple(splits),
    )


def pack(shape: MoeShape, scheme: QuantScheme, nodes: int, experts: list[DenseExpert]) -> list[list[PackedExpert]]:
    """[expert][node]: quantised and packed as `ktc compile` does it."""
    from ktc.checkpoint.experts import ExpertWeights
    from ktc.pack.experts import pack_expert, split_expert

    plan = replace(moe_plan(shape, scheme, nodes), experts=len(experts), top_k=1)
    names = {name: name for name in ("gate", "up", "down")}
    return [
        list(split_expert(plan, pack_expert(plan, ExpertWeights(e.gate, e.up, e.down, "fp32"), names))) for e in experts
    ]


class KtcWeights:
    """Layers of packed experts in huge pages: bytes of expert e are those of the packed number e % distinct."""

    def __init__(
        self, shape: MoeShape, scheme: QuantScheme, nodes: int, experts: list[DenseExpert], layers: int
    ) -> None:
        from ktc import _runtime

        self.shape, self.scheme, self.nodes, self.layers = shape, scheme, nodes, layers
        self.plan = moe_plan(shape, scheme, nodes)
        packed = pack(shape, scheme, nodes, experts)
        self._buffers: list[Any] = []
        self.pointers: list[list[list[dict[str, int]]]] = []  # [layer][node][expert]
        real = len(_runtime.numa_nodes())
        images = [[_image(packed[d][node]) for d in range(len(packed))] for node in range(nodes)]
        for _ in range(layers):
            per_node = []
            for node in range(nodes):
                stride = len(images[node][0][0])
                buffer = _runtime.HugeBuffer(stride * shape.experts, node if nodes == real else -1)
                self._buffers.append(buffer)
                memory = np.ctypeslib.as_array((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ptr))
                entries = []
                for e in range(shape.experts):
                    image, offsets = images[node][e % len(packed)]
                    memory[e * stride : (e + 1) * stride] = image
                    entries.append({name: buffer.ptr + e * stride + at for name, at in offsets.items()})
                per_node.append(entries)
            self.pointers.append(per_node)

    def huge_share(self) -> float:
        from ktc.engine.memory import huge_bytes

        return float(huge_bytes(self._buffers) / max(1, sum(b.nbytes for b in self._buffers)))


def _image(expert: PackedExpert) -> tuple[NDArray[np.uint8], dict[str, int]]:
    """One node's slice of an expert as one run of bytes, and where its parts are in it (64-byte aligned)."""
    parts: dict[str, NDArray[np.uint8]] = {}
    for name, matrix in (("gate_up", expert.gate_up), ("down", expert.down)):
        parts[name] = matrix.tiles
        if matrix.scale.size:
            parts[f"{name}_scale"] = matrix.scale.view(np.uint8)
        if matrix.mult.size:
            parts[f"{name}_mult"] = matrix.mult
    offsets: dict[str, int] = {}
    at = 0
    for name, part in parts.items():
        offsets[name] = at
        at += round_up(part.nbytes, 64)
    image = np.zeros(at, np.uint8)
    for name, part in parts.items():
        image[offsets[name] : offsets[name] + part.nbytes] = part
    return image, offsets


class KtcExperts:
    """Layers of `_runtime.Moe` over one `KtcWeights`.

    Args:
        force: part of kernel names to force ("avx512", "amx"), or "" to choose per expert by its tokens.
        min_rows: see `ktc.perf.tuning.Tuning`.
        top_k: experts of a token; the shape's by default.
    """

    settle = 0.001

    def __init__(
        self,
        weights: KtcWeights,
        lib: Any,
        pool: Any,
        *,
        name: str = "",
        force: str = "",
        scheduling: str = "dynamic",
        min_rows: dict[str, int] | None = None,
        top_k: int | None = None,
    ) -> None:
        shape, scheme = weights.shape, weights.scheme
        choice: dict[str, Any] = {"force": force, "scheduling": scheduling, "min_rows": min_rows}
        self._made_with = lib, pool, choice
        plan = weights.plan if top_k is None else replace(weights.plan, top_k=top_k)
        self.name = name or f"ktc {scheme.data_type}"
        self.data_type: str = scheme.data_type
        self.bits = shape.bits_per_param(scheme)
        self.expert_bytes: float = shape.expert_bytes(scheme)
        self.layers, self.experts = weights.layers, shape.experts
        self.weights = weights
        self._out = np.zeros((0, shape.hidden), np.float32)
        self._moes = [
            native_moe(lib, pool, plan, pointers, force=force, scheduling=scheduling, min_rows=min_rows or {})
            for pointers in weights.pointers
        ]

    def with_top_k(self, top_k: int) -> KtcExperts:
        """The same weights, called with `top_k` experts a token."""
        lib, pool, choice = self._made_with
        return KtcExperts(self.weights, lib, pool, name=f"{self.name} top {top_k}", top_k=top_k, **choice)

    def prepare(self, layer: int, x: NDArray[np.float32], routing: Routing) -> Callable[[], None]:
        tokens, hidden = x.shape
        if self._out.shape[0] != tokens:
            self._out = np.zeros((tokens, hidden), np.float32)
        out, forward = self._out, self._moes[layer].forward
        arguments = (
            x.ctypes.data, hidden, tokens, routing.ids.ctypes.data, routing.weights.ctypes.data, out.ctypes.data, hidden
        )  # fmt: skip

        def call(keep: tuple[Any, ...] = (x, routing, out)) -> None:
            forward(*arguments)

        return call

    def output(self) -> NDArray[np.float32]:
        return self._out

    def about(self) -> dict[str, Any]:
        kernels: dict[str, int] = {}
        for moe in self._moes:
            for name, calls in moe.report()["kernels"].items():
                kernels[name] = kernels.get(name, 0) + calls
        return {
            "scheme": str(self.weights.scheme),
            "kernels": kernels,
            "scheduling": self._moes[0].report()["scheduling"],
            "min_rows": self._moes[0].report()["min_rows"],
            "huge_pages": self.weights.huge_share(),
        }
