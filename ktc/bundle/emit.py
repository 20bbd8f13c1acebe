"""Writes everything of a bundle that is not a packed weight, the manifest last, and puts it in place.

Used by `ktc compile` and `ktc repack`. Content comes in as bytes and dictionaries; what a checkpoint
or a kernel is, other files know.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ktc.bundle import manifest as fmt
from ktc.errors import DiskError, UsageError
from ktc.layout import LAYOUT_VERSION, QuantScheme
from ktc.pack.device import DeviceShard
from ktc.pack.experts import ExpertPart, whole_layouts
from ktc.pack.journal import Journal
from ktc.pack.writer import FileDigest, disk_error, fsync_dir, write_atomic
from ktc.plan.ir import Plan

TILE_LAYOUT_ID = "ktc.tile.b16x64"
PLAIN_LAYOUT_ID = "plain"


class Emitter:
    """Collects the files of a bundle in the making (`root`), and writes its manifest."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, dict[str, Any]] = {}

    def add(self, path: str, data: bytes, role: str) -> FileDigest:
        """Write a small file now.

        Raises:
            DiskError: it cannot be written.
        """
        digest = write_atomic(self.root / path, data)
        self.list(path, digest, role)
        return digest

    def list(self, path: str, digest: FileDigest, role: str) -> None:
        """List a file that is already there."""
        self.files[path] = {"path": path, "size": digest.size, "sha256": digest.sha256, "role": role}

    def write_manifest(self, fields: Mapping[str, Any]) -> None:
        """Check and write the manifest: after this the directory is a bundle.

        Raises:
            BundleError: the fields do not fit the schema (a bug in ktc, found before anyone reads it).
        """
        manifest = {
            "format": {"major": fmt.FORMAT_MAJOR, "minor": fmt.FORMAT_MINOR},
            "files": [self.files[path] for path in sorted(self.files)],
            **fields,
        }
        fmt.validate(manifest, fmt.MANIFEST)
        for folder, _, _ in os.walk(self.root):
            fsync_dir(Path(folder))
        write_atomic(self.root / fmt.MANIFEST, fmt.canonical(manifest))


def plan_fields(plan: Plan) -> dict[str, Any]:
    """The manifest fields that follow from the plan: features, model, quant, layouts, topology, device, semantics."""
    moes = [m.moe for m in plan.modules if m.moe is not None]
    first = moes[0]
    schemes = {m.scheme for m in moes} | {m.linear.scheme for m in plan.modules if m.linear is not None}
    deferred = [m.n_deferred_experts for m in moes]
    features = ["experts.tiles"] + (["linear.tiles"] if any(m.linear for m in plan.modules) else [])
    if any(s.scale == "codebook" for s in schemes):
        features.append("int4.codebook")
    cuda = any(m.device.startswith("cuda") for m in plan.modules)
    return {
        "required_features": features,
        "model": {
            "model_type": plan.model_type,
            "architecture": plan.architecture,
            "layers": plan.layers,
            "moe_layers": len(moes),
            "experts": first.experts,
            "top_k": first.top_k,
            "dims": {"hidden": first.hidden, "intermediate": first.intermediate},
        },
        "quant": {
            "algorithm_version": fmt.ALGORITHM_VERSION,
            "schemes": [_scheme(s) for s in sorted(schemes, key=str)],
        },
        "layouts": [
            {
                "id": TILE_LAYOUT_ID,
                "version": LAYOUT_VERSION,
                "tile": [16, 64],
                "align": 64,
                "consumers": ["amx", "avx512", "avx2", "portable", "emulated"],
            },
            {"id": PLAIN_LAYOUT_ID, "version": 1, "tile": [], "align": 64, "consumers": ["numpy", "torch"]},
        ],
        "topology": {"nodes": plan.nodes, "split": {"gate_up": "output rows", "down": "input columns"}},
        "device": {"kind": "cuda" if cuda else "cpu", "min_sm": None, "torch": None, "flashinfer": None}
        | ({"hot_experts": hot} if (hot := max(len(m.hot) for m in moes)) else {}),
        "semantics": {"n_deferred_experts": "auto" if "auto" in deferred else max(d for d in deferred if d != "auto")},
    }


