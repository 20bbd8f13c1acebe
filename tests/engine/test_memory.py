"""The memory check: what the kernel and a container say, and that it refuses in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ktc.engine import memory
from ktc.errors import KtcError


def test_a_containers_limit_counts_but_not_its_file_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_memory() == 800 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == 800 * 1024
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 390000\n")
    assert memory.available_memory() == 400000
    (tmp_path / "memory.stat").write_text("anon 600000\n")
    assert memory.available_memory() == 0
    (tmp_path / "memory.max").unlink()
    meminfo.write_text("nothing here\n")
    assert memory.available_memory() is None


def test_refusal_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2048)
    memory.check_memory(2048)
    with pytest.raises(KtcError, match=r"the weights need 2\.44 KiB of memory, 2\.00 KiB are available"):
        memory.check_memory(2500)
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    memory.check_memory(1 << 60)


def test_whole_huge_pages_are_no_more_than_the_weights_in_them() -> None:
    """Two files of 3 and 5 MB lie in 4 and 6 MB of huge pages: that is all of them, not 125%; a third is in none."""

    def buffer(nbytes: int, huge: int) -> SimpleNamespace:
        return SimpleNamespace(nbytes=nbytes << 20, huge_bytes=lambda: huge << 20)

    assert memory.huge_bytes([buffer(3, 4), buffer(5, 6), buffer(7, 0)]) == 8 << 20
