"""A plan as text for people: one row per kind of module, totals per place, rules, notes. JSON is `Plan.to_json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ktc.layout import split_note
from ktc.plan.caches import SHOWN_POSITIONS, cache_bytes
from ktc.plan.ir import ModulePlan, MoePlan, Plan
from ktc.plan.names import group_name, pattern
from ktc.plan.stages import Placement, place
from ktc.progress import format_bytes

_NO_RULE = "rule -: no rule matched; stays Hugging Face's, and the decode graph reads its weights as stored"


def render(plan: Plan, verbose: bool = False) -> str:
    """The plan as a table.

    Args:
        verbose: one row per module instead of one per group of identical modules over the layers.
    """
    groups = [[m] for m in plan.modules] if verbose else _grouped(plan.modules)
    rows = [_row(plan, group) for group in groups]
    head = ("module", "count", "becomes", "device", "bytes", "rule")
    parts = [
        f"{plan.model_type} ({plan.architecture}), {plan.layers} layers, recipe {plan.recipe or '-'},"
        f" {plan.nodes} node{'s' if plan.nodes > 1 else ''}",
        _table(head, rows, right={1, 4}),
        "bytes per place\n" + _table(None, list(_totals(plan)), right={1}),
    ]
    if plan.rules:
        parts.append("rules\n" + _table(None, [_rule_row(plan, i) for i in range(len(plan.rules))], right=set()))
    if notes := _notes(plan):
        parts.append("notes\n" + "\n".join(f"  {n}" for n in notes))
    return "\n\n".join(parts)


def _grouped(modules: Iterable[ModulePlan]) -> list[list[ModulePlan]]:
    """Modules that differ in their layer number only, in the order of their first."""
    groups: dict[object, list[ModulePlan]] = {}
    for m in modules:
        params = tuple(sorted(m.params.items()))
        alike = replace(m, name=pattern(m.name), params={})
        if m.moe is not None:  # which experts are hot differs, how many does not
            alike = replace(alike, moe=replace(m.moe, hot=tuple(range(len(m.moe.hot))), hot_share=0.0))
        key = (repr(alike), params)
        groups.setdefault(key, []).append(m)
    return list(groups.values())


def _row(plan: Plan, group: Sequence[ModulePlan]) -> tuple[str, ...]:
    m = group[0]
    total = sum(g.nbytes for g in group)
    if m.moe is not None:
        total += sum(_expert_bytes(g.moe) for g in group if g.moe is not None)
    return (
        group_name([m.name for m in group]),
        str(len(group)),
        _becomes(m),
        m.device,
        format_bytes(total) if total else "-",
        "-" if m.rule is None else str(m.rule + 1),
    )


def _becomes(m: ModulePlan) -> str:
    star = " *" if _texts(m) else ""
    if m.moe is not None:
        return f"ktc.FusedMoE {m.moe.experts} x [{m.moe.hidden}, {m.moe.intermediate}] {m.moe.scheme}{star}"
    if m.linear is not None:
        return f"ktc.Linear [{m.linear.n}, {m.linear.k}] {m.linear.scheme}{star}"
    if m.operator == "mla":
        return f"ktc.MLAAttention{star}"
    types = "/".join(sorted({dtype for _, dtype in m.params.values()}))
    if m.operator == "embedding":
        return f"ktc.Embedding {_shape(m)} {types}{star}"
    kept = " (kept)" if m.rule is not None else " (protected)" if m.role == "protected_linear" else ""
    return f"HF {m.hf_class.rpartition('.')[2]}{kept} {_shape(m)} {types}{star}".replace("  ", " ").rstrip()


def _shape(m: ModulePlan) -> str:
    shapes = [list(shape) for shape, _ in m.params.values()]
    return str(shapes[0]) if len(shapes) == 1 else f"{len(shapes)} tensors" if shapes else ""


def _expert_bytes(moe: MoePlan) -> int:
    return sum(moe.node_bytes(node) for node in range(len(moe.splits)))


def _totals(plan: Plan) -> Iterable[tuple[str, str, str]]:
    blocks = [m.moe for m in plan.modules if m.moe is not None]
    for node in range(plan.nodes if blocks else 0):
        slices = sorted({b.splits[node] for b in blocks})
        where = ", ".join(f"{a}..{b}" for a, b in slices)
        yield f"experts, node {node}", format_bytes(plan.expert_bytes(node)), f"intermediate columns {where}"
    placed = place(plan) if len(plan.cuda_devices()) > 1 else None
    for device, nbytes in plan.device_bytes().items():
        hot = sum(b.moe.hot_bytes for b in plan.modules if b.device == device and b.moe is not None)
        ours = sum(m.nbytes for m in plan.modules if m.device == device and m.operator != "hf")
        text = f"ktc operators {format_bytes(ours)}, Hugging Face modules {format_bytes(nbytes - ours - hot)}"
        if hot:
            text += f", hot experts {format_bytes(hot)} (bf16)"
        if placed is not None and device in placed.devices:
            text += f": {_units(placed, device)}"
        yield f"device {device}", format_bytes(nbytes), text
    if plan.uses_cuda():
        yield from _caches(plan)
    total = sum(map(_expert_bytes, blocks)) + sum(plan.device_bytes().values())
    yield "total", format_bytes(total), _expert_summary(blocks)


def _units(placed: Placement, device: str) -> str:
    """ "layers 0-29, model.embed_tokens" of a device in a pipeline."""
    stages = [s for s in placed.stages if s.device == device]
    layers = sorted(i for s in stages for i in s.layers)
    others = [unit for stage in stages for unit in stage.others]
    spans = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}" if layers else ""
    return ", ".join(filter(None, (spans, *others)))


def _caches(plan: Plan) -> Iterable[tuple[str, str, str]]:
    """Of devices; they are not part of the total."""
    for device, caches in cache_bytes(plan).items():
        text = f"{SHOWN_POSITIONS} positions of {caches.layers} layers in 16 bits, not in the total"
        if caches.host:
            text += f"; {format_bytes(caches.plain)} without kv_cache: host"
        yield f"KV cache, {device}", format_bytes(caches.device), text
        if caches.host:
            count = f"{caches.host_layers} of the layers of {device}; a token reads up to as much over PCIe"
            yield "KV cache, host", format_bytes(caches.host), count


def _expert_summary(blocks: Sequence[MoePlan]) -> str:
    if not blocks:
        return "no module became ktc.FusedMoE: Hugging Face's own experts run"
    weights = sum(3 * b.experts * b.hidden * b.intermediate for b in blocks)
    bits = 8 * sum(map(_expert_bytes, blocks)) / weights
    first = blocks[0]
    share = sum(b.hot_share for b in blocks) / len(blocks)
    hot = f" {len(first.hot)} hot on the device ({share:.0%} of the uses)," if first.hot else ""
    return (
        f"{len(blocks)} layers x {first.experts} experts, top {first.top_k}, deferred {first.n_deferred_experts},{hot}"
        f" {bits:.2f} bits per expert weight, backend {first.backend}"
    )


def _rule_row(plan: Plan, index: int) -> tuple[str, ...]:
    rule = plan.rules[index]
    count = f"{rule.modules} module{'s' if rule.modules != 1 else ''}"
    if rule.protected:
        count += f", {rule.protected} protected"
    if rule.replace == "default":
        count += ", kept as Hugging Face's own"
    return (rule.where, rule.match, f"-> {rule.replace}", count)


def _notes(plan: Plan) -> list[str]:
    """Each kind of note once, with how many modules and bytes it is about (failure S3: no silent fallback)."""
    noted: dict[str, list[ModulePlan]] = {}
    for m in plan.modules:
        for text in _texts(m):
            noted.setdefault(text, []).append(m)
    out = [_note(text, group) for text, group in noted.items()]
    if any(m.rule is None for m in plan.modules):
        out.append(_NO_RULE)
    return [f"* {text}" if text != _NO_RULE else text for text in out]


def _texts(m: ModulePlan) -> list[str]:
    uneven = split_note(m.moe.splits) if m.moe is not None else ""
    return [text for text in (m.note, f"split {uneven}" if uneven else "") if text]


def _note(text: str, group: Sequence[ModulePlan]) -> str:
    stored = sum(m.nbytes + (_expert_bytes(m.moe) if m.moe is not None else 0) for m in group)
    names = [group_name([m.name for m in g]) for g in _grouped(group)]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown}: {text} ({len(group)} module{'s' if len(group) > 1 else ''}, {format_bytes(stored)})"


def _table(head: Sequence[str] | None, rows: Sequence[Sequence[str]], right: set[int]) -> str:
    lines = [*([head] if head else []), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def pad(i: int) -> Callable[[str], str]:
        return (lambda s: s.rjust(widths[i])) if i in right else (lambda s: s.ljust(widths[i]))

    indent = "" if head else "  "
    return "\n".join(indent + "  ".join(pad(i)(cell) for i, cell in enumerate(line)).rstrip() for line in lines)
