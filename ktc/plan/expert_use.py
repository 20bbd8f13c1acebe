"""How often each routed expert of a model was chosen: what `ktc profile` writes and `hot_profile` reads.

A JSON file with the shape of the model, the text, and one list of counts per layer. Not here: counting
(ktc/eval/routing.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktc.errors import DiskError, KtcError
from ktc.plan.ir import MoePlan

SCHEMA = "ktc-expert-use/1"
MAX_BYTES = 64 << 20
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_AGAIN = "make it with ktc profile BUNDLE --text FILE"


def layer_number(module: str) -> int:
    """`model.layers.3.mlp` -> 3."""
    found = _LAYER.search(module)
    if found is None:
        raise KtcError(f"{module}: no layer number in the name of this MoE block")
    return int(found[1])


@dataclass(frozen=True)
class ModelShape:
    """What a profile and a model must have in common. Two models of one shape cannot be told apart."""

    model_type: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @classmethod
    def of(cls, model_type: str, layers: int, moe: MoePlan) -> ModelShape:
        return cls(model_type, layers, moe.experts, moe.top_k, moe.hidden, moe.intermediate)


@dataclass(frozen=True)
class ExpertUse:
    """Counts of a text.

    Attributes:
        text: what the text was, in words.
        tokens: of the text, as the model saw them; each chooses top_k experts in every MoE layer.
        layers: layer number -> uses of each of its experts.
        sha256: of the file it was read from, "" for one just made.
    """

    model: ModelShape
    text: str
    tokens: int
    layers: dict[int, tuple[int, ...]]
    sha256: str = ""

    def hottest(self, layer: int, n: int) -> tuple[int, ...]:
        """The n most used experts of a layer, ascending by id; of equally used ones the lower ids."""
        counts = self.layers[layer]
        return tuple(sorted(sorted(range(len(counts)), key=lambda e: (-counts[e], e))[:n]))

    def share(self, layer: int, experts: tuple[int, ...]) -> float:
        """The part of a layer's uses that these experts take, from 0 to 1."""
        counts = self.layers[layer]
        return sum(counts[e] for e in experts) / max(1, sum(counts))

    def to_json(self) -> dict[str, Any]:
        layers = {str(layer): list(counts) for layer, counts in sorted(self.layers.items())}
        return {"schema": SCHEMA, "model": asdict(self.model), "text": self.text, "tokens": self.tokens,
                "layers": layers}  # fmt: skip

    def write(self, path: Path) -> None:
        """
        Raises:
            DiskError: it cannot be written.
        """
        from ktc.pack.writer import write_atomic

        if path.is_dir():
            raise DiskError(f"{path} is a directory")
        write_atomic(path, (json.dumps(self.to_json(), indent=1) + "\n").encode())


def read_expert_use(path: Path) -> ExpertUse:
    """
    Raises:
        KtcError: it cannot be read, or is not what `ktc profile` writes; the message starts with the path.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise KtcError(f"{path}: cannot be read: {error.strerror}", _AGAIN) from error
    try:
        raw = json.loads(data)
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError(f"no schema {SCHEMA}")
        model = ModelShape(**raw["model"])
        layers = {int(layer): tuple(counts) for layer, counts in raw["layers"].items()}
        _check(model, layers)
        return ExpertUse(model, str(raw["text"]), int(raw["tokens"]), layers, hashlib.sha256(data).hexdigest())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise KtcError(f"{path}: not a profile of expert use: {why}", _AGAIN) from error


def _check(model: ModelShape, layers: dict[int, tuple[int, ...]]) -> None:
    for layer, counts in layers.items():
        if len(counts) != model.experts:
            raise ValueError(f"layer {layer} has {len(counts)} counts, the model {model.experts} experts")
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"layer {layer} has counts that are not whole numbers of 0 or more")
