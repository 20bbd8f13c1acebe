"""The work directory of a compile: what it keeps, what it redoes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktc.errors import DiskError, KtcError, UsageError
from ktc.pack.journal import Journal, partial_dir
from ktc.pack.writer import write_atomic

KEY = {"checkpoint": "c", "recipe": "r", "layout": 1}


def start(out: Path, *names: str, key: dict = KEY) -> None:
    with Journal(out, key) as journal:
        for name in names:
            journal.add(name, write_atomic(journal.bundle / name, name.encode() * 100))


def test_c10_finished_shards_are_kept_and_everything_else_goes(tmp_path: Path) -> None:
    # failure C10: a killed conversion had to start again from nothing.
    out = tmp_path / "m.ktc"
    start(out, "weights/a", "weights/b")
    (out.with_name("m.ktc.partial") / "bundle/weights/.c.tmp").write_bytes(b"half")
    (out.with_name("m.ktc.partial") / "bundle/weights/d").write_bytes(b"not in the journal")
    (out.with_name("m.ktc.partial") / "bundle/empty").mkdir()
    with Journal(out, KEY) as journal:
        assert journal.resumed
        assert sorted(journal.finished) == ["weights/a", "weights/b"]
        assert sorted(p.relative_to(journal.bundle).as_posix() for p in journal.bundle.rglob("*")) == [
            "weights",
            "weights/a",
            "weights/b",
        ]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_c9_a_listed_shard_is_hashed_before_it_is_trusted(tmp_path: Path, damage: str) -> None:
    out, said = tmp_path / "m.ktc", []
    start(out, "a", "b")
    path = partial_dir(out) / "bundle/a"
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[3] ^= 1
        path.write_bytes(data[:-1] if damage == "truncate" else data)
    with Journal(out, KEY, say=said.append) as journal:
        assert list(journal.finished) == ["b"]
        assert not path.exists()
    assert len(said) == 1 and said[0].startswith("redoing a:")


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_cut_by_a_kill_is_not_trusted(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "m.ktc"
    start(out, "a", "b")
    journal = partial_dir(out) / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    with Journal(out, KEY) as again:
        assert list(again.finished) == ["a"]


def test_other_inputs_are_refused_by_name_and_discarded_on_request(tmp_path: Path) -> None:
    out, said = tmp_path / "m.ktc", []
    start(out, "a")
    other = {**KEY, "recipe": "another"}
    with pytest.raises(UsageError, match="unfinished compile with another recipe") as error:
        Journal(out, other)
    assert "--force" in (error.value.hint or "")
    with Journal(out, KEY) as journal:
        assert list(journal.finished) == ["a"]  # a refusal loses nothing
    with Journal(out, other, restart=True, say=said.append) as journal:
        assert not journal.finished and list(journal.bundle.iterdir()) == []
    assert "discarding" in said[0]


def test_a_second_compile_of_the_same_output_is_refused(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "m.ktc", KEY),
        pytest.raises(KtcError, match="another process"),
        Journal(tmp_path / "m.ktc", KEY),
    ):
        pass


def test_a_journal_of_another_version_is_not_read(tmp_path: Path) -> None:
    out = tmp_path / "m.ktc"
    start(out, "a")
    path = partial_dir(out) / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["journal"] = 999
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Journal(out, KEY) as journal:
        assert not journal.finished


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "m.ktc", KEY) as journal:
        journal.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_no_work_directory_is_left_alone(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "m.ktc"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "bundle").write_text("data")
    if kind == "file":
        partial_dir(out).write_text("data")
    elif kind == "link":
        partial_dir(out).symlink_to(tmp_path / "mine")
    else:
        (tmp_path / "mine").rename(partial_dir(out))
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="is not the work directory of a compile"):
        Journal(out, KEY, restart=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_kill_before_the_lock_leaves_a_directory_that_is_taken_over(tmp_path: Path) -> None:
    partial_dir(tmp_path / "m.ktc").mkdir()
    start(tmp_path / "m.ktc", "a")


@pytest.mark.parametrize(
    "line",
    [
        {"file": None, "size": 5, "sha256": "x"},
        {"file": "b", "size": "5", "sha256": "x"},
        {"file": "../../victim", "size": 5, "sha256": "x"},
        {"file": "/victim", "size": 5, "sha256": "x"},
        {"file": "b\0c", "size": 5, "sha256": "x"},
        [1],
    ],
)
def test_lines_that_the_journal_never_writes_are_not_believed(tmp_path: Path, line: object) -> None:
    out = tmp_path / "m.ktc"
    start(out, "a")
    with (partial_dir(out) / "journal.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with Journal(out, KEY) as journal:
        assert list(journal.finished) == ["a"]


def test_a_header_that_the_journal_never_writes_starts_anew(tmp_path: Path) -> None:
    out = tmp_path / "m.ktc"
    start(out, "a")
    (partial_dir(out) / "journal.jsonl").write_text('{"journal": 1, "key": [1]}\n')
    with Journal(out, KEY) as journal:
        assert not journal.finished and not list(journal.bundle.iterdir())


@pytest.mark.parametrize("name", ["lock", "journal.jsonl"])
def test_folders_where_files_belong_are_said(tmp_path: Path, name: str) -> None:
    out = tmp_path / "m.ktc"
    start(out, "a")
    (partial_dir(out) / name).unlink()
    (partial_dir(out) / name).mkdir()
    with pytest.raises((UsageError, DiskError), match=r"m\.ktc\.partial"):
        Journal(out, KEY)


def test_a_shard_made_again_is_listed_once(tmp_path: Path) -> None:
    # A layer has a shard per node: with one of them missing, all are made again.
    out = tmp_path / "m.ktc"
    start(out, "node0", "node1")
    start(out, "node0", "node1", "node2")
    files = [json.loads(line).get("file") for line in (partial_dir(out) / "journal.jsonl").read_text().splitlines()]
    assert files == [None, "node0", "node1", "node2"]
