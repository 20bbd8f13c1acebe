"""A person at a terminal and a model: a chat, or lines to complete. Text goes to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ktc.errors import KtcError

if TYPE_CHECKING:
    from ktc.engine.generate import Generation, TextGenerator

_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def write(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(out: Generation) -> None:
    """Speed, seed and why the text ended, to stderr."""
    why = {
        "stop": "",
        "length": "; stopped at --max-tokens",
        "context_full": "; context full",
        "interrupted": "; interrupted",
    }[out.finish_reason]
    seed = "" if out.seed is None else f"; seed {out.seed}"
    print(f"{out.timings.line()}{seed}{why}", file=sys.stderr)


def system_message(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def converse(generator: TextGenerator, system: str | None, settings: dict[str, Any]) -> None:
    """Multi-turn chat on the terminal."""
    from ktc.engine.chat import encode_chat

    print(_HELP, file=sys.stderr)
    messages = system_message(system)
    while (line := _ask("> ")) is not None:
        if line == "/reset":
            messages = system_message(system)
            generator.reset()
            continue
        messages.append({"role": "user", "content": line})
        try:
            out = generator.generate(encode_chat(generator.tokenizer, messages), on_text=write, **settings)
        except KtcError as error:  # a full context or a template's complaint must not end the program
            messages.pop()
            print(f"ktc: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt:  # a second Ctrl-C, in the middle of a step
            messages.pop()
            print("\ninterrupted", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": out.text})
        write("\n")
        say(out)


def complete_lines(generator: TextGenerator, settings: dict[str, Any]) -> None:
    """The model has no chat template: complete each line on its own."""
    from ktc.engine.chat import encode_text

    print("this model has no chat template; each line is completed. /quit or Ctrl-D ends", file=sys.stderr)
    if settings["max_tokens"] is None:
        settings["max_tokens"] = 512
    while (line := _ask("> ")) is not None:
        if line == "/reset":
            generator.reset()
            continue
        try:
            out = generator.generate(encode_text(generator.tokenizer, line), on_text=write, **settings)
        except KtcError as error:
            print(f"ktc: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            continue
        write("\n")
        say(out)


def _ask(mark: str) -> str | None:
    """The next non-empty line, or None at the end. Ctrl-C clears the line."""
    while True:
        try:
            line = input(mark).strip()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if line in ("/quit", "/exit"):
            return None
        if line in ("/help", "/?"):
            print(_HELP, file=sys.stderr)
        elif line:
            return line
