"""Prints a program: `ktc inspect --graph`. Equal layers are shown once."""

from __future__ import annotations

import re

from ktc.graph.ir import Node, Program
from ktc.plan.names import group_name, pattern


def callback_notes(callbacks: dict[str, str]) -> tuple[str, ...]:
    """One line per reason and kind of module, for callbacks: module -> why."""
    groups: dict[tuple[str, str], list[str]] = {}
    for module, why in callbacks.items():
        groups.setdefault((pattern(module), why), []).append(module)
    return tuple(
        f"{group_name(modules)} is Hugging Face's code, called in torch: {why}" for (_, why), modules in groups.items()
    )


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.8g}"


def _line(program: Program, node: Node) -> str:
    def shape(b: int) -> str:
        buffer = program.buffers[b]
        if buffer.rows == "scratch":
            return f"{buffer.name} scratch"
        return f"{buffer.name} [{buffer.rows}, {buffer.cols}]" + (" i64" if buffer.dtype == "i64" else "")

    out = ", ".join(shape(b) for b in node.outputs)
    args = [program.buffers[b].name for b in node.inputs]
    args += [f"cache:{program.states[s].name.rpartition('.')[2]}" for s in node.states]
    args += [f"{role}={name}" for role, name in node.weights.items()]
    if node.module:
        args.append(node.module)
    args += [f"{k}={_number(v)}" for k, v in node.params.items()]
    return f"{out + ' = ' if out else ''}{node.op}({', '.join(args)})"


def _general(text: str) -> str:
    return re.sub(r"(?<=layers\.)\d+", "*", re.sub(r"\bL\d+", "L*", text))


def render(program: Program, context: int | None = None, arena: dict[str, int] | None = None) -> str:
    """One line per node; runs of equal layers are folded into their first.

    Args:
        context: positions to size the caches for; the program's own by default.
        arena: {label: bytes} of scratch to mention.
    """
    context = context or program.context
    caches = len(program.states) + sum("cache" in node.params for node in program.nodes)
    lines = [
        f"graph of {program.model_type}: {len(program.nodes)} nodes, hidden {program.hidden}, vocab {program.vocab}",
        f"caches: {caches}, {program.state_bytes(context) / 2**20:.1f} MB for {context} positions (f32)",
    ]
    lines += [f"arena, {label}: {size / 2**20:.2f} MB" for label, size in (arena or {}).items()]
    lines += [f"note: {note}" for note in program.notes]
    groups: list[tuple[int | None, list[str]]] = []
    for node in program.nodes:
        match = re.search(r"layers\.(\d+)", node.name)
        layer = int(match[1]) if match else None
        if not groups or groups[-1][0] != layer:
            groups.append((layer, []))
        groups[-1][1].append(_line(program, node))
    index = 0
    while index < len(groups):
        layer, body = groups[index]
        same = index + 1
        general = [_general(line) for line in body]
        while layer is not None and same < len(groups) and [_general(x) for x in groups[same][1]] == general:
            same += 1
        if layer is None:
            lines += ["", *body]
        else:
            last = groups[same - 1][0]
            lines += ["", f"layer {layer}:" if last == layer else f"layers {layer}-{last}:"]
            lines += [f"  {line}" for line in body]
        index = same
    return "\n".join(lines) + "\n"
