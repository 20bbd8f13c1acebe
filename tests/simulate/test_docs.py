"""docs/simulate.md: every field of the schema is documented, its example is a profile, its comparison is current."""

from __future__ import annotations

import json
import re

import pytest

from ktc.simulate import load_profile, simulate
from ktc.simulate.profile import parse_profile
from tests.simulate.conftest import ROOT

TEXT = (ROOT / "docs" / "simulate.md").read_text()


def test_every_field_is_documented() -> None:
    schema = json.loads((ROOT / "ktc" / "simulate" / "schema.json").read_text())
    fields = TEXT.partition("## The profile")[2]
    device = {**schema["properties"]["device"]["else"]["properties"]}
    for section, properties in [("cpu", schema["properties"]["cpu"]["properties"]), ("device", device)]:
        for name in properties:
            assert f"`{section}.{name}" in fields, f"{section}.{name}"
    for name in device["kernels"]["properties"]:
        assert f"`{name}`" in fields, name
    assert "`link.gbs`, `link.latency_us`" in fields and "`host.submit_us`, `host.sync_us`" in fields


def test_the_example_is_a_profile() -> None:
    example = re.search(r"```yaml\n(.*?)```", TEXT, re.S)
    assert example is not None
    assert parse_profile(example[1], "docs/simulate.md").name == "my-machine"


def test_the_printed_table_and_the_residuals_are_current(deepseek) -> None:
    rows = simulate(deepseek("bf16"), load_profile("paper-2x8452y-a100")).rows
    for row in rows[:5]:
        line = next(x for x in TEXT.splitlines() if re.match(rf"  [ *] {row.deferred} ", x))
        layer, rate = re.findall(r"\d+\.\d+", line)[:2]
        assert float(layer) == pytest.approx(row.layer_seconds * 1e3, abs=0.0006)
        assert float(rate) == pytest.approx(row.tokens_per_second, abs=0.006)
    simulated = {
        "K = 0: CPU busy": rows[0].layer.cpu,
        "K = 0: device busy": rows[0].layer.device,
        "K = 0: both": rows[0].layer.both,
        "K = 0: waiting and copying": rows[0].layer.idle,
        "K = 2: layer time": rows[2].layer_seconds / rows[0].layer_seconds - 1,
        "K = 3: layer time": rows[3].layer_seconds / rows[0].layer_seconds - 1,
        "K = 3: tokens/s": rows[3].tokens_per_second / rows[0].tokens_per_second - 1,
        "K = 3: device busy": rows[3].layer.device,
    }
    for name, value in simulated.items():
        cells = next(x for x in TEXT.splitlines() if x.startswith(f"| {name} |")).split("|")
        assert float(cells[3].strip().rstrip("%")) == pytest.approx(value * 100, abs=0.06), name
