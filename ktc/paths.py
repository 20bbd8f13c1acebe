"""Paths as users type them. Not here: what lies at a path, or whether it may be written."""

from __future__ import annotations

import os
from pathlib import Path

from ktc.errors import DiskError


def expand(path: str | os.PathLike[str]) -> Path:
    """`~` and `~user` replaced; left as they are where there is no such user, or no home at all."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


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
