"""A program: nodes over buffers, weights by tensor name, caches and position as data.

One program serves decode (T = 1) and chunked prefill (T rows): no shape depends on routing or position.
Written at compile time (lower.py), stored in the bundle as graph/program.json, checked by verify.py,
printed by render.py, given addresses by arena.py and replayed natively (build.py). It is not a tensor
language: an operator is one of `OPERATORS`, each of which is one fused native node.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

FORMAT_VERSION = 1

Rows = Literal["T", "R", "scratch"]
"""T: tokens of the step; R: rows whose logits are wanted (1 <= R <= T); scratch: sized by its node's operator."""

BufferType = Literal["f32", "i64"]
ELEMENT_BYTES: dict[BufferType, int] = {"f32": 4, "i64": 8}

LOGITS = "logits"
"""Name of the buffer that belongs to the caller and is never in the arena."""


@dataclass(frozen=True)
class Operator:
    """What the verifier knows of an operator: counts are (least, most)."""

    inputs: tuple[int, int]
    outputs: int
    states: int = 0
    required: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    optional_weights: tuple[str, ...] = ()
    scratch: int | None = None  # index of the output that is scratch


_LINEAR = ("weight", "bias", "tiles", "scale", "mult")
OPERATORS: dict[str, Operator] = {
    "embed": Operator((0, 0), 1, weights=("weight",)),
    "rope_table": Operator((0, 0), 2, weights=("inv_freq",)),
    "rms_norm": Operator((1, 3), 1, required=("cols", "eps"), weights=("weight",)),  # 2 outputs with deltas
    "linear": Operator((1, 1), 1, required=("n", "k"), optional_weights=_LINEAR),
    "silu_mul": Operator((2, 2), 1, required=("cols",)),
    "sigmoid_mul": Operator((2, 2), 1, required=("cols",)),
    "gqa": Operator(
        (5, 5), 2, 2, ("heads", "kv_heads", "head_dim", "rotary_half", "window", "rope", "scale"),
        optional_weights=("q_norm", "k_norm", "sinks"), scratch=1,
    ),
    "mla": Operator(
        (4, 4), 2, 1, ("heads", "nope", "rope_dim", "v_dim", "rank", "rope", "scale", "norm_eps"),
        weights=("kv_norm", "kv_b"), scratch=1,
    ),
    "router": Operator(
        (1, 1), 4, required=("hidden", "experts", "top_k", "score", "group_score"), weights=("weight",),
        optional_weights=("bias", "choice_bias"), scratch=3,
    ),
    "moe_submit": Operator(
        (3, 3), 0, required=("top_k", "last"), optional_weights=("gate_up", "down", "gate_up_bias", "down_bias")
    ),
    "moe_collect": Operator((0, 0), 1, required=("hidden",)),
    "last_rows": Operator((1, 1), 1, required=("cols",)),
    "divide": Operator((1, 1), 1, required=("cols", "divisor")),
    "callback": Operator((1, 1), 1, required=("cols",)),
}  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """`rows` x `cols` elements, row-major. Scratch has no columns."""

    id: int
    name: str
    rows: Rows
    cols: int
    dtype: BufferType = "f32"

    @property
    def row_bytes(self) -> int:
        return self.cols * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class State:
    """A cache: `floats_per_position` f32 for every position of the context; the layout is its operator's."""

    id: int
    name: str
    floats_per_position: int


@dataclass(frozen=True)
class Node:
    """One operator.

    Attributes:
        op: a key of OPERATORS.
        name: the module it stands for.
        inputs, outputs: buffer ids. `states`: state ids.
        params: numbers only, so that a node means the same in JSON, Python and C++.
        weights: role -> tensor name (module-tree name, or packed X.tiles and so on), or a constant's name.
        module: for moe_submit and callback: the module whose experts or code run. A moe_submit without weights runs
            packed experts, one with weights the unpacked matrices of a block that no rule matched. A callback with
            `attention` = 1 is given positions and a cache: `window` as in gqa, and `cache` is how many floats of a
            position it will keep.
    """

    op: str
    name: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    params: dict[str, float] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    module: str = ""


@dataclass(frozen=True)
class Program:
    """The whole step, from token ids to logits.

    Attributes:
        context: most positions that the model was made for; a run may choose fewer.
        constants: small f32 vectors that are in no checkpoint (rotary frequencies).
        notes: what a reader should know (callback modules and why).
    """

    model_type: str
    hidden: int
    vocab: int
    context: int
    buffers: tuple[Buffer, ...]
    states: tuple[State, ...]
    nodes: tuple[Node, ...]
    constants: dict[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    def callbacks(self) -> list[str]:
        """Modules that need Hugging Face's code, and so torch, at run time."""
        return [n.module for n in self.nodes if n.op == "callback"]

    def moe_modules(self) -> list[str]:
        return [n.module for n in self.nodes if n.op == "moe_submit"]

    def with_fp32_attention(self) -> Program:
        """The same program, but attention of many rows multiplies in fp32."""
        nodes = tuple(replace(n, params={**n.params, "bf16": 0}) if n.params.get("bf16") else n for n in self.nodes)
        return replace(self, nodes=nodes)

    def state_bytes(self, context: int) -> int:
        """Of all caches, those of callbacks included."""
        called = sum(int(n.params.get("cache", 0)) for n in self.nodes if n.op == "callback")
        return 4 * context * (sum(s.floats_per_position for s in self.states) + called)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Program:
        """Inverse of to_json.

        Raises:
            ValueError: another format version, or a field that is not of its type.
        """
        if not isinstance(data, dict):
            raise ValueError("not a graph")
        if data.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"graph format {data.get('format_version')} is not {FORMAT_VERSION}")
        tuples = ("inputs", "outputs", "states")
        made = cls(
            **{
                **data,
                "buffers": tuple(Buffer(**b) for b in data["buffers"]),
                "states": tuple(State(**s) for s in data["states"]),
                "nodes": tuple(Node(**{**n, **{t: tuple(n[t]) for t in tuples}}) for n in data["nodes"]),
                "constants": {k: tuple(v) for k, v in data["constants"].items()},
                "notes": tuple(data["notes"]),
            }
        )
        made._check_types()
        return made

    def _check_types(self) -> None:
        """Everything has the type that the class says; what the values mean is verify.py's and the executor's."""
        whole: list[Any] = [self.hidden, self.vocab, self.context]
        numbers: list[Any] = [v for vector in self.constants.values() for v in vector]
        texts = [self.model_type, *self.constants, *self.notes]
        for buffer in self.buffers:
            whole += [buffer.id, buffer.cols]
            texts.append(buffer.name)
            if buffer.rows not in get_args(Rows) or buffer.dtype not in get_args(BufferType):
                raise ValueError(f"buffer {buffer.id!r} has rows {buffer.rows!r} of {buffer.dtype!r}")
        for state in self.states:
            whole += [state.id, state.floats_per_position]
            texts.append(state.name)
        for node in self.nodes:
            whole += [*node.inputs, *node.outputs, *node.states]
            numbers += node.params.values()
            whole += [node.params[k] for k in ("window", "cache") if node.op == "callback" and k in node.params]
            texts += [node.op, node.name, node.module, *node.params, *node.weights, *node.weights.values()]
        for count in whole:
            if type(count) is not int or not 0 <= count < 1 << 40:
                raise ValueError(f"{count!r} where a count or an id belongs")
        for number in numbers:
            if type(number) not in (int, float):
                raise ValueError(f"{number!r} where a number belongs")
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"{text!r} where a name belongs")
