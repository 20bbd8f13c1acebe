"""Paths as users type them. Not here: what lies at a path, or whether it may be written."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ktc.errors import DiskError

_NEAR = 0.75
"""Likeness of names, strict: files of one folder often share an ending, which is no likeness."""


def expand(path: str | os.PathLike[str]) -> Path:
    """`~` and `~user` replaced; left as they are where there is no such user, or no home at all."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def nearest(path: str | os.PathLike[str]) -> Path | None:
    """The path that exists and that a mistyped one most likely means, relative if that one is; None: none is near."""
    found = Path()
    for part in expand(path).parts:
        if (found / part).exists():
            found /= part
            continue
        try:
            names = [entry.name for entry in found.iterdir()]
        except OSError:
            return None
        near = difflib.get_close_matches(part, names, n=1, cutoff=_NEAR)
        if not near:
            return None
        found /= near[0]
    return found


def did_you_mean(path: str | os.PathLike[str]) -> str:
    """`did you mean ...? `, to begin a hint with, or nothing."""
    near = nearest(path)
    return "" if near is None else f"did you mean {near}? "


def home() -> Path:
    """The user's home directory.

    Raises:
        DiskError: there is none: HOME is not set and the user is in no passwd, as in some containers. (A place in the
            temporary directory would be no substitute: somebody else could have put kernels there before us.)
    """
    try:
        return Path.home()
    except RuntimeError as error:
        raise DiskError(
            "this user has no home directory",
            "set HOME (or KTC_CACHE_DIR and KTC_CONFIG_DIR) to a directory of your own",
        ) from error
