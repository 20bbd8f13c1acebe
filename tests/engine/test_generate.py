"""TextGenerator over a plain Hugging Face model: tokens, reasons, cache reuse, interrupts."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from ktc.engine.generate import TextGenerator
from ktc.engine.sampling import SamplingOptions
from ktc.errors import KtcError

PROMPT = [0, 70, 71, 80, 90, 91, 75]


@pytest.fixture
def generator(hf_model, tokenizer) -> TextGenerator:
    return TextGenerator(hf_model, tokenizer, prefill_chunk=4)


def test_greedy_equals_generate(generator, hf_model) -> None:
    out = generator.generate(PROMPT, max_tokens=16)
    ids = torch.tensor([PROMPT])
    expected = hf_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert out.ids == expected[0, len(PROMPT) :].tolist()
    assert out.timings.prompt_tokens == len(PROMPT) and out.timings.decode_tokens == len(out.ids)


def test_text_is_what_was_streamed(generator, tokenizer) -> None:
    pieces: list[str] = []
    out = generator.generate(PROMPT, max_tokens=24, on_text=pieces.append)
    assert "".join(pieces) == out.text
    assert out.text == tokenizer.decode(out.ids, skip_special_tokens=True).rstrip("\ufffd")


def test_seed_repeats(generator) -> None:
    options = SamplingOptions(temperature=1.0, top_p=1.0, seed=9)
    assert (
        generator.generate(PROMPT, max_tokens=12, sampling=options).ids
        == generator.generate(PROMPT, max_tokens=12, sampling=options).ids
    )


def test_finish_reasons(generator) -> None:
    free = generator.generate(PROMPT, max_tokens=12, ignore_eos=True)
    assert free.finish_reason == "length" and len(free.ids) == 12
    generator.eos = frozenset([free.ids[4]])
    stopped = generator.generate(PROMPT, max_tokens=12)
    assert stopped.finish_reason == "stop" and stopped.ids == free.ids[: free.ids.index(free.ids[4]) + 1]
    assert generator.generate(PROMPT, max_tokens=0).ids == []


def test_stop_string_across_tokens(generator) -> None:
    free = generator.generate(PROMPT, max_tokens=30, ignore_eos=True)
    stop = free.text[6:10]
    out = generator.generate(PROMPT, max_tokens=30, stop=[stop], ignore_eos=True)
    assert out.finish_reason == "stop" and out.text == free.text[: free.text.find(stop)]


def test_a3_context_full_is_a_reason_not_a_crash(generator) -> None:
    # failure A3: the end of the context aborted the program
    out = generator.generate(PROMPT, ignore_eos=True)
    assert out.finish_reason == "context_full" and len(PROMPT) + len(out.ids) == 64
    full = generator.generate([5] * 64, ignore_eos=True)
    assert full.finish_reason == "context_full" and full.ids == []
    with pytest.raises(KtcError, match=r"context full: the prompt has 65 tokens, and there is room for 64"):
        generator.generate([5] * 65)
    with pytest.raises(KtcError, match="empty"):
        generator.generate([])


def test_the_cache_is_reused_and_changes_nothing(generator, hf_model, tokenizer) -> None:
    first = generator.generate(PROMPT, max_tokens=6, ignore_eos=True)
    longer = PROMPT + first.ids + [33, 44]
    second = generator.generate(longer, max_tokens=6, ignore_eos=True)
    assert second.timings.prompt_cached == len(PROMPT) + 5  # the last id was never fed
    changed = [*PROMPT[:4], 12, 13]
    third = generator.generate(changed, max_tokens=6, ignore_eos=True)
    assert third.timings.prompt_cached == 4
    for prompt, out in ((longer, second), (changed, third)):
        fresh = TextGenerator(hf_model, tokenizer).generate(prompt, max_tokens=6, ignore_eos=True)
        assert fresh.timings.prompt_cached == 0 and fresh.ids == out.ids


def test_interrupt_ends_the_generation_not_the_program(generator) -> None:
    seen: list[str] = []

    def press(text: str) -> None:
        seen.append(text)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    out = generator.generate(PROMPT, on_text=press, ignore_eos=True)
    assert out.finish_reason == "interrupted" and out.text == "".join(seen) and len(out.ids) < 40
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = generator.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert again.ids == out.ids[:4]


def test_a_failing_model_leaves_no_stale_cache(generator, hf_model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generator.generate(PROMPT, max_tokens=4, ignore_eos=True).ids
    layer = hf_model.model.layers[1]
    calls = iter([False, True])
    forward = layer.forward

    def failing(*args, **kwargs):
        if next(calls, False):
            raise RuntimeError("worker died")
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", failing)
    with pytest.raises(RuntimeError, match="worker died"):
        generator.generate([*PROMPT, 9, 8, 7], max_tokens=4)
    assert generator.generate(PROMPT, max_tokens=4, ignore_eos=True).ids == expected
