"""How many of a token's experts may be deferred or skipped."""

from __future__ import annotations

from ktc.errors import UsageError

MIN_IMMEDIATE_EXPERTS = 2


def check_split(top_k: int, deferred: int, skipped: int, where: str = "") -> None:
    """
    Args:
        where: begins the messages, such as "model.layers.3.mlp: ".
    Raises:
        UsageError: not a way to divide `top_k` experts of a token.
    """
    if deferred < 0 or skipped < 0:
        raise UsageError("the numbers of deferred and skipped experts cannot be negative")
    if deferred and top_k - deferred < MIN_IMMEDIATE_EXPERTS:
        raise UsageError(
            f"{where}deferring {deferred} of {top_k} experts leaves fewer than {MIN_IMMEDIATE_EXPERTS} immediate",
            f"use --deferred {max(0, top_k - MIN_IMMEDIATE_EXPERTS)} or less",
        )
    if deferred and skipped:
        raise UsageError("experts are deferred or skipped, not both", "leave out --skip, or use --deferred 0")
    if skipped >= top_k:
        raise UsageError(f"{where}skipping {skipped} of {top_k} experts leaves none", f"skip {top_k - 1} or fewer")
