"""Checks a program before it is stored and before it is run: nothing is trusted to be well-formed.

A program that passes reads no buffer before it is written, agrees on shapes, names only weights that
exist, submits and collects each MoE layer in order, and ends in the logits. It says nothing about values.
"""

from __future__ import annotations

from collections.abc import Collection

from ktc.graph.ir import LOGITS, OPERATORS, Node, Program


class ProgramError(ValueError):
    """The program is malformed; the message names the node."""


def _fail(index: int, node: Node, why: str) -> ProgramError:
    return ProgramError(f"node {index} ({node.op} {node.name}): {why}")


def _columns(program: Program, index: int, node: Node) -> None:
    """Column counts that an operator implies, for inputs then outputs (None: any)."""
    p = {k: int(v) for k, v in node.params.items()}
    buffers = program.buffers
    want: dict[str, tuple[list[int | None], list[int | None]]] = {
        "embed": ([], [program.hidden]),
        "silu_mul": ([p.get("cols")] * 2, [p.get("cols")]),
        "sigmoid_mul": ([1, p.get("cols")], [p.get("cols")]),
        "moe_collect": ([], [p.get("hidden")]),
        "last_rows": ([p.get("cols")], [p.get("cols")]),
        "divide": ([p.get("cols")], [p.get("cols")]),
        "callback": ([p.get("cols")], [p.get("cols")]),
    }
    if node.op == "rms_norm":
        width = p["cols"] * p.get("groups", 1)
        want["rms_norm"] = ([width] * len(node.inputs), [width] * len(node.outputs))
    elif node.op == "linear":
        want["linear"] = ([p["k"]], [p["n"]])
    elif node.op == "gqa":
        q, kv, half = p["heads"] * p["head_dim"], p["kv_heads"] * p["head_dim"], p["rotary_half"]
        want["gqa"] = ([q, kv, kv, half, half], [q, None])
    elif node.op == "mla":
        q, kv, half = p["heads"] * (p["nope"] + p["rope_dim"]), p["rank"] + p["rope_dim"], p["rope_dim"] // 2
        want["mla"] = ([q, kv, half, half], [p["heads"] * p["v_dim"], None])
    elif node.op == "router":
        want["router"] = ([p["hidden"]], [p["top_k"], p["top_k"], p["experts"], None])
    elif node.op == "moe_submit":
        want["moe_submit"] = ([None, p["top_k"], p["top_k"]], [])
    if node.op not in want:
        return
    for ids, columns in zip((node.inputs, node.outputs), want[node.op], strict=True):
        for i, cols in zip(ids, columns, strict=True):
            if cols is not None and buffers[i].cols != cols:
                raise _fail(index, node, f"buffer {buffers[i].name} has {buffers[i].cols} columns, not {cols}")


def verify(program: Program, tensors: Collection[str] | None = None, moes: Collection[str] | None = None) -> None:
    """Check the whole program.

    Args:
        tensors: names of the stored tensors (module-tree names and packed X.tiles, ...); None skips the check.
        moes: MoE modules that have packed experts; None skips the check.
    Raises:
        ProgramError: the first fault found.
    """
    written: set[int] = set()
    outstanding: str | None = None
    last_seen = False
    items = [*enumerate((b.id, b.name) for b in program.buffers), *enumerate((s.id, s.name) for s in program.states)]
    for place, (number, name) in items:
        if number != place:
            raise ProgramError(f"{name} has id {number} at place {place}")
    for index, node in enumerate(program.nodes):
        op = OPERATORS.get(node.op)
        if op is None:
            raise _fail(index, node, "unknown operator")
        outputs = op.outputs + (1 if node.op == "rms_norm" and len(node.inputs) > 1 else 0)
        if not op.inputs[0] <= len(node.inputs) <= op.inputs[1] or len(node.outputs) != outputs:
            raise _fail(index, node, f"{len(node.inputs)} inputs and {len(node.outputs)} outputs do not fit")
        if len(node.states) != op.states or any(not 0 <= s < len(program.states) for s in node.states):
            raise _fail(index, node, "wrong states")
        for b in (*node.inputs, *node.outputs):
            if not 0 <= b < len(program.buffers):
                raise _fail(index, node, f"buffer {b} does not exist")
        for b in node.inputs:
            if b not in written:
                raise _fail(index, node, f"reads {program.buffers[b].name} before it is written")
        missing = [p for p in op.required if p not in node.params] + [w for w in op.weights if w not in node.weights]
        if missing:
            raise _fail(index, node, f"lacks {', '.join(missing)}")
        unknown = set(node.weights) - set(op.weights) - set(op.optional_weights)
        if unknown:
            raise _fail(index, node, f"has unknown weights {', '.join(sorted(unknown))}")
        if node.op == "callback" and node.params.get("attention") and not {"window", "cache"} <= node.params.keys():
            raise _fail(index, node, "lacks window or cache")
        if node.op == "linear" and not ({"weight", "tiles"} & set(node.weights)):
            raise _fail(index, node, "lacks a weight")
        if tensors is not None:
            for name in node.weights.values():
                if name not in tensors and name not in program.constants:
                    raise _fail(index, node, f"tensor {name} does not exist")
        for place, b in enumerate(node.outputs):
            if (program.buffers[b].rows == "scratch") != (place == op.scratch):
                raise _fail(index, node, f"output {program.buffers[b].name} is scratch where it should not be, or not")
            if b in written:
                raise _fail(index, node, f"writes {program.buffers[b].name} a second time")
        written.update(node.outputs)
        _columns(program, index, node)
        if node.op == "moe_submit":
            if outstanding is not None:
                raise _fail(index, node, f"submits before {outstanding} is collected")
            if last_seen:
                raise _fail(index, node, "follows the layer that is marked last: its deferred experts would be lost")
            if moes is not None and not node.weights and node.module not in moes:
                raise _fail(index, node, f"module {node.module} has no experts")
            outstanding, last_seen = node.module, bool(node.params["last"])
        elif node.op == "moe_collect":
            if outstanding is None:
                raise _fail(index, node, "collects what was not submitted")
            outstanding = None
    if outstanding is not None:
        raise ProgramError(f"experts of {outstanding} are never collected")
    if program.moe_modules() and not last_seen:
        raise ProgramError("no MoE layer is marked last: deferred experts would be lost")
    final = [b for b in program.buffers if b.name == LOGITS]
    if len(final) != 1 or final[0].id not in written or (final[0].rows, final[0].cols) != ("R", program.vocab):
        raise ProgramError("the program does not write logits [R, vocab]")
