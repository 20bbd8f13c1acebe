"""Evaluate a native model on a text: windows of tokens, several settings, one reference.

All settings see the same windows, one window after the other, so that the reference is computed once and
never held for more than a window. Not here: the command line (ktc/cli/eval_cmd.py), tables (report.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ktc.errors import KtcError, UsageError
from ktc.eval.metrics import Score
from ktc.eval.sources import NativeSource, Source
from ktc.progress import Progress

if TYPE_CHECKING:
    from ktc.graph.ir import Program
    from ktc.native import NativeModel

WINDOW = 512
"""Tokens of a window unless asked otherwise; the same as benchmarks/quality.py."""


@dataclass(frozen=True)
class Setting:
    """A way to run the model. `n_deferred` None = what the recipe says; both counts matter in "decode" only."""

    mode: Literal["prefill", "decode"]
    n_deferred: int | None = None
    n_skipped: int = 0

    def __str__(self) -> str:
        if self.mode == "prefill":
            return "prefill"
        if self.n_skipped:
            return f"decode, {self.n_skipped} skipped"
        if self.n_deferred is None:
            return "decode"
        return f"decode, {self.n_deferred} deferred" if self.n_deferred else "decode, all immediate"


def settings_of_table(program: Program) -> list[Setting]:
    """Prefill, then decode with 0 to top_k - 2 experts deferred, then with 1 to top_k - 1 skipped.

    Raises:
        UsageError: the model has no MoE layer.
    """
    top_k = min((int(n.params["top_k"]) for n in program.nodes if n.op == "moe_submit"), default=0)
    if not top_k:
        raise UsageError("this model has no MoE layers: nothing to defer or to skip", "leave out --table")
    deferred = [Setting("decode", n) for n in range(max(1, top_k - 1))]
    return [Setting("prefill"), *deferred, *(Setting("decode", 0, n) for n in range(1, top_k))]


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text without special tokens.

    Raises:
        UsageError: fewer than two tokens.
    """
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    if len(ids) < 2:
        raise UsageError("the text has fewer than two tokens", "give a longer file, or a larger --limit")
    return ids


def windows_of(ids: Sequence[int], window: int, bos: int | None) -> list[list[int]]:
    """Consecutive windows that do not overlap, each after BOS; without a BOS a window's first token is only context."""
    head = [] if bos is None else [bos]
    parts = [[*head, *ids[i : i + window]] for i in range(0, len(ids), window)]
    return [part for part in parts if len(part) > 1]


def evaluate(
    model: NativeModel,
    windows: Sequence[list[int]],
    settings: Sequence[Setting],
    reference: Source | None = None,
) -> dict[Setting, Score]:
    """Scores of every setting over all windows.

    Raises:
        KtcError: a window does not fit the context, a deferral is not possible, vocabularies differ, logits are NaN.
    """
    longest = max(map(len, windows))
    if longest - 1 > model.context:
        raise UsageError(f"a window of {longest} tokens does not fit the context of {model.context}", "use --window")
    if reference is not None and reference.vocab != model.vocab:
        raise UsageError(
            f"the reference has a vocabulary of {reference.vocab} tokens, the bundle one of {model.vocab}:"
            " they are not the same model"
        )
    for setting in settings:  # complain before the first window
        model.set_deferral(setting.n_deferred, setting.n_skipped)
    source = NativeSource(model, "")
    scores = {setting: Score() for setting in settings}
    total = sum(len(w) - 1 for w in windows) * (len(settings) + (reference is not None))
    with Progress("eval", total, "tokens") as progress:
        for window in windows:
            targets = np.array(window[1:], dtype=np.int64)
            wanted = None
            if reference is not None:
                wanted = reference.logits(window)
                progress.update(len(targets), "reference")
            for setting, score in scores.items():
                model.set_deferral(setting.n_deferred, setting.n_skipped)
                begun = time.perf_counter()
                logits = source.logits(window) if setting.mode == "prefill" else source.decoded(window)
                score.seconds += time.perf_counter() - begun
                if np.isnan(logits).any():
                    raise KtcError(f"the model produced NaN logits ({setting})", "run `ktc verify` on the bundle")
                score.add(logits, targets, wanted)
                progress.update(len(targets), str(setting))
    return scores
