"""docs/cli.md has a section for every command, with every option and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from ktc.cli.main import COMMANDS, cli

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text("utf-8")
SHARED = "Options of all commands that run a bundle"
# Headings under which `ktc bench` stands, and what is typed for each.
BENCH = {"ktc bench": ["x"], "ktc bench kernels": ["kernels"], "ktc bench emulate": ["emulate"],
         "ktc bench BUNDLE --device": ["x", "--device", "emulate:x"]}  # fmt: skip


def commands() -> dict[str, click.Command]:
    """Heading -> command."""
    context = click.Context(cli, info_name="ktc")
    found = {f"ktc {name}": cli.get_command(context, name) for name in COMMANDS if name != "bench"}
    bench = cli.get_command(context, "bench")
    assert bench is not None
    for heading, arguments in BENCH.items():
        found[heading] = bench.make_context("bench", list(arguments), context, resilient_parsing=True).command
    return {heading: command for heading, command in found.items() if command is not None}


def sections() -> dict[str, str]:
    parts = re.split(r"^###? (.+)\n", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def options_of(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option)]


def test_every_command_has_a_section() -> None:
    assert set(commands()) == {name for name in sections() if name.startswith("ktc ")}
    for name in COMMANDS:
        assert f"`ktc {name}" in TEXT[: TEXT.index("## ")], f"ktc {name} is missing in the table of commands"


@pytest.mark.parametrize("heading", sorted(commands()))
def test_every_option_is_in_its_section(heading: str) -> None:
    section = sections()[heading]
    text = section + (sections()[SHARED] if f"({'#' + SHARED.lower().replace(' ', '-')})" in section else "")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    for option in options_of(commands()[heading]):
        for name in option.opts:
            assert re.search(rf"`{name}[` ]", rows), f"{heading}: {name} is missing in docs/cli.md"
        assert not option.hidden


@pytest.mark.parametrize("heading", sorted(commands()))
def test_no_option_is_made_up(heading: str) -> None:
    known = {name for option in options_of(commands()[heading]) for name in option.opts}
    rows = [line.split("|")[1] for line in sections()[heading].splitlines() if line.startswith("| `-")]
    usage = re.findall(r"```\n(.*?)```", sections()[heading], re.DOTALL)[0]
    named = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", " ".join([*rows, usage])))
    assert named <= known, f"{heading}: {', '.join(sorted(named - known))}"


def test_shared_options_are_real() -> None:
    run, evaluation = (
        {name for option in options_of(commands()[heading]) for name in option.opts}
        for heading in ("ktc run", "ktc eval")
    )
    named = set(re.findall(r"^\| `(--?[\w-]+)", sections()[SHARED], re.MULTILINE))
    assert named <= run and {"--threads", "--strict", "-v"} <= named & evaluation
