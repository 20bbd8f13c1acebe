"""Kinds of option values that several commands take."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A float in a range; `nan`, which no bound keeps out, and `inf` are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def names(text: str) -> list[str]:
    """The words of a list with commas or spaces between them, each once."""
    return list(dict.fromkeys(text.replace(",", " ").split()))
