"""A `Simulation` as a table, as JSON and as timelines. No arithmetic of its own beyond ratios."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ktc.simulate.schedule import DEVICE, HOST, LINK, cpu_lane
from ktc.simulate.sweep import Row, Simulation
from ktc.simulate.trace import Span

_NUMA = {
    "tp": "experts split over the sockets' own memory",
    "unaware": "memory placed without regard to sockets",
    "single": "one socket only",
}


def render(sim: Simulation) -> str:
    """The table that `ktc simulate` prints."""
    base, best = sim.rows[0], sim.rows[sim.auto]
    moe = sim.plan.moe_modules()
    cpu = sim.hardware.cpu
    bits = moe[0].moe.scheme if moe[0].moe else ""
    lines = [
        f"{sim.plan.model_type}, {sim.plan.layers} layers, {len(moe)} with experts ({bits}), recipe {sim.plan.recipe}",
        f"on {sim.hardware.name}: {cpu.sockets} x {cpu.cores} core{'s' * (cpu.cores != 1)}, {sim.hardware.device.name};"
        f" {_NUMA[sim.numa]}; kernels {sim.kernels}",
        "",
        f"decode, one sequence, {sim.context} tokens in the cache; K experts of every layer are added one layer later",
        "",
        "    K  immediate  layer ms         tokens/s          CPU  device  both  idle",
    ]
    for index, row in enumerate(sim.rows):
        mark = "*" if index == sim.auto else " "
        lines.append(
            f"  {mark} {row.deferred:<2} {sim.decode.max_deferred + 2 - row.deferred:>9}"
            f"  {row.layer_seconds * 1e3:>8.3f} {_change(row.layer_seconds, base.layer_seconds):>6}"
            f" {row.tokens_per_second:>9.2f} {_change(base.token_seconds, row.token_seconds):>6}"
            f" {row.layer.cpu:>8.1%} {row.layer.device:>7.1%} {row.layer.both:>5.1%} {row.layer.idle:>5.1%}"
        )
    lines += ["", f"  * n_deferred_experts: auto takes {best.deferred}{_why(sim)}"]
    if asked := _asked(sim):
        lines.append(f"    the recipe says {asked}")
    lines += [
        "  layer ms and the shares are of a MoE layer in the middle of the model, tokens/s of the whole step;",
        "  idle: neither the CPU nor the device works (copies, callbacks, waiting)",
        "",
        f"prefill of {sim.prompt} tokens: {sim.prefill_seconds:.2f} s, {sim.prompt / sim.prefill_seconds:.0f} tokens/s",
    ]
    lines += [f"note: {note}" for note in sim.notes]
    return "\n".join(lines)


def _change(new: float, old: float) -> str:
    return "" if new == old else f"{new / old - 1:+.0%}"


def _why(sim: Simulation) -> str:
    if sim.decode.shared_lane:
        return ": the experts' own cores are the device, so there is nothing to overlap with"
    if sim.auto < len(sim.rows) - 1:
        return ": more would gain less than 1%"
    return ": the most that leaves two immediate"


def _asked(sim: Simulation) -> str:
    asked = sorted({str(m.moe.n_deferred_experts) for m in sim.plan.moe_modules() if m.moe})
    return "" if asked in (["0"], ["auto"]) else ", ".join(asked)


def to_json(sim: Simulation) -> dict[str, Any]:
    """The same figures, unrounded; times in seconds, shares from 0 to 1."""
    return {
        "model_type": sim.plan.model_type,
        "recipe": sim.plan.recipe,
        "hardware": sim.hardware.name,
        "numa": sim.numa,
        "kernels": sim.kernels,
        "context": sim.context,
        "auto": sim.rows[sim.auto].deferred,
        "decode": [
            {
                "deferred": row.deferred,
                "layer_seconds": row.layer_seconds,
                "token_seconds": row.token_seconds,
                "tokens_per_second": row.tokens_per_second,
                "layer": asdict(row.layer),
                "token": asdict(row.token),
            }
            for row in sim.rows
        ],
        "prefill": {
            "tokens": sim.prompt,
            "seconds": sim.prefill_seconds,
            "tokens_per_second": sim.prompt / sim.prefill_seconds,
        },
        "job_seconds": sim.decode.job,
        "start_seconds": sim.decode.start,
        "layers": [asdict(layer) for layer in sim.decode.layers],
        "notes": list(sim.notes),
    }


def lanes(sim: Simulation) -> list[str]:
    """Lanes in the order of the data flow."""
    return [DEVICE, LINK, HOST, *(cpu_lane(s) for s in range(sim.decode.sockets))]


def spans(row: Row) -> list[Span]:
    """The step as a timeline. A sync lasts as long as it blocks the device's stream."""
    return [
        Span(
            s.task.lane,
            s.task.name,
            s.task.kind,
            s.start,
            s.end,
            {"layer": s.task.layer, "own_us": round(s.task.seconds * 1e6, 3)},
        )
        for s in row.slices
    ]
