"""`python -m ktc`, and the `ktc` script: an interrupt ends the process at once, also during the first imports."""

import contextlib
import os
import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    # numpy's library starts threads that spin on the CPUs which the expert pool needs; ktc has no use for them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from ktc.cli.main import main as run

        run()
    except KeyboardInterrupt:
        _leave()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _leave()
        raise


def _leave() -> NoReturn:
    """Without the interpreter's own clearing up, which takes seconds once torch is loaded."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
