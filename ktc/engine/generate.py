"""Generation: prefill in chunks, decode with a cache, stream text, say why it ended.

`TextGenerator` works over any Hugging Face causal model, a ktc one or not. It keeps the cache
between calls and computes only what a prompt does not share with the last one, so a chat does not
prefill its history again. Not here: choosing a token (sampling.py), text pieces (stream.py).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ktc.engine.sampling import Sampler, SamplingOptions
from ktc.engine.stream import Detokenizer, StopMatcher
from ktc.errors import BundleError, KtcError, UsageError

FinishReason = Literal["stop", "length", "context_full", "interrupted"]
PREFILL_CHUNK = 512
"""Tokens per prefill step: bounds scratch whatever the prompt's length."""


@dataclass(frozen=True)
class Timings:
    """Tokens and seconds of the two phases.

    `prompt_cached` tokens were in the cache and cost nothing; `decode_steps` are the model's runs after the prompt
    (the first token comes from the prompt's logits, and the last one is not run).
    """

    prompt_tokens: int
    prompt_cached: int
    prompt_seconds: float
    decode_tokens: int
    decode_steps: int
    decode_seconds: float

    @property
    def prompt_rate(self) -> float | None:
        """Tokens per second; None if none was run."""
        return _rate(self.prompt_tokens - self.prompt_cached, self.prompt_seconds)

    @property
    def decode_rate(self) -> float | None:
        """Steps per second; None if there was none, as with one new token."""
        return _rate(self.decode_steps, self.decode_seconds)

    def line(self) -> str:
        cached = f" ({self.prompt_cached} cached)" if self.prompt_cached else ""
        return (
            f"prompt {_tokens(self.prompt_tokens)}{cached}{_speed(self.prompt_rate)};"
            f" decode {_tokens(self.decode_tokens)}{_speed(self.decode_rate)}"
        )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds else None


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def _speed(rate: float | None) -> str:
    return "" if rate is None else f", {rate:.1f} tokens/s"


@dataclass(frozen=True)
class Generation:
    """What came out. `ids` are the generated ids (an end-of-sequence id included, a stop string's tokens too)."""

    text: str
    ids: list[int]
    finish_reason: FinishReason
    timings: Timings
    seed: int | None = field(default=None)

    def to_json(self) -> dict[str, Any]:
        timings = asdict(self.timings)
        timings.update(
            prompt_tokens_per_second=self.timings.prompt_rate, decode_tokens_per_second=self.timings.decode_rate
        )
        return {
            "text": self.text,
            "ids": self.ids,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "timings": timings,
        }


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event; a second one raises KeyboardInterrupt. A no-op outside the main thread."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handler(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


