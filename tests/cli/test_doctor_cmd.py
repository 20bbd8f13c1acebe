"""`ktc doctor`: every fact has a line, every fault an advice, and nothing keeps it from answering."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ktc import host as facts
from ktc.cli.doctor_cmd import examine
from tests.cli.runner import ktc

Capture = pytest.CaptureFixture[str]
NAMES = ["ktc", "packages", "cpu", "features", "amx", "kernels", "cpus", "numa", "memory", "huge pages", "compiler",
         "cache", "disk"]  # fmt: skip


def test_every_line_is_there(capsys: Capture) -> None:
    assert ktc("doctor") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("      ")]
    assert all(line.startswith(("ok    ", "warn  ")) for line in lines)
    assert ktc("doctor", "--json") == 0
    shown = json.loads(capsys.readouterr().out)["lines"]
    assert [line["name"] for line in shown if line["name"] in NAMES] == NAMES
    assert all(line["ok"] == (not line["advice"]) for line in shown)


@pytest.mark.parametrize(
    ("attribute", "value", "name", "advice"),
    [
        ("find_compiler", None, "compiler", "apt install g++"),
        ("transparent_huge_pages", "never", "huge pages", "echo madvise"),
        ("memory", (4 << 30, 1 << 30), "memory", "must fit"),
        ("package_versions", {"torch": None}, "torch", "pip install torch"),
    ],
)
def test_what_is_amiss_gets_an_advice(monkeypatch, attribute: str, value: object, name: str, advice: str) -> None:
    monkeypatch.setattr(facts, attribute, lambda *_: value)
    line = next(line for line in examine() if line.name == name)
    assert not line.ok and advice in line.advice


def test_a_cache_that_cannot_be_is_no_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / "file"))  # of root, whom no mode keeps from writing, too
    *_, cache, disk = examine()
    assert cache.name == "cache" and "cannot be created" in cache.value
    assert cache.advice == "set KTC_CACHE_DIR to a writable directory"
    assert disk.name == "disk" and disk.value.endswith(" free")


def test_a_cache_that_became_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir(mode=0o700)
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    cache = next(line for line in examine() if line.name == "cache")
    assert cache.value == f"{tmp_path / 'kernels'}: not writable" and "set KTC_CACHE_DIR" in cache.advice


def test_one_core_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(facts.this_host(), nodes=((0,),))
    monkeypatch.setattr(facts, "physical_cores", lambda _: 1)
    monkeypatch.setattr(facts, "this_host", lambda: host)
    lines = {line.name: line.value for line in examine()}
    assert lines["cpus"].endswith(", 1 core") and lines["numa"] == "1 node (node 0: 1 CPU)"
    monkeypatch.setattr(facts, "physical_cores", lambda _: 2)
    assert {line.name: line.value for line in examine()}["cpus"].endswith(", 2 cores")


def test_a_check_that_fails_is_a_line(monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("odd machine")

    monkeypatch.setattr(facts, "memory", broken)
    lines = list(examine())
    assert any("RuntimeError: odd machine" in line.value for line in lines)
    assert lines[-1].name == "disk"


def test_it_works_without_torch_and_without_the_runtime() -> None:
    """As after a broken installation: neither can be imported."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'ktc._runtime'):\n    sys.modules[name] = None\n"
        "from ktc.cli.main import main\nmain(['doctor'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the native runtime cannot be loaded" in done.stdout and "compiler" in done.stdout


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    """A manifest's created_by.git: the commit, whether it was changed, and nothing where there is no checkout."""
    if shutil.which("git") is None:
        pytest.skip("no git")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert facts.git_revision(tmp_path) is None
    git("init", "-q")
    assert facts.git_revision(tmp_path) is None  # without a commit
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "-m", "a release", "v1")
    commit = git("rev-parse", "HEAD")
    assert facts.git_revision(tmp_path) == commit and len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert facts.git_revision(tmp_path) == f"{commit}-dirty"
    (tmp_path / "site-packages").mkdir()
    assert facts.git_revision(tmp_path / "site-packages") is None  # the checkout of something else


def test_facts_of_this_machine() -> None:
    host = facts.this_host()
    assert sum(len(node) for node in host.nodes) >= 1
    total, available = facts.memory()
    assert 0 < available <= total
    assert (facts.physical_cores({0}) or 1) == 1
    assert facts.compiler_version("/no/such/compiler") is None


def test_a_containers_memory_limit_counts(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(str(1 << 20))
    (tmp_path / "memory.current").write_text(str(1 << 18))
    assert facts.memory() == (1 << 20, 3 << 18)
    (tmp_path / "memory.max").write_text("max\n")
    assert facts.memory()[0] > 1 << 28
