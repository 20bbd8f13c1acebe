"""Program + costs -> what the device does around each MoE block, and for how long. Arithmetic only.

A block's share of the device is what lies between two points at which it waits for the experts: attention of its
layer (and of dense layers before it) and the copy out, then the shared experts, then the copy back and the additions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ktc.errors import KtcError
from ktc.graph.ir import Node, Program
from ktc.simulate.costs import Costs
from ktc.simulate.hardware import ProfileError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
BlockNodes = tuple[int, int, int, int, int, int, int, int]
"""(submit node, collect node, buffers of x, weights, ids and y, top_k, hidden), as `_runtime.EmulatedLane` takes it."""


@dataclass(frozen=True)
class Work:
    """Something that keeps the device busy: kind as in `ktc.simulate.schedule`, layer, seconds."""

    kind: str
    layer: int
    seconds: float


@dataclass(frozen=True)
class BlockScript:
    """The device around one MoE block, seconds.

    Attributes:
        before: up to the copy out, in order; the last entry is the block's own attention.
        copy: of one copy over the link; there is one before the submit callback and one after the sync.
    """

    layer: int
    before: tuple[Work, ...]
    copy: float
    shared: float
    merge: float

    def times(self) -> tuple[int, int, int]:
        """ns before the submit callback, between the callbacks, and after the sync callback."""
        head = sum(work.seconds for work in self.before) + self.copy
        return round(head * 1e9), round(self.shared * 1e9), round((self.copy + self.merge) * 1e9)


@dataclass(frozen=True)
class Script:
    """A whole decode step: MoE blocks in order, and what the device does after the last."""

    blocks: tuple[BlockScript, ...]
    tail: tuple[Work, ...]

    def tail_ns(self) -> int:
        return round(sum(work.seconds for work in self.tail) * 1e9)

    @property
    def device_seconds(self) -> float:
        """Of a MoE layer, averaged: what the device works for it, its dense neighbours not counted."""
        own = [b.before[-1].seconds + b.shared + b.merge for b in self.blocks]
        return sum(own) / len(own)


def layer_of(module: str) -> int:
    found = _LAYER.search(module)
    if found is None:
        raise KtcError(f"{module} is in no layer that can be numbered, so its device time is not known")
    return int(found[1])


def block_nodes(program: Program) -> list[BlockNodes]:
    """Where a program hands experts over and takes them back.

    Raises:
        KtcError: no MoE block, or experts that are not packed (they run on the calling thread, not in the pool).
    """
    found: list[BlockNodes] = []
    pending: tuple[int, Node] | None = None
    for index, node in enumerate(program.nodes):
        if node.op == "moe_submit":
            if node.weights:
                raise KtcError(
                    f"{node.module} has unpacked experts: they do not run on the expert pool, so there is nothing to"
                    " overlap with",
                    "compile with a recipe whose rule `role: moe` matches them",
                )
            pending = index, node
        elif node.op == "moe_collect" and pending is not None:
            at, submit = pending
            x, weights, ids = submit.inputs
            top_k, hidden = int(submit.params["top_k"]), int(node.params["hidden"])
            found.append((at, index, x, weights, ids, node.outputs[0], top_k, hidden))
            pending = None
    if not found:
        raise KtcError("the model has no MoE block, so there is nothing to divide between CPU and device")
    return found


def build_script(program: Program, costs: Costs) -> Script:
    """What `costs` (ktc.simulate, of the same plan) mean for this program.

    Raises:
        ProfileError: the profile has no device of its own. KtcError: layers of program and costs differ.
    """
    if costs.shared_lane:
        raise ProfileError(
            "the profile has no device of its own (device.kind: cpu), so there is nothing to emulate",
            "use a profile with device.kind: cuda; the shipped ones: ktc simulate --help",
        )
    moe_layers = [layer_of(module) for module in program.moe_modules()]
    if moe_layers != [c.index for c in costs.layers if c.top_k]:
        raise KtcError(f"the program has MoE blocks in layers {moe_layers}, the plan elsewhere")
    blocks: list[BlockScript] = []
    before: list[Work] = []
    for cost in costs.layers:
        before.append(Work("attention", cost.index, cost.attention))
        if cost.top_k:
            blocks.append(BlockScript(cost.index, tuple(before), costs.copy, cost.shared, cost.merge))
            before = []
    return Script(tuple(blocks), (*before, Work("head", len(costs.layers), costs.head)))