class TextGenerator:
    """Token-by-token generation with one sequence.

    Args:
        model: a causal `PreTrainedModel` on the CPU.
        tokenizer: its tokenizer, for streaming and stop strings.
        prefill_chunk: tokens per prefill step.
    """

    def __init__(self, model: Any, tokenizer: Any, prefill_chunk: int = PREFILL_CHUNK) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.eos = eos_ids(model, tokenizer)
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._cache: Any = None
        self._cached: list[int] = []

    def reset(self) -> None:
        """Forget the cache."""
        self._cache, self._cached = None, []

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        ignore_eos: bool = False,
    ) -> Generation:
        """Generate after `prompt` (token ids).

        Args:
            max_tokens: at most this many new tokens; None = until the end of the text or of the context.
            sampling: how to draw; None = greedy.
            stop: strings that end the text; they are not part of it.
            on_text: called with each piece of text as it becomes final.
            ignore_eos: go on past end-of-sequence ids (for benchmarks).
        Raises:
            UsageError: an empty prompt, or one that does not fit the context.
        """
        prompt = list(prompt)
        self._check(prompt)
        sampler = Sampler(sampling or SamplingOptions(temperature=0))
        detokenizer, matcher = Detokenizer(self.tokenizer), StopMatcher(stop)
        pieces: list[str] = []

        def show(text: str) -> None:
            if text:
                pieces.append(text)
                if on_text is not None:
                    on_text(text)

        ids: list[int] = []
        steps = 0
        reason: FinishReason = "length"
        with interruptible() as interrupted, self._fresh_after_errors():
            started = time.perf_counter()
            reused, logits = self._prefill(prompt, interrupted)
            prefilled = time.perf_counter()
            while True:
                if logits is None or interrupted.is_set():
                    reason = "interrupted"
                    break
                if max_tokens is not None and len(ids) >= max_tokens:
                    reason = "length"
                    break
                if self.context is not None and len(prompt) + len(ids) >= self.context:
                    reason = "context_full"
                    break
                token = sampler(logits)
                ids.append(token)
                if token in self.eos and not ignore_eos:
                    reason = "stop"
                    break
                show(matcher.add(detokenizer.add(token)))
                if matcher.hit is not None:
                    reason = "stop"
                    break
                if max_tokens is not None and len(ids) >= max_tokens:
                    continue  # the next step's logits are not needed
                logits = self._step([token])
                steps += 1
            ended = time.perf_counter()
        if matcher.hit is None:
            show(matcher.add(detokenizer.finish()))
            show(matcher.finish())
            if matcher.hit is not None:
                reason = "stop"
        timings = Timings(len(prompt), reused, prefilled - started, len(ids), steps, ended - prefilled)
        return Generation("".join(pieces), ids, reason, timings, None if sampler.options.greedy else sampler.seed)

    @contextlib.contextmanager
    def _fresh_after_errors(self) -> Iterator[None]:
        """What a failed step or NaN logits left in the cache must not be reused by the next call."""
        try:
            yield
        except Exception:
            self.reset()
            raise

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise UsageError("the prompt is empty", "give at least one token of text")
        if self.context is not None and len(prompt) > self.context:
            raise UsageError(
                f"context full: the prompt has {len(prompt)} tokens, and there is room for {self.context}",
                "shorten the prompt, or raise --context if that was given",
            )

    def _prefill(self, prompt: list[int], interrupted: threading.Event) -> tuple[int, Any]:
        """Bring the cache to `prompt`. Returns (tokens already cached, logits f32 [V] or None if interrupted)."""
        reused = self._reuse(prompt)
        logits = None
        for begin in range(reused, len(prompt), self.prefill_chunk):
            if interrupted.is_set():
                return reused, None
            logits = self._feed(prompt[begin : begin + self.prefill_chunk])
        return reused, logits

    def _feed(self, tokens: list[int]) -> Any:
        """A chunk of the prompt; as `_step`."""
        return self._step(tokens)

    def _reuse(self, prompt: list[int]) -> int:
        """Keep the common beginning of the cached ids and `prompt` (at least one token is computed anew)."""
        from transformers import DynamicCache

        common = common_length(self._cached, prompt[:-1])
        surplus = len(self._cached) - common
        if self._cache is None or common == 0 or (surplus and not self._crop(surplus)):
            self._cache, self._cached = DynamicCache(config=self.model.config), []
            return 0
        self._cached = self._cached[:common]
        return common

    def _crop(self, surplus: int) -> bool:
        if any(getattr(layer, "is_sliding", False) or not layer.is_croppable for layer in self._cache.layers):
            return False
        self._cache.crop(-surplus)
        return True

    def _step(self, tokens: list[int]) -> Any:
        """Run `tokens` through the model; logits f32 [V] after the last one (numpy)."""
        import torch

        cache, self._cache = self._cache, None  # a failure or interrupt half way leaves no half-updated cache behind
        with torch.inference_mode():
            out = self.model(torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
        self._cache = cache
        self._cached.extend(tokens)
        return out.logits[0, -1].float().numpy()


def check_tokens(tokens: NDArray[np.int64], position: int, context: int, vocab: int) -> None:
    """Whether a model with caches of `context` positions, `position` of them in use, can take these ids.

    Raises:
        KtcError: too many, or one that it does not know.
    """
    if position + len(tokens) > context:
        raise UsageError(
            f"context full: {position} + {len(tokens)} tokens, the caches hold {context}",
            "shorten the prompt, or give --context a larger number if the model allows one",
        )
    if tokens.min() < 0 or tokens.max() >= vocab:
        wrong = tokens[(tokens < 0) | (tokens >= vocab)][0]
        raise KtcError(f"token id {int(wrong)} is outside the vocabulary of {vocab}")


def common_length(old: Sequence[int], new: Sequence[int]) -> int:
    """Of the longest common beginning."""
    differ = (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return next(differ, min(len(old), len(new)))


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids: the generation config's, else the config's, else the tokenizer's.

    Raises:
        BundleError: what the model's files say is no token id.
    """
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            ids = found if isinstance(found, list | tuple) else [found]
            if not all(isinstance(i, int) or (isinstance(i, float) and i.is_integer()) for i in ids):
                raise BundleError(f"the model's configuration: eos_token_id is {found!r}, not token ids")
            return frozenset(int(i) for i in ids)
    return frozenset()
