"""tune.json: what is stored comes back on the same machine, and nothing else is ever believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ktc import host
from ktc.cli.main import cli
from ktc.codegen.variants import VARIANTS
from ktc.errors import DiskError
from ktc.perf import tuning
from ktc.perf.crossover import NEVER, crossover


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KTC_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config"


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_round_trip(own_config: Path) -> None:
    path = tuning.store({"amx:int4": 5, "amx:bf16": 3}, {"int4": {"note": 1}})
    assert path == own_config / "tune.json" and [p.name for p in own_config.iterdir()] == ["tune.json"]
    known = tuning.load()
    assert (
        known.applied and known.min_rows == {"amx:int4": 5, "amx:bf16": 3} and known.measured == {"int4": {"note": 1}}
    )
    assert str(known) == f"amx:bf16 from 3, amx:int4 from 5 tokens per expert ({path})"


def test_not_tuned_means_defaults() -> None:
    known = tuning.load()
    assert not known.applied and known.min_rows == {}


@pytest.mark.parametrize(("variant", "said"), [("amx", "not tuned: `ktc tune`"), ("zen4", "nothing to tune")])
def test_only_tile_kernels_make_a_choice(monkeypatch: pytest.MonkeyPatch, variant: str, said: str) -> None:
    other = replace(host.this_host(), features=frozenset(VARIANTS[variant].required_features))
    monkeypatch.setattr(host, "this_host", lambda: other)
    assert tuning.load().source.startswith(said)


@pytest.mark.parametrize("field", ["cpu", "features", "cpus", "ktc", "abi"])
def test_another_machine_or_version_means_defaults(field: str) -> None:
    path = tuning.store({"amx:int4": 5}, {})
    fingerprint = json.loads(path.read_text())["fingerprint"]
    change(path, fingerprint=fingerprint | {field: "another"})
    known = tuning.load()
    assert not known.applied and known.min_rows == {}
    assert f"measured under another {field}" in known.source


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version": 1}', '{"version": 99, "min_rows": {}}', "\x00\xff"],
)
def test_a_damaged_file_means_defaults(own_config: Path, text: str) -> None:
    own_config.mkdir()
    (own_config / "tune.json").write_bytes(text.encode("latin-1"))
    known = tuning.load()
    assert not known.applied and known.min_rows == {} and "ktc tune" in known.source


@pytest.mark.parametrize("min_rows", [{"amx": -1}, {"amx": 1.5}, {"amx": "5"}, {"": 5}, {"amx": True}, [5], None])
def test_values_that_make_no_sense_mean_defaults(min_rows: object) -> None:
    path = tuning.store({"amx:int4": 5}, {})
    change(path, min_rows=min_rows)
    assert not tuning.load().applied


def test_a_directory_that_cannot_be_made_is_one_clear_error(own_config: Path) -> None:
    own_config.write_text("a file where the directory should be")
    with pytest.raises(DiskError, match="cannot be created"):
        tuning.store({"amx:int4": 5}, {})


@pytest.mark.parametrize(
    ("tile", "expected"),
    [
        ([9, 9, 9, 9], NEVER),
        ([1, 1, 1, 1], 1),
        ([9, 9, 3, 3], 4),
        ([9, 3, 4.1, 3], 2),  # one noisy point does not move it
        ([4, 4, 4, 4], 1),
    ],
)
def test_the_crossover_loses_least(tile: list[float], expected: int) -> None:
    assert crossover([1, 2, 4, 8], [4, 4, 4, 4], tile) == expected


def test_doctor_says_what_is_in_use() -> None:
    def line() -> dict[str, object]:
        result = CliRunner().invoke(cli, ["doctor", "--json"], catch_exceptions=False)
        return next(n for n in json.loads(result.output)["lines"] if n["name"] == "kernel choice")

    assert line()["ok"] and line()["value"] == str(tuning.load())
    path = tuning.store({"amx:int4": 5}, {})
    assert line()["ok"] and "amx:int4 from 5" in str(line()["value"])
    change(path, fingerprint={})
    assert not line()["ok"] and line()["advice"] == "type: ktc tune"


def test_show_prints_what_is_stored(own_config: Path) -> None:
    tuning.store({"amx:int4": 5}, {})
    result = CliRunner().invoke(cli, ["tune", "--show", "--json"], catch_exceptions=False)
    assert json.loads(result.output) == {
        "applied": True,
        "min_rows": {"amx:int4": 5},
        "source": str(own_config / "tune.json"),
    }
