"""What a built library exports and needs, read from its ELF tables without loading it.

Only what the build check asks: defined dynamic symbols, NEEDED libraries, and versioned symbols per library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ktc.errors import BuildError

_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED = 6, 11, 0x6FFFFFFE
_DT_NEEDED = 1


@dataclass(frozen=True)
class ElfInfo:
    """Attributes: exports: defined dynamic symbols; needed: DT_NEEDED; glibc_max: newest GLIBC version, or ""."""

    exports: tuple[str, ...]
    needed: tuple[str, ...]
    glibc_max: str


def read_elf(path: Path) -> ElfInfo:
    """Raises BuildError when `path` is not a 64-bit little-endian ELF shared object with readable tables."""
    data = path.read_bytes()
    try:
        return _parse(data)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as e:
        raise BuildError(f"{path} is not a readable 64-bit ELF library: {e}", "delete it and build again") from e


def _parse(data: bytes) -> ElfInfo:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("wrong magic")
    (section_offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = []  # (type, offset, size, link, info)
    for i in range(count):
        header = struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * entry_size)
        sections.append((header[1], header[4], header[5], header[6], header[7]))

    def text(link: int, offset: int) -> str:
        start = sections[link][1] + offset
        return data[start : data.index(b"\0", start)].decode()

    exports: list[str] = []
    needed: list[str] = []
    glibc: list[tuple[int, ...]] = []
    for kind, offset, size, link, info in sections:
        if kind == _SHT_DYNSYM:
            for at in range(offset, offset + size, 24):
                name, symbol_info, _other, shndx = struct.unpack_from("<IBBH", data, at)
                if shndx != 0 and symbol_info >> 4 in (1, 2, 10):  # global, weak, unique
                    exports.append(text(link, name))
        elif kind == _SHT_DYNAMIC:
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag == _DT_NEEDED:
                    needed.append(text(link, value))
        elif kind == _SHT_VERNEED:
            glibc += _glibc_versions(data, offset, info, partial(text, link))
    newest = ".".join(map(str, max(glibc))) if glibc else ""
    return ElfInfo(tuple(sorted(exports)), tuple(needed), newest)


def _glibc_versions(data: bytes, offset: int, count: int, text: Callable[[int], str]) -> list[tuple[int, ...]]:
    found = []
    for _ in range(count):
        _version, aux_count, _file, aux, following = struct.unpack_from("<HHIII", data, offset)
        at = offset + aux
        for _ in range(aux_count):
            _hash, _flags, _other, name, next_aux = struct.unpack_from("<IHHII", data, at)
            label = text(name)
            if label.startswith("GLIBC_"):
                found.append(tuple(int(x) for x in label[6:].split(".")))
            at += next_aux
        offset += following
    return found
