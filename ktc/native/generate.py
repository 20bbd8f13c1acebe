"""Text from a native model: the engine's own generator over `NativeModel` instead of a Hugging Face model.

Sampling, streaming, stop strings and limits are ktc/engine/generate.py; only the steps differ.
"""

from __future__ import annotations

from typing import Any

from ktc.engine.generate import TextGenerator, common_length
from ktc.graph.build import PREFILL_CHUNK
from ktc.native.engine import NativeModel


class NativeGenerator(TextGenerator):
    """`TextGenerator` with the caches of a `NativeModel`; prompts reuse what they share with the last one."""

    def __init__(self, model: NativeModel, tokenizer: Any, prefill_chunk: int = PREFILL_CHUNK) -> None:
        super().__init__(model, tokenizer, prefill_chunk)
        self.native = model
        self.context = model.context

    def reset(self) -> None:
        super().reset()
        self.native.reset()

    def _feed(self, tokens: list[int]) -> Any:
        logits = self.native.prefill(tokens)
        self._cached.extend(tokens)
        return logits

    def _reuse(self, prompt: list[int]) -> int:
        """Go back to the common beginning; newer positions of the caches are overwritten."""
        common = common_length(self._cached[: self.native.position], prompt[:-1])
        self._cached = self._cached[:common]
        self.native.position = common
        return common

    def _step(self, tokens: list[int]) -> Any:
        logits = self.native.decode(tokens[0])
        self._cached.extend(tokens)
        return logits
