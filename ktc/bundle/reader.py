"""Opens a bundle and trusts nothing in it: schema, versions, paths, sizes, hashes of all but the weights.

`open_bundle` reads JSON and file sizes only, so it is quick for a bundle of any size; the weights'
hashes are `ktc verify`'s work. It neither loads libraries nor imports torch. What is on the disk is
checked by files.py, what it says here. Whether this machine can run it well is judge.py's question.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.bundle import manifest as fmt
from ktc.bundle.files import DAMAGED, file_faults, hash_fault, read_manifest
from ktc.errors import BundleError
from ktc.layout import split_unit
from ktc.pack.experts import expert_tensors
from ktc.pack.writer import ITEM_BYTES
from ktc.plan.ir import Plan

WEIGHT_ROLES = frozenset({"experts", "device", "goldens"})  # everything else is hashed when a bundle is opened
_NUMPY = {"U8": np.uint8, "I8": np.int8, "F16": np.float16, "BF16": np.uint16, "I32": np.int32, "F32": np.float32,
          "I64": np.int64, "F64": np.float64, "BOOL": np.bool_}  # fmt: skip


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor's bytes lie: `offset` from the start of `file` (absolute path); dtype as in safetensors."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def array(self) -> NDArray[Any]:
        """A read-only memory map (bf16 as uint16); for inspection, not for running."""
        dtype = _NUMPY[self.dtype]
        if self.nbytes == 0:  # nothing to map
            return np.empty(self.shape, dtype)
        return np.memmap(self.file, dtype, "r", self.offset, self.shape)


class TensorTable(dict[tuple[int | None, str], TensorRef]):
    """(node or None for the device, tensor name) -> TensorRef, and the way to the part that holds an expert."""

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, str], list[tuple[int, int]]]:
        found: dict[tuple[int, str], set[tuple[int, int]]] = {}
        for node, name in self:
            match = _EXPERT_TENSOR.match(name)
            if match is not None and node is not None:
                found.setdefault((node, match[1]), set()).add((int(match[2]), int(match[3])))
        return {key: sorted(ranges) for key, ranges in found.items()}

    def parts(self, module: str, node: int) -> list[tuple[int, int]]:
        """Ranges (first, last) of experts that a MoE block's shards on a node hold, in order."""
        return self._parts.get((node, module), [])

    def part_of(self, module: str, node: int, expert: int) -> tuple[str, int]:
        """(tensor stem, first expert) of the part that holds an expert; KeyError if none does."""
        for first, last in self.parts(module, node):
            if first <= expert <= last:
                return f"{module}.experts.{first}-{last}", first
        raise KeyError(f"expert {expert} of {module} on node {node}")


class Bundle:
    """An opened bundle.

    Attributes:
        path: the bundle's directory (resolved).
        manifest: the checked manifest.
        plan: the checked plan.
        tensors: where every tensor lies; filled once, by `open_bundle`.
        files: path within the bundle -> manifest entry {path, size, sha256, role}.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.files: dict[str, dict[str, Any]] = {entry["path"]: entry for entry in manifest["files"]}
        self.tensors = TensorTable()
        self.plan: Plan  # set once plan.json has been read and checked

    @property
    def nodes(self) -> int:
        return int(self.manifest["topology"]["nodes"])

    def read(self, name: str) -> bytes:
        """The bytes of a small file, checked against the manifest as they were read.

        Raises:
            BundleError: not listed, or its bytes are not those of the manifest.
        """
        entry = self.files.get(name)
        if entry is None:
            raise BundleError(f"{self.path}: no {name} in this bundle")
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise BundleError(f"cannot read {self.path / name}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise BundleError(f"{self.path / name}: its bytes are not those the manifest lists", DAMAGED)
        return data

    def read_object(self, name: str) -> dict[str, Any]:
        """The JSON object in a small file.

        Raises:
            BundleError: as `read`, or it holds something else.
        """
        try:
            value = json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise BundleError(
                f"{self.path / name}: not valid JSON: {error}", "copy or compile the bundle again"
            ) from error
        if not isinstance(value, dict):
            raise BundleError(f"{self.path / name}: not a JSON object")
        return value

    def nbytes(self, role: str | None = None) -> int:
        return sum(entry["size"] for entry in self.files.values() if role in (None, entry["role"]))


_EXPERT_TENSOR = re.compile(r"(.+)\.experts\.(\d+)-(\d+)\.(?:gate_up|down)\.")


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open and check a bundle.

    In this order: manifest syntax, format version and required features, schema, paths, files on disk
    (each listed one is there, regular, of its size; nothing else is there), hashes of everything but
    weights, plan, tensor table.

    Raises:
        BundleError: whatever is wrong, naming the file and what to do.
    """
    root, manifest = read_manifest(path)
    for _, wrong in file_faults(root, manifest):
        raise wrong
    for entry in manifest["files"]:
        if entry["role"] not in WEIGHT_ROLES and (fault := hash_fault(root, entry)):
            raise fault
    bundle = Bundle(root, manifest)
    bundle.plan = _read_plan(bundle)
    _check_kernels(bundle)
    _index_tensors(bundle)
    _check_experts(bundle)
    return bundle


