"""What a parsed recipe is: plain frozen data, still independent of any model. No parsing here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ktc.layout import DataType

ScaleChoice = Literal["float", "integer", "codebook"]
Operator = Literal["moe", "linear", "mla", "embedding", "hf"]

OPERATOR_OF_CLASS: dict[str, Operator] = {
    "ktc.FusedMoE": "moe",
    "ktc.Linear": "linear",
    "ktc.MLAAttention": "mla",
    "ktc.Embedding": "embedding",
    "default": "hf",
}
_TORCH_NN = re.compile(r"^torch\.nn\.modules\.\w+\.(\w+)$")


@dataclass(frozen=True)
class Match:
    """Which modules a rule is for. All given keys must hold.

    Attributes:
        name: searched in the module path (`re.search`: anchor with ^ and $ for a whole match).
        cls: dotted suffix of the module's class, in whole components; torch.nn.X also stands for the
            file it is defined in.
        role: role that the family gives to the module.
    """

    name: re.Pattern[str] | None = None
    cls: str | None = None
    role: str | None = None

    def __call__(self, name: str, hf_class: str, role: str) -> bool:
        return (
            (self.role is None or self.role == role)
            and (self.cls is None or _is_suffix(self.cls, hf_class))
            and (self.name is None or self.name.search(name) is not None)
        )

    def __str__(self) -> str:
        parts = []
        if self.name is not None:
            parts.append(f"name={self.name.pattern}")
        if self.cls is not None:
            parts.append(f"class={self.cls}")
        if self.role is not None:
            parts.append(f"role={self.role}")
        return " ".join(parts)


def _is_suffix(suffix: str, hf_class: str) -> bool:
    names = [hf_class]
    if torch_nn := _TORCH_NN.match(hf_class):
        names.append(f"torch.nn.{torch_nn[1]}")
    return any(n == suffix or n.endswith("." + suffix) for n in names)


@dataclass(frozen=True)
class SchemeChoice:
    """The data type that a rule asks for, before the shapes are known.

    Attributes:
        group: columns per scale; 0 = the whole row ("channel").
        scale: "float" is one float per group (or row). int4 only: "integer" is integer group multipliers, and
            "codebook" a choice of uneven levels per group, both under one float per row.
        fallback: tried in order where `group` does not divide K; "pad" ends the list. Empty = refuse.
    """

    data_type: DataType
    group: int = 0
    scale: ScaleChoice = "float"
    fallback: tuple[int | Literal["pad"], ...] = ()


@dataclass(frozen=True)
class Rule:
    """One match -> replace rule.

    Attributes:
        index: position in the recipe, from 0.
        line: 1-based line of the rule in the file.
        device: where the module's weights live, or None = as its parent.
        scheme: for ktc.FusedMoE and ktc.Linear.
        hot_experts: how many of the most used experts of each layer the block's device takes, by the counts in
            `hot_profile` (as written; relative to the recipe's folder). 0 and "": none.
        callback: for default: Hugging Face's code runs in the decode graph too.
        kv_cache: of an attention module: "host" for host memory, "" where the module is.
    """

    index: int
    line: int
    match: Match
    operator: Operator
    replace_class: str
    device: str | None = None
    optional: bool = False
    recursive: bool = True
    scheme: SchemeChoice | None = None
    backend: str = "auto"
    n_deferred_experts: int | Literal["auto"] = 0
    hot_experts: int = 0
    hot_profile: str = ""
    callback: bool = False
    kv_cache: Literal["", "host"] = ""


@dataclass(frozen=True)
class Recipe:
    """A whole recipe.

    Attributes:
        file: name for messages.
        text: the file as given (stored in the bundle as recipe.yaml).
        sha256: of `text` in UTF-8, hex.
    """

    file: str
    text: str
    sha256: str
    name: str
    description: str
    rules: tuple[Rule, ...]

    def where(self, rule: Rule) -> str:
        """`rule 3 (int4.yaml:17)`."""
        return f"rule {rule.index + 1} ({self.file}:{rule.line})"
