"""`python -m ktc`, and the `ktc` script: an interrupt during the first imports ends as quietly as any later one."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from ktc.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
