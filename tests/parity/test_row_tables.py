"""The embedding table of a bundle stays in its shard: the bits of one in memory, less to read, errors that say what."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktc.bundle.reader import Bundle, open_bundle
from ktc.compile import compile_checkpoint
from ktc.engine import memory
from ktc.engine.chat import encode_text
from ktc.engine.kernels import Kernels
from ktc.errors import BundleError, KtcError
from ktc.graph.ir import Program
from ktc.native import NativeModel, open_native, weights
from ktc.native.engine import load_program
from ktc.native.generate import NativeGenerator
from ktc.native.tokenizer import load_tokenizer
from tests.tiny import make_tiny

TABLE = "model.embed_tokens.weight"
Native = Callable[..., NativeModel]


@pytest.fixture
def native(library: Callable[[str], Path], best_variant: str) -> Native:
    def get(path: Path, **options: Any) -> NativeModel:
        return open_native(path, kernel_library=library(best_variant), threads=2, **options)

    return get


@pytest.fixture
def copied(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle("qwen3_moe", "int4"), tmp_path / "copy.ktc"))


def table_of(bundle: Bundle) -> Any:
    return bundle.tensors[None, TABLE]


def logits(model: NativeModel, prompt: list[int]) -> Any:
    model.reset()
    first = model.prefill(prompt, rows=len(prompt))
    return np.concatenate([first, *[model.decode(i)[None] for i in (0, model.vocab - 1, 9)]])


@pytest.mark.parametrize(
    ("family", "recipe", "dtype", "in_file"),
    [
        ("deepseek_v3", "int4", "bf16", True),
        ("gpt_oss", "bf16", "fp32", True),
        ("granitemoe", "int4", "bf16", True),  # tied: the packed head is another tensor
        ("granitemoe", "fp32", "bf16", True),
        ("granitemoe", "tied.yaml", "bf16", False),  # tied: the head multiplies by the table
    ],
)
def test_logits_equal_those_of_a_table_in_memory(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, recipe: str, dtype: str, in_file: bool
) -> None:
    if recipe == "tied.yaml":
        recipe = str(tmp_path / recipe)
        Path(recipe).write_text(
            "version: 1\nname: experts\nrules:\n  - {match: {role: moe}, replace: {class: ktc.FusedMoE, "
            "device: cpu, kwargs: {backend: hybrid_AMX_AVX512, data_type: bf16}}}\n"
        )
    checkpoint = make_tiny(family, tmp_path / "model", dtype=dtype, tokenizer="chat")
    path = tmp_path / "model.ktc"
    compile_checkpoint(checkpoint, recipe, path, variants=(), jobs=1)
    opened = open_bundle(path)
    program, table = load_program(opened), table_of(opened)
    assert table.dtype == {"bf16": "BF16", "fp32": "F32"}[dtype]
    model = native(path, chunk=16)
    last = model.vocab - 1
    prompt = [0, last, 7, 7, 7, last, 0, *range(100, 140), 0]
    got = logits(model, prompt)
    assert weights.row_tables(program) == ({TABLE} if in_file else set())
    assert ((None, TABLE) in weights.wanted_tensors(opened, program)) != in_file
    report = model.ktc_report
    assert report is not None and ("rows read from its file" in "\n".join(report.lines())) == in_file

    monkeypatch.setattr(weights, "row_tables", lambda program: set())
    held = native(path, chunk=16)
    assert np.array_equal(got, logits(held, prompt))
    saved = held.graph.weights.nbytes - model.graph.weights.nbytes  # type: ignore[attr-defined]
    assert (saved > table.nbytes - 2 * weights.PAGE) if in_file else saved == 0  # spans keep their place in a page


def test_only_what_is_read_must_fit_and_is_counted(
    native: Native, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktc.native import engine

    opened = open_bundle(copied)
    program = load_program(opened)
    read: list[int] = []
    total: list[int] = []

    class Counting(engine.Progress):
        def __init__(self, what: str, total_: int, unit: str) -> None:
            super().__init__(what, total_, unit)
            total.append(total_)

        def update(self, amount: int, detail: str = "") -> None:
            read.append(amount)
            super().update(amount, detail)

    needed = sum(ref.nbytes for ref in weights.wanted_tensors(opened, program).values()) + program.state_bytes(256)
    monkeypatch.setattr(engine, "Progress", Counting)
    monkeypatch.setattr(memory, "available_memory", lambda: needed)
    native(copied)
    assert total[0] == needed - program.state_bytes(256)
    assert 0 <= sum(read) - total[0] < 64 * len(opened.tensors)  # gaps between neighbours are read too
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    with pytest.raises(KtcError, match="are available"):
        native(copied)


def test_a_shard_that_has_become_shorter(native: Native, copied: Path) -> None:
    model = native(copied)
    table = table_of(open_bundle(copied))
    prompt = [4, model.vocab - 1, 30, 31]
    want = logits(model, prompt)
    whole = table.file.read_bytes()
    model.reset()
    model.prefill(prompt)
    row = table.nbytes // table.shape[0]
    os.truncate(table.file, table.offset + 9 * row + 1)
    for failing, call in (
        (9, lambda: model.decode(9)),
        (model.vocab - 1, lambda: model.prefill([1, 2, model.vocab - 1])),
    ):
        with pytest.raises(
            KtcError, match=rf"{table.file}: cannot read row {failing} of {TABLE}: .* ends at"
        ) as raised:
            call()
        assert "ktc verify" in str(raised.value.hint) and model.position == len(prompt)
    assert np.isfinite(model.decode(8)).all()  # rows that are still there
    table.file.write_bytes(whole)
    assert np.array_equal(logits(model, prompt), want)


def test_a_request_after_a_failed_one(native: Native, copied: Path) -> None:
    tokenizer = load_tokenizer(copied / "model")
    generator = NativeGenerator(native(copied), tokenizer)
    table = table_of(open_bundle(copied))
    prompt = encode_text(tokenizer, "the lazy dog")
    want = generator.generate(prompt, max_tokens=8, ignore_eos=True).ids
    generator.reset()
    whole = table.file.read_bytes()
    os.truncate(table.file, table.offset)
    with pytest.raises(KtcError, match="cannot read row"):
        generator.generate(prompt, max_tokens=8, ignore_eos=True)
    table.file.write_bytes(whole)
    assert generator.generate(prompt, max_tokens=8, ignore_eos=True).ids == want


def test_a_bundle_may_be_moved_and_removed_while_it_runs(native: Native, copied: Path) -> None:
    model = native(copied)
    want = logits(model, [3, 50, 200])
    copied.rename(copied.with_name("moved.ktc"))
    assert np.array_equal(logits(model, [3, 50, 200]), want)
    shutil.rmtree(copied.with_name("moved.ktc"))
    assert np.array_equal(logits(model, [3, 50, 200]), want)


def test_a_shard_that_becomes_shorter_while_it_is_opened(copied: Path) -> None:
    opened = open_bundle(copied)
    program, table = load_program(opened), table_of(opened)
    os.truncate(table.file, table.offset + table.nbytes - 1)
    with pytest.raises(BundleError, match=rf"{table.file}: file ends too early for {TABLE}") as raised:
        weights.BundleWeights(opened, program, Kernels(None, None))
    assert "ktc verify" in str(raised.value.hint)


def test_a_table_that_is_missing_is_named(copied: Path) -> None:
    opened = open_bundle(copied)
    program: Program = load_program(opened)
    del opened.tensors[None, TABLE]
    with pytest.raises(BundleError, match=f"tensor {TABLE} is missing"):
        weights.BundleWeights(opened, program, Kernels(None, None))
