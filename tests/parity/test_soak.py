"""benchmarks/soak.py for a few hundred steps: failing kernels, NaNs, Ctrl-C and a lost thread end texts, not the model.

In a process of its own: it sends itself signals, and is one thread short afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_m8_nothing_hangs_and_no_text_is_wrong(
    tmp_path: Path, library: Callable[[str], Path], best_variant: str
) -> None:
    from ktc.compile import compile_checkpoint
    from tests.tiny import make_tiny

    checkpoint = make_tiny(
        "deepseek_v3", tmp_path / "m", tokenizer="byte", num_experts_per_tok=4, n_routed_experts=16, num_hidden_layers=4
    )
    compile_checkpoint(checkpoint, "int4", tmp_path / "m.ktc", variants=(), jobs=1)
    command = [sys.executable, "benchmarks/soak.py", str(tmp_path / "m.ktc"), "--steps", "900", "--load", "1"]
    command += ["--hang", "60", "--kernel-library", str(library(best_variant))]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["decode_steps"] >= 900 and out["threads"] >= 2
    assert out["texts_ended_by"]["kernel fails"] > 0 and out["texts_ended_by"]["thread ends"] == 1
    assert "model.layers." in out["last_messages"]["kernel fails"]
    assert any("was ended" in warning for warning in out["warnings"])
