"""The Plan: what every module of the model becomes, before a byte of weights is read.

Built by `ktc.plan.build` from a config and a recipe, checked by `ktc.plan.verify`, printed by
`ktc plan`, consumed by packing, code generation, the bundle and the engine, and stored in the
bundle as plan.json (`to_json` / `from_json` round-trip exactly).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ktc.layout import Activation, DataType, MatrixLayout, QuantScheme, ScaleMode, intermediate_pad

Operator = Literal["moe", "linear", "mla", "embedding", "hf"]


@dataclass(frozen=True)
class MoePlan:
    """One MoE block: E experts [H -> I -> H], split over nodes by ranges of I.

    `splits` are half-open ranges over I_pad, one per node (see layout.split_intermediate).
    `hot` are the experts that the block's device computes too, ascending; in decode steps the CPU leaves them out.
    `hot_share` is the part of the layer's uses that they took in the profile they were chosen by.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation
    alpha: float
    limit: float
    bias: bool
    data_type: DataType
    scale: ScaleMode
    group: int
    backend: str
    n_deferred_experts: int | Literal["auto"]
    splits: tuple[tuple[int, int], ...]
    hot: tuple[int, ...] = ()
    hot_share: float = 0.0

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(self.data_type, self.scale, self.group)

    def gate_up_layout(self, node: int) -> MatrixLayout:
        begin, end = self.splits[node]
        return MatrixLayout(2 * (end - begin), self.hidden, self.scheme)

    def down_layout(self, node: int) -> MatrixLayout:
        begin, end = self.splits[node]
        return MatrixLayout(self.hidden, end - begin, self.scheme)

    @property
    def i_pad(self) -> int:
        return intermediate_pad(self.intermediate)

    def node_bytes(self, node: int) -> int:
        """Bytes of all experts of this layer on one node (biases included, as f32)."""
        gate_up, down = self.gate_up_layout(node), self.down_layout(node)
        bias = 4 * (gate_up.n_pad + down.n_pad) if self.bias else 0
        return self.experts * (gate_up.nbytes + down.nbytes + bias)

    @property
    def hot_elements(self) -> int:
        """Weights (and biases) of all hot experts."""
        bias = 2 * self.intermediate + self.hidden if self.bias else 0
        return len(self.hot) * (3 * self.hidden * self.intermediate + bias)

    @property
    def hot_bytes(self) -> int:
        """Bytes of the hot experts on the device, dequantised to 16 bits."""
        return 2 * self.hot_elements


@dataclass(frozen=True)
class LinearPlan:
    """A dense linear W [n, k] on packed kernels."""

    n: int
    k: int
    bias: bool
    data_type: DataType
    scale: ScaleMode
    group: int

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(self.data_type, self.scale, self.group)

    @property
    def layout(self) -> MatrixLayout:
        return MatrixLayout(self.n, self.k, self.scheme)


@dataclass(frozen=True)
class ModulePlan:
    """One module of the Hugging Face tree.

    Attributes:
        name: module path (`model.layers.3.mlp`).
        hf_class: dotted class of the original module.
        role: what the family says it is (moe, mla, attention, linear, lm_head, router, norm, embedding, ...).
        operator: what runs it; "hf" = Hugging Face's own code.
        device: "cpu" or "cuda:N"; where its weights live (a MoE block's experts always live on the CPU).
        rule: index of the recipe rule that matched, or None.
        params: own parameters kept as they are: name relative to the module -> (shape, dtype name).
        nbytes: bytes of this module's own weights on `device` (not its children's, not the experts').
        callback: stays Hugging Face's code in the decode graph too.
        kv_cache: of an attention module: "host" = pinned host memory, "" = where the module is.
        note: why something unexpected holds (protected, group fallback, padded, tied); shown by `ktc plan`.
    """

    name: str
    hf_class: str
    role: str
    operator: Operator
    device: str
    rule: int | None
    nbytes: int
    params: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    moe: MoePlan | None = None
    linear: LinearPlan | None = None
    callback: bool = False
    kv_cache: Literal["", "host"] = ""
    note: str = ""


@dataclass(frozen=True)
class RuleUse:
    """One recipe rule and what it did, so that a plan can be read without its recipe.

    Attributes:
        where: `rule 3 (int4.yaml:17)`.
        match, replace: in the recipe's own words.
        modules: modules that it decided; protected: Linear modules that it matched but had to leave alone.
    """

    where: str
    match: str
    replace: str
    modules: int
    protected: int


@dataclass(frozen=True)
class Plan:
    """The whole model. `modules` is in module-tree order and lists every module that owns parameters or is replaced.

    A parameter in `tied` belongs to no module's `params`; where its module is a packed linear, the tiles are
    made from the tensor that is stored.
    """

    model_type: str
    architecture: str
    layers: int
    nodes: int
    modules: tuple[ModulePlan, ...]
    tied: dict[str, str] = field(default_factory=dict)  # tied parameter -> the one that is stored
    recipe: str = ""
    rules: tuple[RuleUse, ...] = ()

    def moe_modules(self) -> list[ModulePlan]:
        return [m for m in self.modules if m.moe is not None]

    def uses_cuda(self) -> bool:
        """Whether anything is planned for a CUDA device."""
        return any(m.device != "cpu" for m in self.modules)

    def cuda_devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.device for m in self.modules if m.device != "cpu"))

    def expert_bytes(self, node: int) -> int:
        return sum(m.moe.node_bytes(node) for m in self.modules if m.moe is not None)

    def device_bytes(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for m in self.modules:
            out[m.device] = out.get(m.device, 0) + m.nbytes + (m.moe.hot_bytes if m.moe is not None else 0)
        return out

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for module in data["modules"]:
            if not module["callback"]:  # as written before there were any
                del module["callback"]
            if not module["kv_cache"]:
                del module["kv_cache"]
            if module["moe"] is not None and not module["moe"]["hot"]:  # as written before there were any
                del module["moe"]["hot"], module["moe"]["hot_share"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Inverse of `to_json`; fields that a later minor version added are ignored."""
        modules = []
        for m in data["modules"]:
            m = _known(ModulePlan, m)
            if m.get("moe"):
                splits = tuple((int(a), int(b)) for a, b in m["moe"]["splits"])
                hot = tuple(int(e) for e in m["moe"].get("hot", ()))
                m["moe"] = MoePlan(**{**_known(MoePlan, m["moe"]), "splits": splits, "hot": hot})
            if m.get("linear"):
                m["linear"] = LinearPlan(**_known(LinearPlan, m["linear"]))
            m["params"] = {k: (tuple(shape), dtype) for k, (shape, dtype) in m.get("params", {}).items()}
            modules.append(ModulePlan(**m))
        rules = tuple(RuleUse(**_known(RuleUse, r)) for r in data.get("rules", ()))
        return cls(**{**_known(cls, data), "modules": tuple(modules), "rules": rules})


def _known(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {key: value for key, value in data.items() if key in names}
