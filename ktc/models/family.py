"""What ktc must know about a model family beyond Hugging Face's own classes.

A family is one small file in this folder and one line in `registry.py`. It declares names, shapes
and roles; the router, the norms and every module that no rule matches stay Hugging Face's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ktc.layout import Activation

Config = Any  # transformers.PretrainedConfig; kept loose so that this module imports nothing heavy


@dataclass(frozen=True)
class ExpertShape:
    """Shapes of the routed experts of one model: E experts, top_k per token, H hidden, I intermediate."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation = "silu_mul"
    alpha: float = 0.0
    limit: float = 0.0
    bias: bool = False


def shape_from(experts: str, intermediate: str) -> Callable[[Config], ExpertShape]:
    """Reads a config whose E and I are these attributes, and whose top_k and H have their usual names."""

    def shape(config: Config) -> ExpertShape:
        return ExpertShape(
            getattr(config, experts), config.num_experts_per_tok, config.hidden_size, getattr(config, intermediate)
        )

    return shape


@dataclass(frozen=True)
class ExpertNames:
    """Where a routed expert's matrices are on disk, relative to the MoE module's *disk* prefix.

    kind "per_expert": one 2-D tensor per expert and projection; `{e}` is the expert id.
    kind "fused": gate_up and down hold all experts ([E, ...]); `transposed` says [E, in, out],
    `interleaved` says that gate and up rows alternate (gpt-oss).
    A family lists every spelling it may meet, in order of preference.
    """

    kind: Literal["per_expert", "fused"]
    gate: str = ""
    up: str = ""
    down: str = ""
    gate_up: str = ""
    gate_up_bias: str = ""
    down_bias: str = ""
    transposed: bool = False
    interleaved: bool = False


PER_EXPERT_GATE_UP_DOWN = ExpertNames(
    "per_expert",
    gate="experts.{e}.gate_proj.weight",
    up="experts.{e}.up_proj.weight",
    down="experts.{e}.down_proj.weight",
)
PER_EXPERT_W1_W3_W2 = ExpertNames(
    "per_expert", gate="experts.{e}.w1.weight", up="experts.{e}.w3.weight", down="experts.{e}.w2.weight"
)
FUSED_V5 = ExpertNames("fused", gate_up="experts.gate_up_proj", down="experts.down_proj")


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        model_type: `config.model_type` as transformers knows it.
        aliases: other `model_type`s in config.json that are rewritten to this one (kimi_k2).
        moe_class: class name of the MoE block that `ktc.FusedMoE` replaces.
        shape: config -> ExpertShape.
        experts: spellings of the routed experts on disk.
        router: attribute of the MoE block that holds the router (stays Hugging Face's own code).
        route: optional (block, hidden [T, H]) -> (weights [T, k], ids [T, k]); default calls the router.
        shared: attribute of the shared expert, or None; `shared_gate`: attribute of its sigmoid gate.
        returns_scores: the block returns (hidden, router_scores) (gpt-oss).
        renames: (regex, replacement) pairs applied in order to a disk name to get the module-tree name.
        mla: the attention is MLA; `ktc.MLAAttention` may replace it.
        rope_interleaved_out: MLA rope output stays interleaved (deepseek_v2) instead of half-split (v3).
        protected: regexes of Linear modules that a `linear` rule must leave alone.
        ignorable: regexes of disk tensors that are known to be unneeded.
        check: optional config check; raises UnsupportedModelError for values that matter and are unsupported.
    """

    model_type: str
    moe_class: str
    shape: Callable[[Config], ExpertShape]
    experts: tuple[ExpertNames, ...] = (PER_EXPERT_GATE_UP_DOWN, FUSED_V5)
    aliases: tuple[str, ...] = ()
    router: str = "gate"
    route: Callable[[Any, Any], tuple[Any, Any]] | None = None
    shared: str | None = None
    shared_gate: str | None = None
    returns_scores: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    mla: bool = False
    rope_interleaved_out: bool = False
    protected: tuple[str, ...] = ()
    ignorable: tuple[str, ...] = ()
    check: Callable[[Config], None] | None = None
    notes: str = field(default="", repr=False)
