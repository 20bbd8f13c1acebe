"""A bundle whose decode steps also run on the emulated device: `ktc run --device emulate:PROFILE`.

Text is that of the plain run, bit for bit: every step is computed for real, then replayed on the clock. What the
figures say is the replays' time; a user waits for both.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktc.emulate.lane import EmulatedLane, Replay
from ktc.emulate.report import LANES
from ktc.errors import KtcError, UsageError
from ktc.native.engine import NativeModel
from ktc.simulate import Hardware, load_profile
from ktc.simulate.report import spans
from ktc.simulate.trace import chrome_trace, write_trace

PREFIX = "emulate:"
_KEPT = 64  # replays of which the slices are kept, for a trace
_RETIME = 64  # positions after which the device's attention is timed anew


def parse_device(text: str) -> Hardware:
    """`emulate:PROFILE` -> the profile, which has a device.

    Raises:
        UsageError: another device. ProfileError: no such profile, a faulty one, or one without a device.
    """
    from ktc.simulate import ProfileError

    if not text.startswith(PREFIX):
        raise UsageError(
            f"--device {text!r} is not emulate:PROFILE",
            "a real device is chosen by the recipe that a bundle is made with",
        )
    name = text.removeprefix(PREFIX)
    if not name:
        raise UsageError(f"--device {text!r} names no hardware profile", "such as emulate:paper-2x8452y-a100")
    hardware = load_profile(name)
    if hardware.device.kind == "cpu":
        raise ProfileError(
            f"{hardware.file}: the profile has no device of its own (device.kind: cpu), so there is nothing to emulate",
            "use a profile with device.kind: cuda, such as paper-2x8452y-a100",
        )
    return hardware


class EmulatedModel(NativeModel):
    """A `NativeModel` with a lane. Prefill is the plain one and is not timed: it defers nothing.

    Args:
        model: opened with `caller_works=False`; not to be used by itself any more.
        n_deferred: experts deferred per MoE layer; None = what the program says.
    """

    def __init__(self, model: NativeModel, hardware: Hardware, n_deferred: int | None = None) -> None:
        self.__dict__.update(vars(model))
        if self.ktc_plan is None:
            raise KtcError("a model without a plan cannot be timed")
        self.hardware, self.n_deferred = hardware, n_deferred
        self.lane = EmulatedLane(self.graph, self.ktc_plan, hardware, context=0)
        self.replays: list[Replay] = []
        self.step_seconds: list[float] = []

    def decode(self, token: int) -> NDArray[np.float32]:
        """As `NativeModel.decode`; then the same step on the clock."""
        self._check(np.array([token], dtype=np.int64))
        if abs(self.position - self.lane.context) >= _RETIME:
            self.lane.retime(self.hardware, self.position)
        self.lane.forget()
        number, logits = self.lane.record(token, self.position, self.n_deferred)
        replay = self.lane.replay(number)
        self.position += 1
        self.step_seconds.append(replay.row.token_seconds)
        self.replays = [*self.replays[-_KEPT + 1 :], replay]
        return logits

    def summary(self) -> str:
        """One line of figures: medians, shares over the last steps."""
        if not self.replays:
            return f"emulated {self.hardware.name}: no decode step"

        def median(values: list[float]) -> float:
            return statistics.median(values)

        uses = [r.row.layer for r in self.replays]
        step = median(self.step_seconds)
        layer = median([r.row.layer_seconds for r in self.replays])
        return (
            f"emulated {self.hardware.name}, K = {self.replays[-1].row.deferred}: {1 / step:.2f} tokens/s, layer"
            f" {layer * 1e3:.3f} ms, CPU {median([u.cpu for u in uses]):.0%}, device"
            f" {median([u.device for u in uses]):.0%}, both {median([u.both for u in uses]):.0%}, idle"
            f" {median([u.idle for u in uses]):.0%} ({len(self.step_seconds)} steps)"
        )

    def write_trace(self, path: Path) -> None:
        """The last steps as a Perfetto trace, one process each.

        Raises:
            DiskError: the file cannot be written.
        """
        first = len(self.step_seconds) - len(self.replays)
        timelines = {f"step {first + i}": spans(r.row) for i, r in enumerate(self.replays)}
        write_trace(path, chrome_trace(timelines, LANES))


def open_emulated(
    path: str | Path, hardware: Hardware, *, n_deferred: int | None = None, **options: object
) -> EmulatedModel:
    """`open_native` with an emulated device.

    Raises:
        UsageError: the bundle is made for a real device; else as `open_native` and `EmulatedLane`.
    """
    from ktc.cuda.device import wants_cuda
    from ktc.native import open_native

    if wants_cuda(Path(path)):
        raise UsageError(
            f"{path} is made for a CUDA device; the emulated one runs bundles of the cpu device",
            "compile the checkpoint with a recipe of the cpu device, such as int4",
        )
    model = open_native(path, n_deferred=n_deferred, caller_works=False, **options)  # type: ignore[arg-type]
    return EmulatedModel(model, hardware, n_deferred)
