"""`ktc verify`: every byte against the manifest, then the goldens against this machine's kernels.

Every file is checked and every fault collected, so that one run shows all of them. What the files say (reader.py) and
compute is looked at only when each of them is what the manifest lists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.bundle.files import file_faults, hash_fault, read_manifest
from ktc.bundle.goldens import MoeGolden, golden_fault, read_moe_goldens, relative_error
from ktc.bundle.reader import WEIGHT_ROLES, Bundle, open_bundle
from ktc.plan.ir import MoePlan
from ktc.progress import Progress


@dataclass(frozen=True)
class Case:
    """One golden: `error` is the relative L2 distance to what was recorded."""

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN too


@dataclass
class Report:
    """What `verify` found. `variant` is the kernel variant the goldens ran on, "" if they were not run."""

    files: int = 0
    nbytes: int = 0
    faults: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    variant: str = ""

    @property
    def ok(self) -> bool:
        return not self.faults and all(case.ok for case in self.cases)


def verify(
    path: str | os.PathLike[str],
    *,
    goldens: bool = True,
    variant: str | None = None,
    trust_sha256: Sequence[str] = (),
    library: str | None = None,
    report: Report | None = None,
) -> Report:
    """Check a bundle.

    Args:
        goldens: also run the goldens (with `variant`, or the best one here; or with the kernel `library`).
        report: filled and returned, so that what was found is there after an error too.
    Returns:
        a report; its `ok` says whether everything matched.
    Raises:
        BundleError: no bundle, a manifest that cannot be believed, or whole files that do not make a bundle.
        BundleError, BuildError: the goldens cannot be run on this machine at all.
    """
    report = Report() if report is None else report
    _check_files(path, report)
    if report.faults:
        return report
    bundle = open_bundle(path)
    _check_headers(bundle, report)
    if report.faults or not goldens or bundle.manifest["goldens"] is None:
        return report  # kernels are not run over bytes that are known to be wrong
    _run_layers(bundle, report, variant, trust_sha256, library)
    if bundle.manifest["goldens"]["logits"] is not None:
        _run_logits(bundle, report, variant, trust_sha256, library)
    return report


def _check_files(path: str | os.PathLike[str], report: Report) -> None:
    """Every file there, of its size and with its hash, and nothing else there."""
    root, manifest = read_manifest(path)
    faults = dict(file_faults(root, manifest))
    report.faults += [fault.message for fault in faults.values()]
    entries = sorted(manifest["files"], key=lambda entry: str(entry["path"]))
    with Progress("hash", sum(entry["size"] for entry in entries), "B") as progress:
        for entry in entries:
            name = entry["path"]
            if name not in faults and (fault := hash_fault(root, entry)):
                report.faults.append(fault.message)
            report.files += 1
            report.nbytes += entry["size"]
            progress.update(entry["size"], name)


def _check_headers(bundle: Bundle, report: Report) -> None:
    """The shards' own headers say the same as the manifest."""
    for name, entry in sorted(bundle.files.items()):
        if entry["role"] not in WEIGHT_ROLES:
            continue
        path = bundle.path / name
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                if length > entry["size"]:
                    raise ValueError("header longer than the file")
                header: dict[str, Any] = json.loads(file.read(length))
                if not isinstance(header, dict):
                    raise ValueError("its header is no JSON object")
                header.pop("__metadata__", None)
                actual = {
                    tensor: (spec["dtype"], tuple(spec["shape"]), 8 + length + spec["data_offsets"][0])
                    for tensor, spec in header.items()
                    if not tensor.startswith("__pad__.")
                }
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                report.faults.append(f"{path}: not a safetensors file: {error}")
                continue
        listed = {
            tensor: (ref.dtype, ref.shape, ref.offset)
            for (_, tensor), ref in bundle.tensors.items()
            if ref.file == path
        }
        if actual != listed:
            odd = sorted({t for t in actual.keys() | listed.keys() if actual.get(t) != listed.get(t)})
            report.faults.append(f"{path}: tensor {odd[0]} is not where or what the manifest says")


