"""What docs/cli.md says of signals: how a compile and a run end, and that the same compile continues."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ktc.compile import compile_checkpoint
from tests.bundle.conftest import tree

SHAPE = {"num_hidden_layers": 7, "hidden_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 16}
ATTEMPTS = 5


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ktc", *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "finished shards are kept"), (signal.SIGTERM, -signal.SIGTERM, "")],
)
def test_c10_an_ended_compile_continues(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, number: signal.Signals, code: int, said: str
) -> None:
    """failures.md C10: the signal comes while shards are being packed; some are finished, some are not."""
    checkpoint = tiny_checkpoint("deepseek_v3", **SHAPE)
    out, journal = tmp_path / "m.ktc", tmp_path / "m.ktc.partial" / "journal.jsonl"
    command = ("compile", checkpoint, "-o", out, "--no-kernels", "--no-logits", "-j", 1)
    for _ in range(ATTEMPTS):
        process = start(*command)
        while process.poll() is None and not (journal.exists() and len(journal.read_text().splitlines()) > 2):
            time.sleep(0.002)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        if process.returncode != 0:
            break
        shutil.rmtree(out)  # it was done before the signal came
    assert process.returncode == code, err
    assert said in err and "Traceback" not in err and ("interrupted" in err) == bool(said)
    assert not out.exists() and len(journal.read_text().splitlines()) > 2
    again = start(*command)
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0 and "continuing" in err
    compile_checkpoint(checkpoint, "int4", tmp_path / "whole.ktc", variants=(), logits=False)
    assert tree(out) == tree(tmp_path / "whole.ktc")


def test_a_run_that_is_terminated_ends_at_once(compiled: Callable[..., Path]) -> None:
    bundle = compiled("deepseek_v3", tokenizer="byte", max_position_embeddings=100_000)
    process = start("run", bundle, "-p", "x", "--max-tokens", 99_000, "--context", 100_000, "--temperature", 1)
    assert process.stdout is not None
    process.stdout.read(1)  # the text has begun
    process.terminate()
    _, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGTERM or "tokens/s" in err  # or an end of text came first
    assert "Traceback" not in err
