"""From an open checkpoint to packing tasks: the one place where checkpoint and packing meet.

Device parameters are read in ranges of rows where the file allows it; a tensor that must be decoded
as a whole (FP8, int4, MXFP4) is decoded once per worker thread and then handed out in ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.checkpoint import Checkpoint
from ktc.checkpoint.experts import ExpertReader
from ktc.checkpoint.safetensors_file import read_array
from ktc.checkpoint.tensors import TensorData
from ktc.errors import CheckpointError
from ktc.models.family import ExpertShape, Family
from ktc.models.names import tree_to_disk
from ktc.pack.device import DeviceEntry, DeviceShard, write_entry
from ktc.pack.experts import ExpertPart, pack_expert, write_expert
from ktc.pack.pipeline import Step, Task, Writers
from ktc.plan.ir import MoePlan

_KINDS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


class CheckpointSource:
    """A checkpoint's tensors under the names of the module tree (see `ktc.pack.device.Source`).

    Args:
        readers: of every MoE block. A block that no rule replaced keeps Hugging Face's container, whose two
            parameters hold all experts; where the disk has one tensor per expert they are put together here.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, readers: Mapping[str, ExpertReader]) -> None:
        self.checkpoint = checkpoint
        self.names = tree_to_disk(family, checkpoint.names())
        self._decoded = threading.local()
        self._fused: dict[str, ExpertReader] = {}
        for module, reader in readers.items():
            if reader.spelling.kind == "per_expert":
                self._fused[f"{module}.experts.gate_up_proj"] = reader
                self._fused[f"{module}.experts.down_proj"] = reader

    def disk_name(self, tree_name: str) -> str:
        return self.names.get(tree_name, tree_name)

    def info(self, tree_name: str) -> tuple[str, tuple[int, ...]]:
        """(data type, shape).

        Raises:
            CheckpointError: the checkpoint does not hold it.
        """
        if (reader := self._fused.get(tree_name)) is not None:
            shape, down = reader.shape, tree_name.endswith("down_proj")
            each = (shape.hidden, shape.intermediate) if down else (2 * shape.intermediate, shape.hidden)
            return self.checkpoint.info(self.names[reader.tensors()[0]]).dtype, (shape.experts, *each)
        if tree_name not in self.names:
            raise CheckpointError(
                f"{self.checkpoint.path} has no tensor {tree_name!r}, which the model needs",
                "config.json and the weights are not of the same model, or the download is incomplete",
            )
        info = self.checkpoint.info(self.names[tree_name])
        return info.dtype, info.shape

    def nbytes(self, tree_name: str) -> int:
        if (reader := self._fused.get(tree_name)) is not None:
            return reader.nbytes() // (3 if tree_name.endswith("down_proj") else 1)
        return self.checkpoint.info(self.names[tree_name]).nbytes

    def rows(self, tree_name: str, begin: int, end: int) -> tuple[NDArray[Any], str]:
        """Rows [begin, end) of a tensor and their data type ("fp32", "bf16" as uint16, "fp16")."""
        if (reader := self._fused.get(tree_name)) is not None:
            return _fused_rows(reader, tree_name.endswith("down_proj"), begin, end)
        name = self.names[tree_name]
        info = self.checkpoint.info(name)
        if not info.shape:
            data = self.checkpoint.read(name)
            return data.array, data.dtype
        if info.dtype in ("fp32", "bf16", "fp16") and self.checkpoint.parts(name) == (name,):
            raw = self.checkpoint.raw[name]
            row = raw.nbytes // max(1, info.shape[0])
            part = replace(
                raw, shape=(end - begin, *raw.shape[1:]), begin=raw.begin + begin * row, nbytes=(end - begin) * row
            )
            return read_array(part), info.dtype
        whole = self._whole(name)
        return whole.array[begin:end], whole.dtype

    def _whole(self, name: str) -> TensorData:
        held: tuple[str, TensorData] | None = getattr(self._decoded, "held", None)
        if held is None or held[0] != name:
            self._decoded.held = None  # let go of the last one before the next is decoded
            held = self._decoded.held = (name, self.checkpoint.read(name))
        return held[1]

    def release(self) -> None:
        """Let go of this thread's decoded tensor."""
        self._decoded.held = None


def expert_shape(moe: MoePlan) -> ExpertShape:
    return ExpertShape(
        moe.experts, moe.top_k, moe.hidden, moe.intermediate, moe.activation, moe.alpha, moe.limit, moe.bias
    )


def _fused_rows(reader: ExpertReader, down: bool, begin: int, end: int) -> tuple[NDArray[Any], str]:
    """Experts [begin, end) of a container's parameter: down [E, H, I], or gate over up [E, 2I, H]."""
    experts = [reader.read(e) for e in range(begin, end)]
    dtype = experts[0].dtype
    return np.stack([x.down if down else np.concatenate([x.gate, x.up]) for x in experts]), dtype


def _disk_names(reader: ExpertReader, source: CheckpointSource, expert: int) -> dict[str, str]:
    """Names for messages of the six arrays of an expert."""
    s = reader.spelling
    if s.kind == "per_expert":
        relative = {"gate": s.gate, "up": s.up, "down": s.down}
        return {
            kind: source.disk_name(f"{reader.module}.{relative.get(kind, kind).format(e=expert)}") for kind in _KINDS
        }
    fused = {"gate": s.gate_up, "up": s.gate_up, "down": s.down,
             "gate_bias": s.gate_up_bias, "up_bias": s.gate_up_bias, "down_bias": s.down_bias}  # fmt: skip
    return {
        kind: f"{source.disk_name(f'{reader.module}.{fused[kind]}')}[{expert}] ({kind} of expert {expert})"
        for kind in _KINDS
    }


def expert_task(part: ExpertPart, reader: ExpertReader, source: CheckpointSource, allow_nonfinite: bool) -> Task:
    """Quantise and pack the experts of one part, one expert a step."""
    nbytes = reader.nbytes() // part.moe.experts

    def step(expert: int) -> Callable[[Writers], None]:
        def run(writers: Writers) -> None:
            weights = reader.read(expert)
            names = _disk_names(reader, source, expert)
            packed = pack_expert(part.moe, weights, names, allow_nonfinite)
            del weights  # the packed form is all that is needed from here on
            write_expert(part, writers, expert, packed)

        return run

    steps = [Step(step(e), nbytes, f"{part.module} expert {e}") for e in range(part.first, part.last + 1)]
    return Task(part.files, part.layouts, steps)


def device_task(shard: DeviceShard, source: CheckpointSource, tied: dict[str, str], allow_nonfinite: bool) -> Task:
    """Stream the parameters of one device shard, one entry a step."""

    def step(entry: DeviceEntry) -> Callable[[Writers], None]:
        def run(writers: Writers) -> None:
            write_entry(writers[0], entry, source, tied, allow_nonfinite)
            source.release()

        return run

    def nbytes(entry: DeviceEntry) -> int:
        name = entry.name if entry.linear is None else f"{entry.name}.weight"
        return source.nbytes(tied.get(name, name))

    steps = [Step(step(entry), nbytes(entry), entry.name) for entry in shard.entries]
    return Task((shard.file,), (shard.layout,), steps)
