"""The checkpoints that other tests stand on: random everywhere, no ties, deterministic, and loadable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import TINY, make_tiny, tiny_model, twin_of


@pytest.mark.parametrize("family", TINY)
def test_nothing_is_left_at_its_initial_value(family: str) -> None:
    """A zero bias or a norm of ones would hide that it was dropped."""
    for name, tensor in tiny_model(family).state_dict().items():
        assert tensor.float().std() > 0.01, name


@pytest.mark.parametrize("family", TINY)
def test_routers_do_not_tie(family: str) -> None:
    """Among random tokens, the k-th and the next expert are apart by far more than rounding."""
    import torch

    model = tiny_model(family)
    hidden = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    gates = [(n, m) for n, m in model.named_modules() if n.endswith(("mlp.gate", "mlp.router", "_moe.router"))]
    assert gates
    for name, gate in gates:
        logits = hidden @ gate.weight.float().T
        ordered = logits.sort(dim=-1, descending=True).values
        assert (ordered[:, 1] - ordered[:, 2]).min() > 1e-4, name
        assert torch.sigmoid(logits).max() < 1 - 1e-6, name


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    one, two, other = (make_tiny("mixtral", tmp_path / str(i), seed=i // 2) for i in (0, 1, 2))
    files = [(p / "model.safetensors").read_bytes() for p in (one, two, other)]
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize(("family", "fmt"), [("deepseek_v3", "fp8"), ("qwen3_moe", "int4"), ("gpt_oss", "mxfp4")])
def test_twins_are_near_the_original(tiny_checkpoint: Callable[..., Path], family: str, fmt: str) -> None:
    """A twin holds the quantised weights: close to the plain checkpoint's, and not the same."""
    from safetensors.torch import load_file

    plain = load_file(tiny_checkpoint(family) / "model.safetensors")
    twin = load_file(twin_of(tiny_checkpoint(family, fmt=fmt)) / "model.safetensors")
    assert plain.keys() == twin.keys()
    name = next(n for n in plain if ".experts." in n and "down_proj" in n and "bias" not in n)
    error = (plain[name].float() - twin[name]).norm() / plain[name].float().norm()
    assert 0.005 < error < 0.2


@pytest.mark.parametrize("kind", ["byte", "chat"])
def test_tokenizer_round_trips_every_byte(tiny_checkpoint: Callable[..., Path], kind: str) -> None:
    from transformers import AutoTokenizer

    path = tiny_checkpoint("qwen3_moe", tokenizer=kind)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "Tiny — naïve 日本\n\t!" + "".join(map(chr, range(32, 127)))
    ids = tokenizer(text)["input_ids"]
    assert ids == [256, *text.encode()]
    assert tokenizer.decode(ids[1:]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    assert (tokenizer.chat_template is not None) == (kind == "chat")
    if kind == "chat":
        messages = [{"role": "user", "content": "Hi"}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert ids == [256, 259, *b"Hi\n"]
