"""Choosing the next token from a row of logits: greedy, or temperature, top-k, top-p, min-p with a seed.

The filters are applied in that order, as `transformers` applies them. Not here: stopping (generate.py).
Draws come from numpy's PCG64 in double precision, so a seed gives the same tokens on every machine
that gives the same logits.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.errors import BundleError, KtcError, UsageError

_OVERRULE = "overrule it with --temperature, --top-p, --top-k, --min-p or --greedy"


@dataclass(frozen=True)
class SamplingOptions:
    """How to draw a token.

    Attributes:
        temperature: divides the logits; 0 = greedy.
        top_k: keep the k largest logits (ties with the k-th stay); 0 = all.
        top_p: keep the smallest set of tokens whose probability reaches top_p; 1 = all.
        min_p: drop tokens less probable than min_p times the most probable one; 0 = none.
        seed: of the draws; None = a fresh one (`Sampler.seed` says which).
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not np.isfinite(self.temperature) or self.temperature < 0:
            raise UsageError(f"temperature must be a number of at least 0, not {self.temperature}", "0 means greedy")
        if self.top_k < 0:
            raise UsageError(f"top-k must be at least 0, not {self.top_k}", "0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be in (0, 1], not {self.top_p}", "1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p must be in [0, 1], not {self.min_p}", "0 keeps all tokens")
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"seed must be at least 0, not {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_config(cls, generation_config: Any, **given: float | int | None) -> SamplingOptions:
        """The model's own sampling settings where it asks for sampling, our defaults otherwise, then what is `given`.

        Args:
            generation_config: a `transformers.GenerationConfig` or None.
            given: values the user set; None = not set.
        Raises:
            UsageError: a value that makes no sense. BundleError: one in the model's own settings.
        """
        values: dict[str, Any] = {}
        if generation_config is not None and getattr(generation_config, "do_sample", False):
            values = {"temperature": 1.0, "top_p": 1.0}
            for name in ("temperature", "top_k", "top_p", "min_p"):
                value = getattr(generation_config, name, None)
                if value is None or given.get(name) is not None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise BundleError(f"the model's generation_config.json: {name} is {value!r}", _OVERRULE)
                values[name] = max(0, int(value)) if name == "top_k" else value  # -1 is a spelling of "all"
            try:
                cls(**values)
            except KtcError as error:
                raise BundleError(f"the model's generation_config.json: {error.message}", _OVERRULE) from error
        values.update({name: value for name, value in given.items() if value is not None})
        return cls(**values)


def probabilities(logits: NDArray[np.float32], options: SamplingOptions) -> NDArray[np.float64]:
    """Filtered and normalised probabilities [V] of logits [V]. Not for greedy options."""
    x: NDArray[np.float64] = logits.astype(np.float64) / options.temperature
    if 0 < options.top_k < x.size:
        x = np.where(x < np.partition(x, -options.top_k)[-options.top_k], -np.inf, x)
    p: NDArray[np.float64] = np.exp(x - x.max())
    p /= p.sum()
    if options.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= options.top_p]] = 0
        p /= p.sum()
    if options.min_p > 0:
        p[p < options.min_p * p.max()] = 0
        p /= p.sum()
    return p


class Sampler:
    """Draws token ids; holds the random state, so one Sampler serves one generation (or one chat)."""

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        # numpy.random is slow to import, and greedy choices draw nothing
        self._random: Any = None if options.greedy else np.random.Generator(np.random.PCG64(self.seed))

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Logits f32 [V] -> token id.

        Raises:
            KtcError: the logits hold a NaN (an infinity is fine), so no choice would mean anything.
        """
        if np.isnan(logits).any():
            raise KtcError(
                "the model produced NaN logits", "run `ktc verify` on the bundle; report the prompt if it passes"
            )
        if self.options.greedy:
            return int(logits.argmax())
        cumulative = np.cumsum(probabilities(logits, self.options))
        draw = self._random.random() * cumulative[-1]
        return int(min(np.searchsorted(cumulative, draw, side="right"), logits.size - 1))
