"""Run the command line in this process as a shell would: arguments in, exit code out."""

from __future__ import annotations

import pytest

from ktc.cli.main import main


def ktc(*args: object) -> int:
    """`ktc ARGS...`; returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    assert isinstance(ended.value.code, int)
    return ended.value.code
