"""The same greedy tokens from `model.generate()`, from TextGenerator and from the command line."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from ktc.engine.chat import encode_chat, load_tokenizer
from ktc.engine.generate import TextGenerator
from tests.parity.conftest import MODELS


@pytest.mark.parametrize("name", list(MODELS))
def test_greedy_tokens_agree(name: str, loaded, hf, checkpoint) -> None:
    model = loaded(name, "fp32")
    tokenizer = load_tokenizer(checkpoint(name))
    prompt = tokenizer("To be, or not")["input_ids"]
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = hf(name).generate(ids, **options)[0, len(prompt) :].tolist()
    assert model.generate(ids, **options)[0, len(prompt) :].tolist() == expected
    assert TextGenerator(model, tokenizer).generate(prompt, max_tokens=16).ids == expected
    assert TextGenerator(model, tokenizer, prefill_chunk=3).generate(prompt, max_tokens=16).ids == expected


def test_batched_generation_with_padding(loaded, hf) -> None:
    model, reference = loaded("deepseek_v3", "fp32"), hf("deepseek_v3")
    ids = torch.tensor([[258, 258, 256, 70, 71], [256, 72, 73, 74, 75]])
    mask = (ids != 258).long()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


def test_pipeline_and_streamer_work(loaded, checkpoint) -> None:
    from transformers import TextStreamer, pipeline

    model, tokenizer = loaded("deepseek_v3", "int8"), load_tokenizer(checkpoint("deepseek_v3"))
    out = pipeline("text-generation", model=model, tokenizer=tokenizer)("Hark", max_new_tokens=4, do_sample=False)
    assert out[0]["generated_text"].startswith("Hark")
    ids = torch.tensor([tokenizer("Hark")["input_ids"]])
    model.generate(ids, max_new_tokens=4, do_sample=False, streamer=TextStreamer(tokenizer))


def test_run_gives_the_tokens_of_generate(loaded, bundle, library, best_variant, checkpoint) -> None:
    from ktc.cli.run_cmd import command

    path = bundle("deepseek_v3", "int4")
    model, tokenizer = loaded("deepseek_v3", "int4"), load_tokenizer(checkpoint("deepseek_v3"))
    arguments = [str(path), "-p", "To be", "--greedy", "--max-tokens", "16", "--json", "--threads", "2"]
    arguments += ["--kernel-library", str(library(best_variant))]
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert result.exception is None, result.output
    out = json.loads(result.stdout)
    ids = torch.tensor([tokenizer("To be")["input_ids"]])
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    assert out["ids"] == expected
    assert out["finish_reason"] in ("length", "stop")
    chat = CliRunner().invoke(command, [*arguments, "--chat"], standalone_mode=False)
    prompt = encode_chat(tokenizer, [{"role": "user", "content": "To be"}])
    assert json.loads(chat.stdout)["ids"] == TextGenerator(model, tokenizer).generate(prompt, max_tokens=16).ids
