"""`python -m ktc`."""

from ktc.cli.main import main

if __name__ == "__main__":
    main()
