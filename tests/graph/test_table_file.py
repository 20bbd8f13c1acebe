"""An embedding table that stays in its file: the bits of one in memory, and an error where the file fails."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ktc import _runtime
from ktc.graph.build import GraphExecutor
from ktc.graph.inventory import Inventory
from ktc.graph.lower import lower
from ktc.graph.oracle import ModelWeights
from tests.tiny import tiny_model

TABLE = "model.embed_tokens.weight"
BEFORE = 1030
"""Bytes of the file before the table: rows are aligned to nothing."""


class FileWeights(ModelWeights):
    """The model's embedding table is in a file of its own."""

    def __init__(self, model: Any, path: Path) -> None:
        super().__init__(model)
        tensor = self.tensors.pop(TABLE)  # whoever wanted it in memory would fail
        path.write_bytes(bytes(BEFORE) + tensor.contiguous().view(torch.uint8).numpy().tobytes() + b"more")
        name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[tensor.dtype]
        self.opened = _runtime.TableFile(os.fsencode(path), TABLE, BEFORE, name, *tensor.shape)

    def table(self, name: str) -> Any:
        assert name == TABLE
        return self.opened


def executors(path: Path, family: str = "qwen3_moe", dtype: str = "fp32") -> tuple[GraphExecutor, GraphExecutor]:
    """The same model with its table in memory, and in `path`."""
    overrides = {"tie_word_embeddings": False} if family == "granitemoe" else {}
    model = tiny_model(family, dtype=dtype, **overrides)
    program = lower(model.config, Inventory.from_model(model))
    memory, file = (GraphExecutor(program, w, chunk=16) for w in (ModelWeights(model), FileWeights(model, path)))
    return memory, file


def ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])  # the second scales the rows
def test_the_bits_are_those_of_a_table_in_memory(tmp_path: Path, family: str, dtype: str) -> None:
    memory, file = executors(tmp_path / "table", family, dtype)
    last = memory.program.vocab - 1
    chunks = [ids(0, last, 5, 5, 0, last, last, 64, 63), ids(7), ids(last), ids(0), ids(3, 3)]
    position = 0
    for chunk in chunks:
        decode = len(chunk) == 1
        got, want = (g.step(chunk, position, decode=decode, rows=len(chunk)) for g in (file, memory))
        assert np.array_equal(got, want) and np.isfinite(got).all()
        position += len(chunk)


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table"
    memory, file = executors(path)
    prompt, row = ids(4, 90, 11), 4 * 64
    want = [memory.step(prompt, 0), memory.step(ids(90), 3, decode=True)]
    whole = path.read_bytes()
    assert np.array_equal(file.step(prompt, 0), want[0])
    for size in (BEFORE + 90 * row + 10, BEFORE + 90 * row, 0):  # within the row, before it, nothing left
        os.truncate(path, size)
        failing = 90 if size else 4
        why = rf"embed model\.embed_tokens at position {{}}: \S*/table: cannot read row {{}} of {TABLE}: .*{size}$"
        with pytest.raises(RuntimeError, match=why.format(0, failing)):
            file.step(prompt, 0)
        with pytest.raises(RuntimeError, match=why.format(3, 90)):
            file.step(ids(90), 3, decode=True)
        path.write_bytes(whole)  # the same file again
        assert np.array_equal(file.step(prompt, 0), want[0])
        assert np.array_equal(file.step(ids(90), 3, decode=True), want[1])


def test_the_file_may_be_moved_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "table"
    memory, file = executors(path)
    path.rename(tmp_path / "moved")
    path.write_bytes(b"another file")
    assert np.array_equal(file.step(ids(4, 90), 0), memory.step(ids(4, 90), 0))
    (tmp_path / "moved").unlink()
    assert np.array_equal(file.step(ids(77), 2, decode=True), memory.step(ids(77), 2, decode=True))


def test_files_that_hold_no_such_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(99))
    assert _runtime.TableFile(str(path), TABLE, 3, "bf16", 6, 8)
    for offset, kind, rows, cols in ((4, "bf16", 6, 8), (3, "bf16", 7, 8), (3, "fp32", 6, 8), (100, "bf16", 1, 1)):
        with pytest.raises(RuntimeError, match=rf"/short: file ends too early for {TABLE}, at offset 99$"):
            _runtime.TableFile(str(path), TABLE, offset, kind, rows, cols)
    with pytest.raises(RuntimeError, match=r"/gone: cannot open: No such file"):
        _runtime.TableFile(str(tmp_path / "gone"), TABLE, 0, "bf16", 1, 1)
    with pytest.raises(ValueError, match="unknown data type"):
        _runtime.TableFile(str(path), TABLE, 0, "int8", 1, 1)


@pytest.mark.parametrize("shape", [(127, 64), (128, 63), (128, 65)])
def test_a_table_that_does_not_fit_the_program_is_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    model = tiny_model("qwen3_moe")
    weights = FileWeights(model, tmp_path / "table")
    weights.opened = _runtime.TableFile(str(tmp_path / "table"), TABLE, 0, "bf16", *shape)
    with pytest.raises(ValueError, match=rf"{shape[0]} rows of {shape[1]} does not fit the program"):
        GraphExecutor(lower(model.config, Inventory.from_model(model)), weights)


# ---- what the disk is asked for ---------------------------------------------------------------------
PAGES_PER_ROW = 2
HIDDEN = PAGES_PER_ROW * mmap.PAGESIZE // 2


def cached_pages(path: Path) -> set[int]:
    """Pages of a file that are in the page cache."""
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as view:
        count = len(view) // mmap.PAGESIZE
        found = (ctypes.c_ubyte * count)()
        start = ctypes.c_char.from_buffer(view)
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), found) == 0
        )
        del start
    return {page for page in range(count) if found[page] & 1}


def row_pages(*rows: int) -> set[int]:
    return {PAGES_PER_ROW * row + i for row in rows for i in range(PAGES_PER_ROW)}


@pytest.fixture
def cold(tmp_path: Path) -> tuple[GraphExecutor, Path]:
    """A program that embeds ids, over a table of which nothing is in the page cache."""
    path = tmp_path / "table"
    model = tiny_model("mixtral", hidden_size=HIDDEN, head_dim=16, intermediate_size=32, num_hidden_layers=1)
    weights = FileWeights(model, path)
    rows = model.config.vocab_size
    np.random.default_rng(3).integers(0, 60, (rows, HIDDEN), np.uint16).tofile(path)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path):
        pytest.skip("this file system is memory")
    weights.opened = _runtime.TableFile(str(path), TABLE, 0, "bf16", rows, HIDDEN)
    return GraphExecutor(lower(model.config, Inventory.from_model(model)), weights, chunk=16), path


def test_one_row_is_read_and_nothing_ahead(cold: tuple[GraphExecutor, Path]) -> None:
    graph, path = cold
    graph.step(ids(20), 0, decode=True)
    graph.step(ids(21), 1, decode=True)  # a sequential read, to the kernel
    graph.step(ids(60), 2, decode=True)
    assert cached_pages(path) == row_pages(20, 21, 60)


def test_all_rows_of_a_chunk_are_asked_for_first(cold: tuple[GraphExecutor, Path]) -> None:
    """Even where the first one cannot be read."""
    graph, path = cold
    wanted = row_pages(3, 40, 70)
    os.truncate(path, 100 * PAGES_PER_ROW * mmap.PAGESIZE)
    with pytest.raises(RuntimeError, match="cannot read row 120 of"):
        graph.step(ids(120, 70, 3, 40, 70, 120), 0)
    deadline = time.monotonic() + 20
    while cached_pages(path) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cached_pages(path) == wanted
