"""Simulate a plan for every number of deferred experts, and choose one. Printing is in report.py."""

from __future__ import annotations

from dataclasses import dataclass

from ktc.plan.ir import Plan
from ktc.simulate.costs import Costs, decode_costs, prefill_costs
from ktc.simulate.events import Slice, run
from ktc.simulate.hardware import UNBOUNDED, Hardware, Numa
from ktc.simulate.metrics import Use, steady_window, use
from ktc.simulate.schedule import build

# The expert pool counts as saturated where one more deferred expert would gain less than this.
SATURATED = 0.01


@dataclass(frozen=True)
class Row:
    """Decode with `deferred` experts per layer.

    Attributes:
        layer_seconds: of a MoE layer in the middle of the model.
        token_seconds: of a whole step.
        layer: use of the resources in the middle of the model; `token`: over the whole step.
    """

    deferred: int
    layer_seconds: float
    token_seconds: float
    layer: Use
    token: Use
    slices: tuple[Slice, ...]

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.token_seconds


@dataclass(frozen=True)
class Simulation:
    """Everything that one `ktc simulate` works out.

    Attributes:
        rows: K = 0, 1, ...
        auto: index of the row that `n_deferred_experts: auto` takes.
        prefill_seconds: of a prompt of `prompt` tokens.
        notes: what does not fit the machine, in words.
    """

    plan: Plan
    hardware: Hardware
    numa: Numa
    kernels: str
    context: int
    decode: Costs
    rows: tuple[Row, ...]
    auto: int
    prompt: int
    prefill_seconds: float
    notes: tuple[str, ...]


def simulate(
    plan: Plan,
    hardware: Hardware,
    *,
    numa: Numa = "tp",
    kernels: str | None = None,
    context: int = 1024,
    prompt: int = 1024,
) -> Simulation:
    """Decode for K = 0 .. top_k - 2, and the prefill of one prompt (which defers nothing).

    Args:
        plan: split over as many nodes as `hardware` has sockets, for numa "tp".
        kernels: name under cpu.kernels of the profile; the first by default.
        context: tokens in the cache of the decoded sequence.
        prompt: tokens of the prefill.
    Raises:
        UsageError: no such kernels, or the plan is split over another number of nodes than the mode uses.
        RecipeError: the plan has no MoE block that ktc runs.
    """
    chosen, _ = hardware.kernels(kernels)
    decode = decode_costs(plan, hardware, context=context, numa=numa, kernels=chosen)
    rows = tuple(decode_row(decode, k) for k in range(decode.max_deferred + 1))
    prefill = run(build(prefill_costs(plan, hardware, tokens=prompt, numa=numa, kernels=chosen)))
    return Simulation(
        plan=plan,
        hardware=hardware,
        numa=numa,
        kernels=chosen,
        context=context,
        decode=decode,
        rows=rows,
        auto=auto_deferred(rows),
        prompt=prompt,
        prefill_seconds=max(s.end for s in prefill),
        notes=tuple(_notes(plan, hardware, numa)),
    )


def decode_row(costs: Costs, deferred: int) -> Row:
    """One decode step with `deferred` experts per layer."""
    slices = tuple(run(build(costs, deferred)))
    end = max(s.end for s in slices)
    window, layers = steady_window(slices)
    return Row(
        deferred=deferred,
        layer_seconds=(window[1] - window[0]) / layers,
        token_seconds=end,
        layer=use(slices, window),
        token=use(slices, (0.0, end)),
        slices=slices,
    )


def auto_deferred(rows: tuple[Row, ...]) -> int:
    """The fewest deferred experts that saturate the CPU: from there on, more gain less than 1%."""
    best = min(row.token_seconds for row in rows)
    return next(i for i, row in enumerate(rows) if row.token_seconds <= best * (1 + SATURATED))


def _notes(plan: Plan, hardware: Hardware, numa: Numa) -> list[str]:
    notes = []
    if hardware.device.kind == "cpu":
        notes.append(
            "the profile has no device: attention and all that is not a routed expert runs on the experts' own cores;"
            " profiles with a GPU have device.kind: cuda"
        )
    if min(hardware.cpu.peak.values()) >= UNBOUNDED:
        notes.append("the profile was measured in decode only: the experts' arithmetic is left out of prefill")
    dense = sum(plan.device_bytes().values())
    if hardware.device.memory is not None and dense > hardware.device.memory:
        notes.append(f"{dense / 1e9:.1f} GB of weights do not fit the device's {hardware.device.memory / 1e9:.0f} GB")
    if hardware.cpu.memory is not None:
        sockets = 1 if numa == "single" else hardware.cpu.sockets
        experts = sum(plan.expert_bytes(node) for node in range(plan.nodes))
        if experts > hardware.cpu.memory * sockets:
            have = hardware.cpu.memory * sockets / 1e9
            notes.append(f"{experts / 1e9:.0f} GB of experts do not fit the {have:.0f} GB of DRAM of {sockets} sockets")
    return notes
