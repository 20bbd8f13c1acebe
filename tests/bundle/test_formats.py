"""Bundles of every released format stay readable: opened, verified, repacked and run as on the day they were made.

A failure here is never mended by regenerating the bundle.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ktc.bundle import open_bundle
from ktc.bundle.manifest import FORMAT_MAJOR, FORMAT_MINOR
from ktc.bundle.repack import repack
from ktc.bundle.verify import verify

BUNDLES = Path(__file__).resolve().parents[1] / "data" / "bundles"
FORMATS = sorted(p.name for p in BUNDLES.iterdir() if p.is_dir())


def test_the_current_format_has_its_bundle() -> None:
    assert f"format-{FORMAT_MAJOR}.{FORMAT_MINOR}" in FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_it_opens_and_its_goldens_hold(name: str) -> None:
    bundle = open_bundle(BUNDLES / name)
    version = bundle.manifest["format"]
    assert name == f"format-{version['major']}.{version['minor']}"
    report = verify(BUNDLES / name, variant="portable")
    assert report.ok, report
    assert [case.name for case in report.cases] == ["model.layers.1.mlp", "logits"]


@pytest.mark.parametrize("name", FORMATS)
def test_it_can_be_repacked(name: str, tmp_path: Path) -> None:
    made = open_bundle(repack(open_bundle(BUNDLES / name), 1, tmp_path / "1.ktc", variants=()))
    assert made.nodes == 1
    back = open_bundle(repack(made, 2, tmp_path / "2.ktc", variants=()))
    weights = [
        {p: e["sha256"] for p, e in b.files.items() if p.startswith("weights/")}
        for b in (back, open_bundle(BUNDLES / name))
    ]
    assert weights[0] == weights[1]


def test_checked_in_bytes_are_as_they_were(tmp_path: Path) -> None:
    """Git must not have changed line ends; a copy must open too (nothing depends on the place)."""
    for name in FORMATS:
        open_bundle(shutil.copytree(BUNDLES / name, tmp_path / name))