def _scheme(scheme: QuantScheme) -> dict[str, Any]:
    return {
        "scheme": str(scheme),
        "data_type": scheme.data_type,
        "scale": scheme.scale,
        "bits": fmt.BITS[scheme.data_type],
        "group": scheme.group,
    }


def tensor_fields(parts: Iterable[ExpertPart], shards: Iterable[DeviceShard]) -> list[dict[str, Any]]:
    """The manifest's tensor table, in file order."""
    out = []
    for part in parts:
        gate_up, down = whole_layouts(part.moe)
        for node, (file, layout) in enumerate(zip(part.files, part.layouts, strict=True)):
            for name, spec in layout.tensors.items():
                kind = name.rpartition(".")[2]
                whole = gate_up if ".gate_up." in name[len(part.module) :] else down
                here = part.moe.gate_up_layout(node) if whole is gate_up else part.moe.down_layout(node)
                logical = [part.count, here.n, here.k] if kind == "tiles" else list(spec.shape)
                out.append(_tensor(file, layout.offsets[name], spec, TILE_LAYOUT_ID, logical, node))
    for shard in shards:
        for entry in shard.entries:
            for spec in entry.tensors:
                tiles = entry.linear is not None and spec.name.endswith(".tiles")
                logical = [entry.linear.n, entry.linear.k] if tiles and entry.linear else list(spec.shape)
                layout_id = TILE_LAYOUT_ID if entry.linear is not None else PLAIN_LAYOUT_ID
                out.append(_tensor(shard.file, shard.layout.offsets[spec.name], spec, layout_id, logical, None))
    return out


def _tensor(
    file: str, offset: int, spec: Any, layout: str, logical_shape: list[int], node: int | None
) -> dict[str, Any]:
    return {
        "name": spec.name,
        "file": file,
        "offset": offset,
        "nbytes": spec.nbytes,
        "layout": layout,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "logical_shape": logical_shape,
        "node": node,
    }


def check_output(out: Path, force: bool) -> None:
    """Refuse to touch what is already at the output path, and an output that could not be written in the end.

    Raises:
        UsageError: it exists and is no bundle, is one and `force` was not given, or lies inside another bundle.
        DiskError: nothing can be written there.
    """
    try:
        present = out.exists() or out.is_symlink()
        _check_place(out)
    except OSError as error:
        raise disk_error(error, out) from error
    if not present:
        return
    if not _is_bundle(out):
        raise UsageError(f"{out} exists and is not a bundle", "choose another name with -o")
    if not force:
        raise UsageError(f"{out} already exists", "--force replaces it, -o NAME writes another one")


def _is_bundle(folder: Path) -> bool:
    """Whether this is a bundle, damaged or not. A manifest.json alone does not make one: web projects have that too."""
    return all((folder / name).is_file() for name in (fmt.MANIFEST, "plan.json", "recipe.yaml"))


def _check_place(out: Path) -> None:
    """Refuse an output whose parent cannot be made or written, or that would be a foreign file in another bundle."""
    parent = out.absolute().parent
    for above in (parent, *parent.parents):
        if _is_bundle(above):
            raise UsageError(f"{out} would lie inside the bundle {above}", "choose another place with -o")
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise DiskError(f"cannot write {out}: {parent} is not a directory", "choose another place with -o")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DiskError(f"cannot write {out}: no permission to write in {parent}", "choose another place with -o")


def publish(journal: Journal, out: Path, force: bool) -> None:
    """Move the finished bundle to its name in one step; an old one there is swapped out, then removed.

    Raises:
        UsageError: something appeared at `out` meanwhile.
        DiskError: the move failed.
    """
    check_output(out, force)
    try:
        if out.exists():
            _swap(journal.bundle, out)
        else:
            journal.bundle.rename(out)
        fsync_dir(out.parent)
    except OSError as error:
        raise disk_error(error, out) from error
    journal.discard()


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _swap(new: Path, old: Path) -> None:
    """Exchange two directories atomically; where the kernel or file system cannot, with a moment between."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None and not renameat2(
        _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE
    ):
        return
    aside = new.with_name("replaced")
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    new.rename(old)
