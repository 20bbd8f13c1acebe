"""Writes one safetensors shard whose layout is known before its first byte is.

The stock writer needs all tensors in memory, sorts them and aligns nothing. This one places the
tensors in the given order, every one at a multiple of 64 bytes and the data at a multiple of 4096,
then takes rows in any order and from any thread (`pwrite`), and renames the file into place only
when every byte has been written, synced and hashed. It knows nothing of models or of quantisation.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktc.errors import DiskError
from ktc.layout import round_up

DATA_ALIGN = 4096
TENSOR_ALIGN = 64
MAX_SHARD_BYTES = 8 << 30
TMP_SUFFIX = ".tmp"
ITEM_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
                errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ESTALE, errno.EISDIR, errno.EEXIST}  # fmt: skip
_CHUNK = 4 << 20


def disk_error(error: OSError, path: Path) -> DiskError | OSError:
    """The user's form of an error of the disk; any other OSError is returned as it is."""
    if error.errno not in _DISK_ERRNOS:
        return error
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = (
        "make room and run the same command again: finished shards are kept and not redone"
        if full
        else "choose a directory that can be written with -o"
    )
    return DiskError(f"cannot write {path}: {error.strerror}", hint)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a shard: `dtype` is the safetensors name (`U8`, `F32`, `BF16`, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension (the whole tensor if it has no dimension)."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape[1:]) if self.shape else self.nbytes


class ShardLayout:
    """Where every tensor of a shard lies: a pure function of the tensors' order, names, types and shapes.

    Attributes:
        header: the file's first bytes, padded with spaces to a multiple of 4096.
        offsets: tensor name -> byte offset from the start of the *file*.
        size: bytes of the whole file.
    Raises:
        ValueError: two tensors of one name.
    """

    def __init__(self, tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.tensors: dict[str, TensorSpec] = {}
        entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
        relative: dict[str, int] = {}
        end = pads = 0
        for tensor in tensors:
            if tensor.name in self.tensors:
                raise ValueError(f"tensor {tensor.name} appears twice in one shard")
            begin = round_up(end, TENSOR_ALIGN)
            if begin > end:  # readers reject holes, so the gap is a tensor too
                entries[f"__pad__.{pads}"] = {"dtype": "U8", "shape": [begin - end], "data_offsets": [end, begin]}
                pads += 1
            end = begin + tensor.nbytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            self.tensors[tensor.name] = tensor
            relative[tensor.name] = begin
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text = text.ljust(round_up(8 + len(text), DATA_ALIGN) - 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.offsets = {name: len(self.header) + begin for name, begin in relative.items()}
        self.size = len(self.header) + end


@dataclass(frozen=True)
class FileDigest:
    """Size and content hash of a finished file."""

    size: int
    sha256: str


def hash_file(path: Path) -> FileDigest:
    """SHA-256 of a file, in chunks, without holding the interpreter lock."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileDigest(size, digest.hexdigest())


def fsync_dir(path: Path) -> None:
    """Make renames within `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> FileDigest:
    """Write a small file: temporary name, fsync, rename.

    Raises:
        DiskError: the disk is full, read-only or forbidden.
    """
    tmp = path.with_name(f".{path.name}{TMP_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tmp.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        raise disk_error(error, path) from error
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


class ShardWriter:
    """Fills one shard, row by row, from any number of threads.

    The file has a temporary name until `finish`, so what is called `*.safetensors` is always whole.

    Raises:
        DiskError: from every method, when the disk is full or cannot be written.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self.path, self.layout = path, layout
        self._tmp = path.with_name(f".{path.name}{TMP_SUFFIX}")
        self._lock = threading.Lock()
        self._missing = sum(t.nbytes for t in layout.tensors.values())
        self._fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            self._reserve(layout.size)
            self._pwrite(layout.header, 0)
        except OSError as error:
            self.abort()
            raise disk_error(error, path) from error

    def _reserve(self, size: int) -> None:
        """Ask for the blocks now, so that a full disk is found before the work is done."""
        os.ftruncate(self._fd, size)
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count

    def write(self, name: str, data: Any, row: int = 0) -> None:
        """Write whole rows of tensor `name` from row `row` on; each row must be written exactly once.

        Args:
            data: a C-contiguous buffer (bytes, numpy array) of a multiple of the tensor's row bytes.
        Raises:
            ValueError: not whole rows, or past the tensor's end.
        """
        tensor = self.layout.tensors[name]
        if tensor.row_bytes and memoryview(data).nbytes % tensor.row_bytes:
            raise ValueError(f"{memoryview(data).nbytes} bytes do not fit tensor {name}: rows have {tensor.row_bytes}")
        self.write_at(name, data, row * tensor.row_bytes)

    def write_at(self, name: str, data: Any, offset: int) -> None:
        """Write bytes at a byte offset within tensor `name`; each byte must be written exactly once.

        Raises:
            ValueError: past the tensor's end.
        """
        tensor, view = self.layout.tensors[name], memoryview(data)
        if view.nbytes == 0:
            return
        if offset + view.nbytes > tensor.nbytes:
            raise ValueError(
                f"{view.nbytes} bytes at {offset} do not fit tensor {name} {list(tensor.shape)} {tensor.dtype}"
            )
        try:
            self._pwrite(view.cast("B"), self.layout.offsets[name] + offset)
        except OSError as error:
            raise disk_error(error, self.path) from error
        with self._lock:
            self._missing -= view.nbytes

    def finish(self) -> FileDigest:
        """Sync, hash and rename; the shard now exists.

        Raises:
            ValueError: some rows were not written (a truncated shard must not look finished).
        """
        if self._missing:
            self.abort()
            raise ValueError(f"{self.path.name}: {self._missing} bytes were never written")
        try:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            digest = hash_file(self._tmp)
            if digest.size != self.layout.size:
                raise OSError(errno.EIO, f"{digest.size} bytes on disk, {self.layout.size} written")
            self._tmp.replace(self.path)
            fsync_dir(self.path.parent)
        except OSError as error:
            self.abort()
            raise disk_error(error, self.path) from error
        return digest

    def abort(self) -> None:
        """Drop the temporary file. Safe to call more than once, and after `finish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._tmp.unlink(missing_ok=True)
