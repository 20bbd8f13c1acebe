"""A `Sweep` as a table, as JSON and as timelines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ktc.emulate.sweep import Sweep
from ktc.emulate.timeline import CPU
from ktc.simulate.metrics import Use
from ktc.simulate.report import spans
from ktc.simulate.schedule import DEVICE, HOST, LINK
from ktc.simulate.trace import Span

LANES = [DEVICE, LINK, HOST, CPU]
_LANE = 0.2
"""Of a layer's time: from there on what the emulation itself takes outweighs what it shows."""


def device_line(sweep: Sweep) -> str:
    """What was emulated, and what was real."""
    scaled = f", its times multiplied by {sweep.factor:.3g}" if sweep.factor != 1 else ""
    cpu = sweep.hardware.cpu
    return (
        f"device: {sweep.hardware.device.name}, emulated{scaled};"
        f" experts: {sweep.threads} thread{'s' * (sweep.threads != 1)},"
        f" {sweep.expert_seconds * 1e3:.3f} ms a layer at K = 0,"
        f" {cpu.start * 1e6:.0f} us of them for starting an idle pool; {cpu.job * 1e6:.0f} us more as two jobs"
    )


def render(sweep: Sweep, title: str) -> str:
    """What `ktc bench emulate` prints: measured and simulated side by side, K by K."""
    lines = [
        title,
        device_line(sweep),
        f"decode, one sequence, device timed for {sweep.context} tokens in the cache; medians of"
        f" {sweep.repeats} replays of {sweep.steps} steps",
        "",
        "                     measured                                                simulated",
        "    K  layer ms        tokens/s          CPU  device  both  idle  cores   layer ms        tokens/s",
    ]
    base, predicted = sweep.measured[0], sweep.simulated[0]
    for i, (m, s) in enumerate(zip(sweep.measured, sweep.simulated, strict=True)):
        u = m.layer
        lines.append(
            f"  {'*' if i == sweep.best else ' '} {m.deferred:<2}"
            f"{m.layer_seconds * 1e3:>8.3f} {_change(m.layer_seconds, base.layer_seconds):>6}"
            f" {1 / m.token_seconds:>7.2f} {_change(base.token_seconds, m.token_seconds):>6}"
            f" {u.cpu:>9.1%} {u.device:>7.1%} {u.both:>5.1%} {u.idle:>5.1%} {m.cores:>6.1%}"
            f"   {s.layer_seconds * 1e3:>8.3f} {_change(s.layer_seconds, predicted.layer_seconds):>6}"
            f" {s.tokens_per_second:>7.2f} {_change(predicted.token_seconds, s.token_seconds):>6}"
        )
    gains = [(sweep.gain(sweep.measured, layer), sweep.gain(sweep.simulated, layer)) for layer in (False, True)]
    (tokens, tokens_simulated), (layers, layers_simulated) = gains
    lines += [
        "",
        f"  * fastest. Gain over K = 0: {tokens:+.1%} tokens/s measured, {tokens_simulated:+.1%} simulated;"
        f" in mid-model {layers:+.1%} and {layers_simulated:+.1%} layers/s",
        "  simulated: knows the measured K = 0, and what jobs cost, which was measured without a timeline",
        "  CPU: the expert pool has a job; cores: its threads are inside tasks. device, both, idle as in ktc simulate",
        f"  submit callbacks late by {sweep.late[0] * 1e6:.0f} us (median), {sweep.late[1] * 1e6:.0f} us (95%);"
        f" the lane takes {sweep.lane * 1e6:.0f} us of a CPU a layer"
        + ("" if sweep.realtime else "; no right to real-time priority for the lane, which competes with the workers"),
    ]
    return "\n".join(lines + [f"  note: {note}" for note in _notes(sweep)])


def _notes(sweep: Sweep) -> list[str]:
    notes = []
    if len(sweep.measured) == 1:
        notes.append("only K = 0: nothing was deferred, so nothing could be gained")
    share = sweep.lane / sweep.measured[0].layer_seconds
    if share > _LANE:
        notes.append(
            f"the lane takes {share:.0%} of a layer's time from the experts' CPUs: the layers are too small for these"
            " figures to mean much"
        )
    return notes


def _change(new: float, old: float) -> str:
    return "" if new == old else f"{new / old - 1:+.1%}"


def to_json(sweep: Sweep, title: str) -> dict[str, Any]:
    """The same figures, unrounded; times in seconds, shares from 0 to 1."""

    def figures(row: Any, layer: Use) -> dict[str, Any]:
        return {
            "layer_seconds": row.layer_seconds,
            "token_seconds": row.token_seconds,
            "tokens_per_second": 1 / row.token_seconds,
            "layer": asdict(layer),
        }

    return {
        "title": title,
        "device": sweep.hardware.device.name,
        "device_factor": sweep.factor,
        "expert_seconds": sweep.expert_seconds,
        "job_seconds": sweep.hardware.cpu.job,
        "start_seconds": sweep.hardware.cpu.start,
        "submit_seconds": sweep.hardware.host.submit,
        "sync_seconds": sweep.hardware.host.sync,
        "threads": sweep.threads,
        "context": sweep.context,
        "steps": sweep.steps,
        "repeats": sweep.repeats,
        "lane_cpu_seconds": sweep.lane,
        "realtime": sweep.realtime,
        "late_seconds": {"median": sweep.late[0], "p95": sweep.late[1]},
        "decode": [
            {
                "deferred": m.deferred,
                "measured": {
                    **figures(m, m.layer),
                    "cores": m.cores,
                    "step_seconds_p10_p50_p90": [float(np.quantile(m.samples, q)) for q in (0.1, 0.5, 0.9)],
                },
                "simulated": figures(s, s.layer),
            }
            for m, s in zip(sweep.measured, sweep.simulated, strict=True)
        ],
        "best": sweep.measured[sweep.best].deferred,
        "gain": {
            "tokens": {"measured": sweep.gain(sweep.measured), "simulated": sweep.gain(sweep.simulated)},
            "layers": {"measured": sweep.gain(sweep.measured, True), "simulated": sweep.gain(sweep.simulated, True)},
        },
    }


def timelines(sweep: Sweep) -> dict[str, list[Span]]:
    """Of K = 0 and of the fastest K, measured and simulated, for `ktc.simulate.trace`."""
    out: dict[str, list[Span]] = {}
    for i in sorted({0, sweep.best}):
        k = sweep.measured[i].deferred
        out[f"K = {k}, measured"] = spans(sweep.measured[i].typical.row)
        out[f"K = {k}, simulated"] = spans(sweep.simulated[i])
    return out
