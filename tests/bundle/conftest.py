"""Compiled bundles for tests: made once a session without kernels, copied before they are damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ktc.bundle import manifest
from ktc.compile import compile_checkpoint


@pytest.fixture(scope="session")
def compiled(tiny_checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`compiled(family, recipe="int4", nodes=1, **checkpoint options) -> Path` of a bundle; read only."""
    built: dict[str, Path] = {}

    def get(family: str, recipe: str = "int4", nodes: int = 1, **options: object) -> Path:
        key = repr((family, recipe, nodes, sorted(options.items())))
        if key not in built:
            out = tmp_path_factory.mktemp("bundles") / f"{family}.ktc"
            compile_checkpoint(tiny_checkpoint(family, **options), recipe, out, nodes=nodes, variants=())
            built[key] = out
        return built[key]

    return get


@pytest.fixture
def bundle_copy(compiled, tmp_path: Path) -> Path:
    """A bundle of deepseek_v3 that a test may damage."""
    return Path(shutil.copytree(compiled("deepseek_v3"), tmp_path / "copy.ktc"))


def edit_manifest(bundle: Path, change: Callable[[dict], object]) -> None:
    """Rewrite a bundle's manifest."""
    path = bundle / manifest.MANIFEST
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(manifest.canonical(value))


def relist(bundle: Path, name: str) -> None:
    """Make the manifest agree with a file that a test changed."""
    data = (bundle / name).read_bytes()

    def change(value: dict) -> None:
        for entry in value["files"]:
            if entry["path"] == name:
                entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    edit_manifest(bundle, change)


def tree(folder: Path) -> dict[str, str]:
    """Path -> sha256 of every file."""
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(scope="session")
def with_kernels(tiny_checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of deepseek_v3 with the portable library and goldens of layers and logits; read only."""
    out = tmp_path_factory.mktemp("bundles") / "kernels.ktc"
    compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", out, variants=("portable",))
    return out


@pytest.fixture
def kernels_copy(with_kernels: Path, tmp_path: Path) -> Path:
    """A bundle with kernels that a test may damage."""
    return Path(shutil.copytree(with_kernels, tmp_path / "copy.ktc"))


@pytest.fixture
def another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache and trust store, and no working compiler: nothing was or can be built here."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("KTC_CACHE_DIR", str(cache))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setattr("ktc.host.find_compiler", lambda: None)
    return cache
