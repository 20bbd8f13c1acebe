"""Bytes of weights that a decode step reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktc.bundle.reader import open_bundle
from ktc.compile import compile_checkpoint
from ktc.native.engine import load_program
from ktc.native.traffic import weight_bytes_per_token
from tests.tiny import make_tiny


@pytest.mark.parametrize("model_type", ["deepseek_v3", "granitemoe"])  # the second ties its head to the embedding
def test_bytes_are_those_of_what_a_token_touches(model_type: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(model_type, tmp_path / "m")
    compile_checkpoint(checkpoint, "int4", tmp_path / "m.ktc", variants=(), jobs=1)
    bundle = open_bundle(tmp_path / "m.ktc")
    program = load_program(bundle)
    vectors = {"rms_norm", "rope_table", "gqa"}
    moes = {m.name: m.moe for m in bundle.plan.moe_modules() if m.moe is not None}
    expected = 0.0
    seen: set[str] = set()
    for node in program.nodes:
        if node.op == "moe_submit":
            prefix = f"{node.module}.experts."
            total = sum(ref.nbytes for (_, name), ref in bundle.tensors.items() if name.startswith(prefix))
            expected += total * node.params["top_k"] / moes[node.module].experts
        elif node.op not in vectors:
            roles = node.weights if "tiles" in node.weights else {"weight", "kv_b"} & set(node.weights)
            names = {node.weights[role] for role in roles} - seen
            if node.op == "embed" and any(n.op == "linear" and set(n.weights.values()) & names for n in program.nodes):
                continue  # counted at the head
            seen |= names
            rows = bundle.tensors[None, node.weights["weight"]].shape[0] if node.op == "embed" else 1
            expected += sum(bundle.tensors[None, name].nbytes for name in names) / rows
    assert weight_bytes_per_token(bundle, program) == pytest.approx(expected, abs=1)
    assert weight_bytes_per_token(bundle, program, n_skipped=1) < expected
