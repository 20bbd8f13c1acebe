"""A bundle's files against its manifest: the manifest itself, what is on the disk, and the hash of one file.

Says what is wrong, and leaves it to the caller whether one fault is enough. What the files mean is reader.py's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ktc.bundle import manifest as fmt
from ktc.errors import BundleError
from ktc.pack.writer import hash_file
from ktc.paths import did_you_mean

DAMAGED = "the file was changed or damaged; copy the bundle again, or compile it again"


def read_manifest(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """A bundle's directory (resolved) and its manifest, checked against the schema.

    Raises:
        BundleError: no bundle, another format version, a feature that this ktc does not know, or a faulty manifest.
    """
    root = Path(path)
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        made_by = "a bundle is a directory made by: ktc compile CHECKPOINT --recipe int4"
        raise BundleError(f"{root} {what}", made_by if root.exists() else did_you_mean(root) + made_by)
    root = root.resolve()
    file = root / fmt.MANIFEST
    if not _regular(file):
        if (root / "config.json").is_file():
            raise BundleError(f"{root} is a checkpoint, not a bundle", f"ktc compile {root} --recipe int4")
        raise BundleError(
            f"{root} is not a bundle: it has no {fmt.MANIFEST}",
            "an unfinished compile is continued by the same ktc compile command",
        )
    if file.stat().st_size > fmt.MAX_MANIFEST_BYTES:
        raise BundleError(f"{file}: larger than a manifest may be")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BundleError(f"cannot read {file}: {error.strerror}") from error
    manifest = fmt.parse(data, str(file))
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, dict) or type(major := version.get("major")) is not int:
        raise BundleError(f"{file}: no format version; this is not a ktc bundle")
    if major != fmt.FORMAT_MAJOR:
        raise BundleError(
            f"{root}: bundle format {major}.{version.get('minor')}, but this ktc reads {fmt.FORMAT_MAJOR}.x",
            "use the ktc that made it (created_by in the manifest), or compile the checkpoint again with this one",
        )
    features = manifest.get("required_features")
    unknown = sorted(set(map(str, features)) - fmt.KNOWN_FEATURES) if isinstance(features, list) else []
    if unknown:
        raise BundleError(f"{root}: needs features this ktc does not know: {', '.join(unknown)}", "update ktc")
    fmt.validate(manifest, str(file))
    assert isinstance(manifest, dict)
    return root, manifest


def _regular(file: Path) -> bool:
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return False


def check_relative(name: str, what: str) -> None:
    """Refuse a path that could leave the bundle or is not in its one canonical spelling.

    Raises:
        BundleError: absolute, `..`, `.`, backslash, NUL, or not normalised.
    """
    pure = PurePosixPath(name)
    bad = pure.is_absolute() or ".." in pure.parts or "." in name.split("/") or "\\" in name or "\0" in name
    if bad or not name or pure.as_posix() != name:
        raise BundleError(f"{what}: path {name!r} leads out of the bundle or is not a plain relative path")


def file_faults(root: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, BundleError]]:
    """(path within the bundle, fault) of every file that is missing, not of its size, or should not be there.

    Raises:
        BundleError: the manifest lists a file twice or outside the bundle.
    """
    listed: dict[str, dict[str, Any]] = {entry["path"]: entry for entry in manifest["files"]}
    if len(listed) != len(manifest["files"]):
        raise BundleError(f"{root / fmt.MANIFEST}: a file is listed twice")
    for name in listed:
        check_relative(name, str(root / fmt.MANIFEST))
    present: set[str] = set()
    said: list[str] = []  # links, and what cannot be looked at
    unreadable: list[OSError] = []
    for folder, dirs, names in os.walk(root, onerror=unreadable.append):
        for name in dirs + names:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            try:
                mode = path.lstat().st_mode
            except OSError as error:
                said.append(relative)
                yield relative, BundleError(f"cannot read {path}: {error.strerror}")
                continue
            if stat.S_ISLNK(mode):
                said.append(relative)
                yield relative, BundleError(f"{path} is a symbolic link; a bundle has none", "copy it with: cp -rL")
            elif stat.S_ISDIR(mode):
                continue
            elif not stat.S_ISREG(mode):
                yield relative, BundleError(f"{path} is not a regular file")
            elif relative not in listed and relative not in (fmt.MANIFEST, fmt.SIGNATURE):
                hint = "remove it; a bundle holds nothing else"
                yield relative, BundleError(f"{path} is not listed in the manifest", hint)
            present.add(relative)
    for fault in unreadable:
        said.append(Path(fault.filename).relative_to(root).as_posix())
        yield said[-1], BundleError(f"cannot read {fault.filename}: {fault.strerror}")
    for name, entry in listed.items():
        if name in said or "." in said or name.startswith(tuple(f"{path}/" for path in said)):
            continue
        if name not in present:
            yield name, BundleError(f"{root / name} is missing", DAMAGED)
            continue
        size = (root / name).lstat().st_size
        if size != entry["size"]:
            yield name, BundleError(f"{root / name}: {size} bytes, but the manifest says {entry['size']}", DAMAGED)


def hash_fault(root: Path, entry: Mapping[str, Any]) -> BundleError | None:
    """What is wrong with the bytes of a listed file of any size, or None if they are those of the manifest."""
    path = root / entry["path"]
    try:
        digest = hash_file(path)
    except OSError as error:
        return BundleError(f"cannot read {path}: {error.strerror}")
    if digest.sha256 == entry["sha256"] and digest.size == entry["size"]:
        return None
    return BundleError(
        f"{path}: sha256 {digest.sha256[:16]}... is not the manifest's {entry['sha256'][:16]}...", DAMAGED
    )