def _run_layers(
    bundle: Bundle, report: Report, variant: str | None, trust_sha256: Sequence[str], library: str | None
) -> None:
    from ktc import _runtime
    from ktc.bundle.trust import kernel_for_host
    from ktc.engine.opening import open_library

    lib = open_library(library or kernel_for_host(bundle, variant, trust_sha256), own=library is not None)
    report.variant = lib.variant
    cpus = [cpu for node in _runtime.numa_nodes() for cpu in node]
    pool = _runtime.Pool([cpus] * bundle.nodes, False)
    plans = {m.name: m.moe for m in bundle.plan.moe_modules()}
    cases = read_moe_goldens(bundle)
    with Progress("goldens", len(cases), "layers") as progress:
        for case in cases:
            moe = plans.get(case.module)
            if moe is None:
                report.faults.append(f"goldens: no MoE layer {case.module}")
                continue
            if fault := golden_fault(case, moe):
                report.faults.append(f"goldens of {case.module}: {fault}")
                continue
            actual = _run_layer(bundle, lib, pool, moe, case)
            report.cases.append(Case(case.module, relative_error(actual, case.y), case.tolerance))
            progress.update(1, case.module)


def _run_layer(bundle: Bundle, lib: Any, pool: Any, moe: MoePlan, case: MoeGolden) -> NDArray[np.float32]:
    """The layer's native operator over the few experts of the case."""
    used = sorted(set(case.ids.ravel().tolist()))
    tokens, slots = case.ids.shape
    layer, held = native_layer(bundle, lib, pool, case.module, moe, used, slots)
    x, ids = np.ascontiguousarray(case.x), np.searchsorted(used, case.ids).astype(np.int64)
    weights, out = np.ascontiguousarray(case.weights), np.empty_like(case.y)
    layer.forward(x.ctypes.data, moe.hidden, tokens, ids.ctypes.data, weights.ctypes.data, out.ctypes.data, moe.hidden)
    del held
    return out


def native_layer(
    bundle: Bundle, lib: Any, pool: Any, module: str, moe: MoePlan, experts: Sequence[int], top_k: int
) -> tuple[Any, list[NDArray[Any]]]:
    """The native operator of a layer over some of its experts, straight from mapped shards.

    Returns:
        the operator, and the maps that must live as long as it does.
    """
    from ktc.engine.packed import native_moe

    held: list[NDArray[Any]] = []

    def pointers(node: int, expert: int) -> dict[str, int]:
        stem, first = bundle.tensors.part_of(module, node, expert)
        out = {}
        for matrix in ("gate_up", "down"):
            for suffix in ("tiles", "scale", "mult", "bias"):
                ref = bundle.tensors.get((node, f"{stem}.{matrix}.{suffix}"))
                key = matrix if suffix == "tiles" else f"{matrix}_{suffix}"
                out[key] = 0
                if ref is not None:
                    held.append(ref.array()[expert - first])
                    out[key] = held[-1].ctypes.data
        return out

    weights = [[pointers(node, e) for e in experts] for node in range(bundle.nodes)]
    return native_moe(lib, pool, replace(moe, experts=len(experts), top_k=top_k), weights), held


def _run_logits(
    bundle: Bundle, report: Report, variant: str | None, trust_sha256: Sequence[str], library: str | None
) -> None:
    from ktc.bundle.finish import engine_logits

    refs = [bundle.tensors.get((None, f"golden.{name}")) for name in ("input_ids", "logits")]
    if None in refs:
        report.faults.append("goldens: the logits that the manifest names are not there")
        return
    ids, expected = (np.array(ref.array()) for ref in refs if ref is not None)
    _, actual = engine_logits(bundle.path, ids, variant=variant, trust_sha256=trust_sha256, library=library)
    tolerance = float(bundle.manifest["goldens"]["logits"]["tolerance"])
    report.cases.append(Case("logits", relative_error(actual, expected), tolerance))
