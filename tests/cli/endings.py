"""Subcommands that end in every way a real one can; put into the command table by test_main.py."""

from __future__ import annotations

import errno
import time

import click

from ktc.errors import BundleError


@click.command("end")
@click.argument("how")
def command(how: str) -> int | None:
    """End in the way that is asked for."""
    if how == "ktc-error":
        raise BundleError("bundle x.ktc is damaged", "run ktc compile again")
    if how == "bug":
        raise ZeroDivisionError("division\nby zero")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "disk-full":
        raise OSError(errno.ENOSPC, "No space left on device", "/data/out")
    if how == "not-found":
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "internal.so")
    if how == "long-name":
        raise OSError(errno.ENAMETOOLONG, "File name too long", "a" * 5000)
    if how == "no-runtime":
        raise ImportError("cannot import name '_runtime' from 'ktc'", name="ktc")
    if how == "no-package":
        raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
    if how == "wrong-import":
        raise ModuleNotFoundError("No module named 'ktc.nothing'", name="ktc.nothing")
    if how == "memory":
        raise MemoryError
    if how == "code":
        return 6
    if how == "sleep":
        click.echo("ready")
        time.sleep(60)
    if how == "talk":
        for i in range(100_000):
            click.echo(f"line {i}")
    return None
