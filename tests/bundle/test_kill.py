"""Failure C10: killed at any moment, the same call continues and the result is byte-identical.

The compile runs in a forked child (so that torch is imported once) and is killed with SIGKILL at random
moments until it gets through.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from ktc.bundle.reader import open_bundle
from ktc.compile import compile_checkpoint
from ktc.errors import BundleError
from tests.bundle.conftest import tree

SHAPE = {"num_hidden_layers": 7, "hidden_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 16}


def _compile(checkpoint: Path, out: Path) -> None:
    compile_checkpoint(checkpoint, "int4", out, variants=(), jobs=2, nodes=2)
    os._exit(0)  # a forked child must not run pytest's exit handlers


@pytest.mark.parametrize("seed", [0, 1])
def test_c10_killed_again_and_again(tiny_checkpoint, tmp_path: Path, seed: int) -> None:
    checkpoint = tiny_checkpoint("deepseek_v3", **SHAPE)
    compile_checkpoint(tiny_checkpoint("deepseek_v3"), "int4", tmp_path / "warm.ktc", variants=())  # imports
    started = time.monotonic()
    compile_checkpoint(checkpoint, "int4", tmp_path / "whole.ktc", variants=(), jobs=2, nodes=2)
    whole = time.monotonic() - started
    context, rng = multiprocessing.get_context("fork"), random.Random(seed)
    out, kills, kept = tmp_path / "x.ktc", 0, []
    journal = tmp_path / "x.ktc.partial" / "journal.jsonl"
    for attempt in range(40):
        child = context.Process(target=_compile, args=(checkpoint, out))
        child.start()
        # Later attempts live longer, so that the end is reached however slow the machine is.
        child.join(rng.uniform(0.1, 0.6 + attempt / 8) * whole)
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)  # type: ignore[arg-type]
            child.join()
            kills += 1
            assert not out.exists() or open_bundle(out)  # at every moment: nothing, or a whole bundle
            if not out.exists():
                with pytest.raises(BundleError):
                    open_bundle(tmp_path / "x.ktc.partial")
                kept.append(len(journal.read_text().splitlines()) if journal.exists() else 0)
        else:
            assert child.exitcode == 0
        if out.exists():
            break
    assert kills >= 2, "the machine was too fast to be killed; make SHAPE larger"
    assert kept == sorted(kept), f"finished shards were lost: {kept}"
    assert tree(out) == tree(tmp_path / "whole.ktc")
