"""From token ids to text as it comes: whole characters only, nothing of a stop string.

`Detokenizer` turns ids into text pieces that concatenate to valid UTF-8 without the replacement
characters of a character split over tokens (failure T4). `StopMatcher` cuts the text at the first
stop string, also where it spans tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 12
"""A character has at most 4 bytes; tokens beyond that are not an unfinished character but bytes that are no text."""


class Detokenizer:
    """Incremental `tokenizer.decode`.

    Decodes a short window of ids again at each step, because what a token looks like may depend on the one before
    it (leading spaces, byte runs): text = decode(window + new) minus decode(window).
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._window = 0  # ids from here on are decoded again
        self._done = 0  # ids up to here have been handed out as text

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return str(text)

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode(self._ids[self._window :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._done <= MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """The text still held back; an unfinished character at the very end is dropped."""
        text = self._take(self._decode(self._ids[self._window :]))
        return text.rstrip(REPLACEMENT)

    def _take(self, text: str) -> str:
        before = self._decode(self._ids[self._window : self._done])
        self._window, self._done = self._done, len(self._ids)
        return text[len(before) :]


class StopMatcher:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.hit: str | None = None

    def add(self, text: str) -> str:
        """The text that is safe to show. Sets `hit` when a stop string was found; nothing after it is shown."""
        if self.hit is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda f: f[0])
            safe, self._held = self._held[:at], ""
            return safe
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def finish(self) -> str:
        """What was held back in vain."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest proper prefix of `stop` that the held text ends with."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0