def _read_plan(bundle: Bundle) -> Plan:
    what = str(bundle.path / "plan.json")
    data = fmt.parse(bundle.read("plan.json"), what)
    fmt.validate(data, what, "plan")
    try:
        plan = Plan.from_json(data)
    except (TypeError, ValueError, KeyError) as error:
        raise BundleError(f"{what}: {error}") from error
    if plan.nodes != bundle.nodes:
        raise BundleError(f"{what}: for {plan.nodes} nodes, but the manifest says {bundle.nodes}")
    for module in plan.moe_modules():
        moe = module.moe
        assert moe is not None
        unit, end = split_unit(moe.scheme), 0
        for begin, stop in moe.splits:
            if begin != end or stop <= begin or begin % unit:
                raise BundleError(f"{what}: {module.name}: splits {list(moe.splits)} are not whole consecutive blocks")
            end = stop
        if end != moe.i_pad or len(moe.splits) != plan.nodes or moe.top_k > moe.experts:
            raise BundleError(f"{what}: {module.name}: splits or top_k do not fit the layer")
    return plan


def _check_kernels(bundle: Bundle) -> None:
    for kernel in bundle.manifest["kernels"]:
        entry = bundle.files.get(kernel["file"])
        if entry is None or entry["sha256"] != kernel["sha256"] or entry["role"] != "kernel":
            raise BundleError(f"{bundle.path / fmt.MANIFEST}: kernel {kernel['variant']} does not match its file")


def _index_tensors(bundle: Bundle) -> None:
    what = str(bundle.path / fmt.MANIFEST)
    for entry in bundle.manifest["tensors"]:
        name, file, offset, nbytes = entry["name"], entry["file"], entry["offset"], entry["nbytes"]
        listed = bundle.files.get(file)
        if listed is None or listed["role"] not in WEIGHT_ROLES:
            raise BundleError(f"{what}: tensor {name} is in {file}, which is not a listed weight file")
        shape = tuple(entry.get("shape", entry["logical_shape"]))
        if offset + nbytes > listed["size"] or nbytes != ITEM_BYTES[entry["dtype"]] * math.prod(shape):
            raise BundleError(f"{what}: tensor {name} does not fit its file or its shape")
        key = (entry["node"], name)
        if key in bundle.tensors:
            raise BundleError(f"{what}: tensor {name} is listed twice")
        bundle.tensors[key] = TensorRef(bundle.path / file, offset, nbytes, entry["dtype"], shape)


def _check_experts(bundle: Bundle) -> None:
    """Every expert of every MoE layer is there on every node, exactly once and of the planned size."""
    what = str(bundle.path / fmt.MANIFEST)
    for module in bundle.plan.moe_modules():
        moe = module.moe
        assert moe is not None
        for node in range(bundle.nodes):
            end = 0
            for first, last in bundle.tensors.parts(module.name, node):
                if first != end or last < first:
                    break
                for spec in expert_tensors(module.name, moe, node, first, last):
                    ref = bundle.tensors.get((node, spec.name))
                    if ref is None or (ref.dtype, ref.shape) != (spec.dtype, spec.shape):
                        raise BundleError(f"{what}: tensor {spec.name} of node {node} is missing or not as planned")
                end = last + 1
            if end != moe.experts:
                raise BundleError(
                    f"{what}: {module.name} has {moe.experts} experts, but node {node} holds {end} in sequence"
                )
