"""Does the checkpoint hold exactly what the model needs? Names and shapes only; no weights are decoded.

Every tensor on disk is a parameter of a module, part of a routed expert, or known to be unneeded;
every parameter is there in its shape. Anything else is an error that names the first few: a tensor that
nothing consumes is usually a model that was understood wrongly. Needs no torch: what the model expects
is given by the caller (`expected_of(plan)`, or any name -> shape mapping).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ktc.checkpoint.checkpoint import Checkpoint
from ktc.checkpoint.experts import ExpertReader
from ktc.checkpoint.safetensors_file import same_bytes
from ktc.errors import CheckpointError
from ktc.models.family import ExpertShape, Family
from ktc.models.names import tree_to_disk
from ktc.plan.ir import Plan

Shape = tuple[int, ...]

WEIGHT_DTYPES = frozenset({"fp32", "bf16", "fp16", "fp8", "int4", "mxfp4"})
MTP = "multi-token prediction"
# Tensors that no module of ours reads, whatever the family, and why.
_IGNORABLE: tuple[tuple[str, str], ...] = (
    (r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$", "rotary tables, computed from the config"),
    (r"\.(input|output|k|v|q|kv)_scale$", "scales of quantised activations and caches, which ktc does not use"),
    (r"^(model\.)?mtp[._]", MTP),
)
_SHOWN = 4


@dataclass
class Audit:
    """The result of `audit`.

    Attributes:
        readers: a checked reader of every MoE block, by module name.
        ignored: reason -> disk names that are known to be unneeded.
        nbytes: bytes on disk of what is needed, scales included.
        ignored_bytes: bytes on disk of what is not.
    """

    readers: dict[str, ExpertReader] = field(default_factory=dict)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    nbytes: int = 0
    ignored_bytes: int = 0

    def lines(self) -> list[str]:
        """What was left out, one line per reason, for the user."""
        return [
            f"skipped {len(names)} tensor{'s' if len(names) > 1 else ''} ({reason}): {_some(names, 1)}"
            for reason, names in self.ignored.items()
        ]


def expected_of(plan: Plan) -> dict[str, Shape]:
    """Module-tree name -> shape of everything the plan reads besides routed experts and tied parameters."""
    out: dict[str, Shape] = {}
    for module in plan.modules:
        if module.role == "experts":
            continue
        prefix = f"{module.name}." if module.name else ""
        out.update({prefix + name: shape for name, (shape, _) in module.params.items()})
        if module.linear is not None:
            out[f"{module.name}.weight"] = (module.linear.n, module.linear.k)
            if module.linear.bias:
                out[f"{module.name}.bias"] = (module.linear.n,)
    return {name: shape for name, shape in out.items() if name not in plan.tied}


def moe_blocks_of(plan: Plan) -> list[str]:
    """Module names of the MoE blocks, replaced or not."""
    blocks = {m.name for m in plan.modules if m.role == "moe"}
    blocks |= {m.name.rpartition(".")[0] for m in plan.modules if m.role == "experts"}
    return sorted(blocks, key=lambda name: [int(p) if p.isdigit() else -1 for p in name.split(".")])


def audit(
    checkpoint: Checkpoint,
    family: Family,
    expected: Mapping[str, Shape],
    moe_blocks: Iterable[str],
    shape: ExpertShape,
    layers: int,
    tied: Mapping[str, str] | None = None,
) -> Audit:
    """Check the checkpoint against what the model needs.

    Args:
        expected: module-tree name -> shape of every parameter; experts' containers and tied ones may be in it
            and are left to `moe_blocks` and `tied`.
        moe_blocks: module names of the MoE blocks.
        layers: num_hidden_layers; what lies beyond are multi-token prediction layers, which ktc does not run.
        tied: tied parameter -> the one that is stored.
    Raises:
        CheckpointError: a tensor that nothing consumes, a parameter or expert that is missing, a shape or
            data type that does not fit, a tied parameter stored with a value of its own.
    """
    names = tree_to_disk(family, checkpoint.names())
    tied = tied or {}
    out = Audit()
    used: set[str] = set()
    containers = []
    for block in moe_blocks:
        reader = ExpertReader(checkpoint, family, block, shape, names)
        out.readers[block] = reader
        used.update(reader.tensors())
        containers.append(f"{block}.experts.")
    needed = {n: s for n, s in expected.items() if n not in tied and not n.startswith(tuple(containers))}
    _check_present(checkpoint, names, needed)
    used.update(needed)
    leftover: list[str] = []
    for tree, disk in names.items():
        info = checkpoint.info(disk)
        if tree in used:
            if info.dtype not in WEIGHT_DTYPES:
                raise CheckpointError(
                    f"{info.file}: tensor {disk!r} has data type {info.dtype}, which is no weight type that ktc reads",
                    hint=f"ktc reads {', '.join(sorted(WEIGHT_DTYPES))}",
                )
            out.nbytes += info.nbytes
            continue
        reason = _reason(checkpoint, family, names, tied, tree, layers)
        if reason is None:
            leftover.append(disk)
        else:
            out.ignored.setdefault(reason, []).append(disk)
            out.ignored_bytes += info.nbytes
    if leftover:
        raise CheckpointError(
            f"{checkpoint.path}: {len(leftover)} tensors that no module of {family.model_type} reads:"
            f" {_some(leftover)}",
            hint="the config does not describe these weights, or the family lacks a rename or an ignorable pattern;"
            " see docs/adding-a-model.md",
        )
    return out


def audit_plan(checkpoint: Checkpoint, family: Family, plan: Plan, shape: ExpertShape) -> Audit:
    """`audit` with everything taken from a plan."""
    return audit(checkpoint, family, expected_of(plan), moe_blocks_of(plan), shape, plan.layers, plan.tied)


def _check_present(checkpoint: Checkpoint, names: Mapping[str, str], needed: Mapping[str, Shape]) -> None:
    missing = [name for name in needed if name not in names]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} parameters of the model are not in the checkpoint: {_some(missing)}",
            hint="config.json and weights do not belong together, or the download is incomplete",
        )
    for name, shape in needed.items():
        info = checkpoint.info(names[name])
        if info.shape != tuple(shape):
            raise CheckpointError(
                f"{info.file}: tensor {names[name]!r} is {list(info.shape)}; the config asks for {list(shape)}",
                hint="config.json and weights do not belong together",
            )


def _reason(
    checkpoint: Checkpoint,
    family: Family,
    names: Mapping[str, str],
    tied: Mapping[str, str],
    tree: str,
    layers: int,
) -> str | None:
    """Why a tensor that nothing consumes may be left out; None if it may not."""
    layer = re.match(r"model\.layers\.(\d+)\.", tree)
    if layer and int(layer[1]) >= layers:
        return f"{MTP} layer {layer[1]}: the model has {layers} layers"
    for pattern, reason in _IGNORABLE:
        if re.search(pattern, tree):
            return reason
    if any(re.search(pattern, names[tree]) for pattern in family.ignorable):
        return f"not part of the text model of {family.model_type}"
    if tree in tied:
        source = names.get(tied[tree])
        mine, other = checkpoint.raw.get(names[tree]), checkpoint.raw.get(source or "")
        if mine is None or other is None or not same_bytes(mine, other):
            raise CheckpointError(
                f"{checkpoint.path}: config.json ties {tree!r} to {tied[tree]!r}, but the checkpoint stores another"
                " value for it",
                hint="set tie_word_embeddings to false in config.json if the two are meant to differ",
            )
        return f"tied to {tied[tree]}"
    return None


def _some(names: list[str], shown: int = _SHOWN) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
