"""Files that a command writes at its end: whether that will be possible, asked at its beginning.

Not here: a bundle's directory (ktc.bundle.emit).
"""

from __future__ import annotations

import os
from pathlib import Path

from ktc.errors import DiskError


def check_outputs(*paths: Path | None) -> None:
    """Complain before anything is measured, not after. None: that file is not wanted.

    Raises:
        DiskError: one of them cannot be written.
    """
    for path in paths:
        reason = None if path is None else _obstacle(path)
        if reason is not None:
            raise DiskError(f"{path} cannot be written: {reason[0]}", reason[1])


def _obstacle(path: Path) -> tuple[str, str] | None:
    """What is in the way, and what to do."""
    folder = path.parent
    if path.is_dir():
        return "it is a folder", "add a file name"
    if path.exists():  # devices and pipes too
        return None if os.access(path, os.W_OK) else ("no permission", "choose another place")
    if not folder.is_dir():
        what = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
        return what, "make the folder first, or choose another place"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write in {folder}", "choose another place"
    return None
