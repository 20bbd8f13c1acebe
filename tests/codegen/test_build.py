"""The build cache: what is reused, what is not, and what happens when something goes wrong in the middle."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ktc
from ktc.codegen import build as build_module
from ktc.codegen import cache, paths
from ktc.codegen.build import build, build_and_say, build_variants, check, make_job, try_cached
from ktc.codegen.compiler import Compiler, Compilers
from ktc.codegen.spec import KernelSpec, KernelSpecs
from ktc.errors import BuildError, DiskError

SPECS = KernelSpecs((KernelSpec("fp32", "none", 0, "store"),))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "kernels"


@pytest.fixture
def events() -> list[tuple[str, str]]:
    return []


def test_build_then_reuse(cache_dir: Path, events: list[tuple[str, str]]) -> None:
    def say(variant: str, event: str) -> None:
        events.append((variant, event))

    first = build_variants(SPECS, ["portable", "emulated"], say)
    assert sorted(first) == ["emulated", "portable"]
    assert sorted(events) == [(v, e) for v in ("emulated", "portable") for e in ("building", "built")]
    events.clear()
    assert build_variants(SPECS, ["portable"], say) == {"portable": first["portable"]}
    assert events == [("portable", "cached")]
    lib = first["portable"]
    record = json.loads((lib.path.parent / "build.json").read_text())
    assert record["sha256"] == cache.sha256_file(lib.path) == lib.sha256
    assert record["flags"] == list(lib.flags) and record["ktc"] == ktc.__version__ and "g++" in record["compiler"]
    assert lib.source.read_text() == make_job(SPECS, "portable").source
    assert cache.built_here(lib.sha256) and not cache.built_here("0" * 64)
    assert (cache_dir.stat().st_mode & 0o077) == 0 and (lib.path.parent.stat().st_mode & 0o077) == 0
    leftovers = [p.name for p in cache_dir.iterdir() if p.name.startswith(".")]
    assert not leftovers
    query = ctypes.CDLL(str(lib.path)).ktc_kernel_query
    query.restype = ctypes.c_void_p
    assert query(1)


def test_i1_i2_a_library_stands_alone(cache_dir: Path) -> None:
    # failures I1, I2: neither torch, Python nor libstdc++ is linked; the needed glibc is recorded and old.
    lib = build_variants(SPECS, ["portable"])["portable"]
    needed = subprocess.run(["readelf", "-d", str(lib.path)], capture_output=True, text=True, check=True).stdout
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "NEEDED" in line]
    assert all(name.startswith(("libc.so", "libm.so")) for name in libraries)
    assert tuple(map(int, lib.glibc_max.split("."))) <= (2, 28)
    assert check(lib.path) == lib.glibc_max


@pytest.mark.parametrize("damage", ["flip", "truncate", "no_record", "bad_json", "untrusted", "swapped"])
def test_a_damaged_entry_is_built_again(cache_dir: Path, damage: str, events: list[tuple[str, str]]) -> None:
    lib = build_variants(SPECS, ["portable"])["portable"]
    record = lib.path.parent / "build.json"
    good = lib.path.read_bytes()
    if damage == "flip":
        lib.path.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    elif damage == "truncate":
        lib.path.write_bytes(good[:1000])
    elif damage == "no_record":
        record.unlink()
    elif damage == "bad_json":
        record.write_text('{"sha256": ')
    elif damage == "untrusted":
        (cache_dir / "trust.json").unlink()
    else:  # a consistent pair of library and record that this machine did not build
        lib.path.write_bytes(good + b"\0")
        record.write_text(record.read_text().replace(lib.sha256, cache.sha256_file(lib.path)))
    assert try_cached(make_job(SPECS, "portable")) is None
    again = build_variants(SPECS, ["portable"], lambda v, e: events.append((v, e)))["portable"]
    assert ("portable", "built") in events
    assert again == lib and again.path.read_bytes() == good  # builds are reproducible


def test_i5_what_a_key_covers(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # failure I5: keys that forget the tool's version, a header, a flag, the template or the compiler.
    keys = {make_job(SPECS, "portable").key}

    def differs(what: str) -> None:
        key = make_job(SPECS, "portable").key
        assert key not in keys, f"the key does not depend on {what}"
        keys.add(key)

    with monkeypatch.context() as m:
        m.setattr(ktc, "__version__", "0.0.0")
        differs("the version")
    with monkeypatch.context() as m:
        m.setattr(build_module, "LAYOUT_VERSION", 2)
        differs("the layout version")
    with monkeypatch.context() as m:
        m.setattr(build_module, "find_compiler", lambda: Compiler(("g++",), "g++ 99"))
        differs("the compiler")
    include = tmp_path / "include"
    shutil.copytree(paths.data_dir("include"), include)
    header = include / "ktc" / "kernels" / "activation.h"
    header.write_text(header.read_text() + "\n")
    with monkeypatch.context() as m:
        m.setattr(build_module, "data_dir", lambda kind: include)
        m.setattr(build_module, "header_files", lambda: sorted((include / "ktc").rglob("*.h")))
        differs("a header")
    assert make_job(SPECS, "emulated").key not in keys
    assert make_job(KernelSpecs((KernelSpec("fp32", "none", 0, "store", 64),)), "portable").key not in keys
    assert make_job(SPECS, "portable").key in keys


def test_concurrent_builds_compile_once(cache_dir: Path) -> None:
    """Four processes want the same library at once: one compiles, the others find it after the lock."""
    script = (
        "from ktc.codegen.build import build_variants; from ktc.codegen.spec import *;"
        "build_variants(KernelSpecs((KernelSpec('fp32','none',0,'store'),)), ['portable'], lambda v, e: print(e))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) for _ in range(4)
    ]
    said = [r.communicate()[0].split() for r in runs]
    assert all(r.returncode == 0 for r in runs)
    assert sorted(s[-1] for s in said) == ["built", "cached", "cached", "cached"]


def test_nobody_waits_for_a_lock_after_the_end(tmp_path: Path) -> None:
    """Another process may hold it for minutes; flock itself cannot be interrupted in a thread."""
    given_up = threading.Event()
    outcome: list[str] = []

    def wait() -> None:
        try:
            with cache.lock(tmp_path / "l", given_up):
                outcome.append("locked")
        except BuildError as error:
            outcome.append(error.message)

    with cache.lock(tmp_path / "l"):
        waiting = threading.Thread(target=wait)
        waiting.start()
        given_up.set()
        waiting.join(60)
        assert outcome == ["interrupted"]
    wait()
    assert outcome == ["interrupted", "locked"]


def test_a_compiler_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    compilers, code = Compilers(), []
    stubborn = threading.Thread(
        target=lambda: code.append(
            compilers.run(["bash", "-c", "trap '' TERM; touch ready; while true; do sleep 0.1; done"], tmp_path)[0]
        )
    )
    stubborn.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    compilers.end()
    stubborn.join(60)
    assert code == [-signal.SIGKILL]
    with pytest.raises(BuildError, match="interrupted"):
        compilers.run(["true"], tmp_path)


def test_compile_errors_are_told_in_the_compilers_words(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(SPECS, "portable")
    broken = build_module.Job(job.variant, job.source + "\nint x = no_such_name;\n", job.compiler, job.key)
    with pytest.raises(BuildError, match="no_such_name") as caught:
        build(broken)
    assert "g++" in str(caught.value.hint) or "c++" in str(caught.value.hint)
    assert not job.directory.exists()
    assert [p.name for p in cache_dir.iterdir() if p.name.startswith(".build")] == []


def test_a_compiler_that_finds_the_disk_full(cache_dir: Path, tmp_path: Path) -> None:
    full = tmp_path / "c++"
    full.write_text("#!/bin/sh\necho 'ld: final link failed: No space left on device' >&2\nexit 1\n")
    full.chmod(0o755)
    job = make_job(SPECS, "portable")
    with pytest.raises(DiskError, match="No space left on device") as caught:
        build(build_module.Job(job.variant, job.source, Compiler((str(full),), "full"), job.key))
    assert "KTC_CACHE_DIR" in str(caught.value.hint) and not job.directory.exists()
    assert [p.name for p in cache_dir.iterdir() if p.name.startswith(".build")] == []


def test_a_library_that_exports_more_or_less_is_refused(cache_dir: Path, tmp_path: Path) -> None:
    job = make_job(SPECS, "portable")
    extra = '\nextern "C" __attribute__((visibility("default"))) int ktc_extra() { return 1; }\n'
    with pytest.raises(BuildError, match="ktc_extra"):
        build(build_module.Job(job.variant, job.source + extra, job.compiler, job.key))
    (tmp_path / "no.so").write_bytes(b"not a library")
    with pytest.raises(BuildError, match="not a readable 64-bit ELF"):
        check(tmp_path / "no.so")


def test_no_compiler(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler") as caught:
        build_variants(SPECS, ["portable"])
    assert "apt install" in str(caught.value.hint)
    monkeypatch.setenv("CXX", str(tmp_path / "missing-c++"))
    with pytest.raises(BuildError, match="missing-c\\+\\+"):
        build_variants(SPECS, ["portable"])


@pytest.mark.parametrize(
    ("command", "message"),
    [('"g++', "is no command: No closing quotation"), ("{}/silent", "reported success and wrote no library")],
)
def test_a_cxx_that_is_no_compiler(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, message: str
) -> None:
    (tmp_path / "silent").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "silent").chmod(0o755)
    monkeypatch.setenv("CXX", command.format(tmp_path))
    with pytest.raises(BuildError, match=message):
        build_variants(SPECS, ["portable"])
    assert not [p for p in cache_dir.glob("*") if p.is_dir()]


def test_blank_cxx_and_a_relative_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "  ")
    monkeypatch.setenv("KTC_CACHE_DIR", "here")
    lib = build_variants(SPECS, ["portable"])["portable"]
    assert lib.path.is_relative_to(tmp_path / "here") and lib.path.is_file()


def test_unknown_variant_and_unwritable_cache(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="unknown kernel variant 'sse9'"):
        build_variants(SPECS, ["sse9"])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DiskError, match="cannot be created"):
        build_variants(SPECS, ["portable"])


def test_a_cache_that_others_may_write_is_refused(cache_dir: Path) -> None:
    cache_dir.mkdir(parents=True)
    cache_dir.chmod(0o777)
    with pytest.raises(DiskError, match="is not private"):
        cache.cache_dir()
    cache_dir.chmod(0o755)
    assert cache.cache_dir() == cache_dir


def test_a_damaged_trust_store_is_said(cache_dir: Path) -> None:
    lib = build_variants(SPECS, ["portable"])["portable"]
    (cache_dir / "trust.json").write_text("[")
    with pytest.raises(BuildError, match="trust store") as caught:
        cache.built_here(lib.sha256)
    assert "delete it" in str(caught.value.hint)


def test_building_is_said_and_the_cache_is_not(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    assert build_and_say(SPECS, ["portable"], said.append)["portable"].path.is_file()
    begun, ended = said
    assert begun == "building kernels: portable (once; this can take minutes)" and ended.startswith("kernels built in ")
    build_and_say(SPECS, ["portable", "emulated", "portable"], said.append)
    assert said[2] == "building kernels: emulated (once; this can take minutes)" and len(said) == 4
    build_and_say(SPECS, ["portable", "emulated"], said.append)
    assert len(said) == 4 and capsys.readouterr() == ("", "")
