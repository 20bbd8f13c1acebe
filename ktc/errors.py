"""Errors that a user sees: one clear line, what to do, and a nonzero exit code.

The command line turns a `KtcError` into `ktc: error: ...` without a traceback (KTC_DEBUG=1 shows
it). Anything else that escapes is a bug in ktc and is reported as such.
"""

from __future__ import annotations


class KtcError(Exception):
    """A fault in what the user gave us, or in the machine.

    Args:
        message: what is wrong, naming the file, tensor, rule or line.
        hint: what to do about it, as one sentence or command; shown on its own line.
    """

    exit_code = 1  # the codes are listed in docs/cli.md

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(KtcError):
    """What was asked for cannot be: an option, argument or input text that is wrong in itself, beside the others, or
    for this model."""

    exit_code = 2


class CheckpointError(KtcError):
    """A checkpoint file or tensor is missing, damaged, or not what the config says."""

    exit_code = 3


class RecipeError(KtcError):
    """A recipe does not parse, does not fit the grammar, or does not fit the model."""

    exit_code = 4


class UnsupportedModelError(KtcError):
    """The model family or a config value that matters is not supported."""

    exit_code = 5


class BundleError(KtcError):
    """A bundle is damaged, untrusted, of another format version, or not for this machine."""

    exit_code = 6


class BuildError(KtcError):
    """A kernel library could not be generated, compiled or loaded."""

    exit_code = 7


class DiskError(KtcError):
    """Writing failed: disk full, no permission, read-only."""

    exit_code = 8
