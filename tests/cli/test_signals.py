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


def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    environment |= variables
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


def test_an_interrupt_ends_the_compilers(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A compiler is several processes; none of them, and nothing half-written, is left."""
    cache, pids = tmp_path / "cache", tmp_path / "pids"
    compiler = tmp_path / "slow-g++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-o*) sleep 600 & echo $$ $! >>{pids}; wait;; *) exec g++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    command = ("compile", tiny_checkpoint("deepseek_v3", tokenizer="byte"), "-o", tmp_path / "m.ktc", "--no-logits")
    process = start(*command, CXX=str(compiler), KTC_CACHE_DIR=str(cache))
    while process.poll() is None and not (pids.exists() and pids.read_text().endswith("\n")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    said, _, end = err.partition("\n")
    assert process.returncode == 130 and end == "\nktc: interrupted\n"
    assert said.startswith("ktc: building kernels: amx, ")
    for pid in pids.read_text().split():
        assert not running(int(pid))
    assert not [path for path in (cache / "kernels").iterdir() if path.is_dir()]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("m.ktc")) == []


def running(pid: int) -> bool:
    """Whether the process is there and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_that_is_terminated_ends_at_once(compiled: Callable[..., Path]) -> None:
    bundle = compiled("deepseek_v3", tokenizer="byte", max_position_embeddings=100_000)
    process = start("run", bundle, "-p", "x", "--max-tokens", 99_000, "--context", 100_000, "--temperature", 1)
    assert process.stdout is not None
    process.stdout.read(1)  # the text has begun
    process.terminate()
    _, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGTERM or "tokens/s" in err  # or an end of text came first
    assert "Traceback" not in err
