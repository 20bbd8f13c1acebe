"""The `ktc` command: finds the subcommand, runs it, and turns every way to end into one clear exit.

Not here: what a subcommand does. Each lives in its own file and is imported only when it is asked
for, so that `ktc --help` and a typing mistake answer at once.

Exit codes: 0 done; 1 failed; 2 wrong usage; 3.. see `ktc.errors`; 70 a bug in ktc; 130 interrupted.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from typing import NoReturn

import click

import ktc
from ktc.errors import KtcError
from ktc.progress import set_announcing, verbosity

# name -> (where the click command is, one line for `ktc --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "compile": ("ktc.cli.compile_cmd:command", "Compile a Hugging Face checkpoint into a bundle."),
    "plan": ("ktc.cli.plan_cmd:command", "Show what every module becomes under a recipe; needs only config.json."),
    "run": ("ktc.cli.run_cmd:command", "Generate text from a bundle, or chat with it."),
    "bench": ("ktc.cli.bench_cmd:command", "Measure a bundle's speed, or the expert kernels'."),
    "eval": ("ktc.cli.eval_cmd:command", "Measure a bundle's quality on a text: perplexity, KL, deferred experts."),
    "profile": ("ktc.cli.profile_cmd:command", "Count how often each expert of a bundle is used on a text."),
    "tune": ("ktc.cli.tune_cmd:command", "Measure this machine: where AMX beats AVX-512, and a hardware profile."),
    "inspect": ("ktc.cli.inspect_cmd:command", "Show what is in a bundle and what it runs on here."),
    "verify": ("ktc.cli.verify_cmd:command", "Check a bundle's hashes, then its golden outputs on this machine."),
    "doctor": ("ktc.cli.doctor_cmd:command", "Show what this machine has: CPU, memory, compiler, packages."),
    "repack": ("ktc.cli.repack_cmd:command", "Move a bundle to another number of NUMA nodes."),
    "simulate": ("ktc.cli.simulate_cmd:command", "Predict the speed of a plan on a machine that a profile describes."),
}
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
# Faults of the machine rather than of ktc or of its input: reported without "this is a bug".
MACHINE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO,
     errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.EAGAIN, errno.EISDIR}
)  # fmt: skip


class LazyGroup(click.Group):
    """A group whose subcommands are imported by name from `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.6)
            tail = f"did you mean {' or '.join(near)}?" if near else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command named '{name}'; {tail}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(ktc.__version__, prog_name="ktc", message="%(prog)s %(version)s")
def cli() -> None:
    """Compile huge Mixture-of-Experts models into bundles that run on machines with a small GPU or none.

    \b
    ktc plan    CHECKPOINT --recipe int4        what would happen, from config.json alone
    ktc compile CHECKPOINT --recipe int4        quantise, pack, build kernels -> a bundle
    ktc run     BUNDLE -p "Once upon a time"    generate text
    """


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. `KTC_DEBUG=1` adds the traceback of any error."""
    _open_closed_streams()
    try:
        code = _run(sys.argv[1:] if args is None else args)
        sys.stdout.flush()
    except BrokenPipeError:
        code = _broken_pipe()
    except KeyboardInterrupt:  # while an error was being printed
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _open_closed_streams() -> None:
    """Started with `<&-`, `>&-` or `2>&-`: read nothing, write nowhere, and let no other file get that descriptor."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:  # something else has taken it since
                os.close(descriptor)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 (for the whole run)


def _run(args: list[str]) -> int:
    try:
        if instruction := os.environ.get("_KTC_COMPLETE"):
            from click.shell_completion import shell_complete

            return shell_complete(cli, {}, "ktc", "_KTC_COMPLETE", instruction)
        set_announcing()
        with cli.make_context("ktc", list(args)) as ctx:
            result = cli.invoke(ctx)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as usage:
        if type(usage).__name__ == "NoArgsIsHelpError":  # click 8.2 and later
            usage.show()
        else:
            _usage_error(usage)
        return usage.exit_code
    except KtcError as error:
        _debug_traceback()
        _say(error.message, error.hint)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _debug_traceback()
        print("\nktc: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno not in MACHINE_ERRNOS:
            return _bug(error)
        _debug_traceback()
        where = f": {error.filename}" if error.filename else ""
        _say(f"{error.strerror}{where if len(where) <= 300 else where[:300] + '...'}")
        return 1
    except ImportError as error:
        return _cannot_import(error)
    except MemoryError:
        _debug_traceback()
        _say("out of memory", "KTC_DEBUG=1 shows where")
        return 1
    except Exception as error:
        return _bug(error)


def _say(message: str, hint: str | None = None) -> None:
    print(f"ktc: error: {message}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)


# What click calls the types of numbers -> what people do.
_NUMBERS = {
    "is not a valid integer range.": "is not a whole number.",
    "is not a valid integer.": "is not a whole number.",
    "is not a valid float range.": "is not a number.",
    "is not a valid float.": "is not a number.",
}


def _usage_error(error: click.ClickException) -> None:
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx is not None else "ktc"
    message = error.format_message()
    for theirs, ours in _NUMBERS.items():
        if message.endswith(theirs):
            message = message.removesuffix(theirs) + ours
    _say(message, f"{command} --help")


def _cannot_import(error: ImportError) -> int:
    """An installation that lacks something is no bug; a wrong import within ktc is."""
    package = (error.name or "").partition(".")[0]
    if package == "ktc" and "_runtime" in str(error):
        _debug_traceback()
        _say(f"the native runtime cannot be loaded: {error}", "reinstall ktc (in a source checkout: make runtime)")
        return 1
    if isinstance(error, ModuleNotFoundError) and package not in ("", "ktc"):
        _debug_traceback()
        _say(f"the Python package {package} is not installed", f"pip install {package}")
        return 1
    return _bug(error)


def _bug(error: Exception) -> int:
    text = " ".join(str(error).split()) or "no message"
    _debug_traceback()
    _say(
        f"{type(error).__name__}: {text} (this is a bug in ktc {ktc.__version__})",
        None if verbosity() else "run the same command with KTC_DEBUG=1 for the traceback, and report it",
    )
    return EXIT_BUG


def _debug_traceback() -> None:
    if verbosity():
        import traceback  # not at start-up: it costs a hundredth of a second

        traceback.print_exc()


def _broken_pipe() -> int:
    """The reader went away (`ktc plan ... | head`): end quietly, also in the flush at interpreter exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + 13


if __name__ == "__main__":
    main()
