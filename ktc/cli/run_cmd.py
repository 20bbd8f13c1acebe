"""`ktc run`: complete a prompt, or chat, from a bundle. Text on stdout, everything else on stderr."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktc.cli.conversation import complete_lines, converse, say, system_message, write
from ktc.cli.cuda_options import attention_option, load_session, refuse_attention
from ktc.cli.emulate_options import device_options, finish_emulated, load_emulated
from ktc.cli.engine_options import engine_options, load_model
from ktc.cli.eval_cmd import unreadable
from ktc.cli.graph_options import graph_options, load_native, wants_graph
from ktc.cuda.device import wants_cuda
from ktc.errors import UsageError
from ktc.outputs import check_outputs

if TYPE_CHECKING:
    from ktc.engine.generate import TextGenerator

EXIT_INTERRUPTED = 130
MAX_PROMPT_BYTES = 256 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")  # what Python makes of bytes that it cannot decode


_OTHERS_NAMES = {"-n": "--max-tokens", "--n-predict": "--max-tokens", "--max-new-tokens": "--max-tokens"}
"""What other programs call options of this one."""


class RunCommand(click.Command):
    """Knows the names that other programs have for its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _OTHERS_NAMES:
                raise
            name, meant = error.option_name, _OTHERS_NAMES[error.option_name]
            raise click.NoSuchOption(name, f"no option {name}: here it is {meant}", ctx=ctx) from None


@click.command("run", cls=RunCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", metavar="TEXT", help="Complete this text.")
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), help="Complete the text of a file; - is stdin.")
@click.option("--chat", is_flag=True, help="Send the prompt through the chat template as a user's message.")
@click.option("--system", metavar="TEXT", help="System message of a chat.")
@click.option("--max-tokens", type=click.IntRange(min=0), help="New tokens at most; default: 512 (chat: no limit).")
@click.option("--temperature", type=float, help="0 is greedy; default: the model's own, else 0.8.")
@click.option("--top-p", type=float, help="Default: the model's own, else 0.95.")
@click.option("--top-k", type=int, help="0 keeps all tokens.")
@click.option("--min-p", type=float, help="Drop tokens less likely than this times the likeliest.")
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--greedy", is_flag=True, help="Always take the likeliest token.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@graph_options
@attention_option
@device_options
@engine_options
def command(
    bundle: Path,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
    greedy: bool,
    stop: tuple[str, ...],
    as_json: bool,
    verbose: int,
    graph: str,
    context: int | None,
    n_deferred: int | None,
    n_skipped: int,
    attention: str,
    device: str | None,
    trace: Path | None,
    **options: Any,
) -> int:
    """Generate text from BUNDLE.

    With -p or -f that text is completed; without either, standard input, read to its end. If that is a terminal: a
    chat if the model has a chat template, else line by line completion.
    """
    if prompt is not None and file is not None:
        raise click.UsageError("give either --prompt or --file")
    if "" in stop:
        raise click.UsageError("--stop needs a text")
    text = _prompt(_utf8(prompt), file)
    system, stop = _utf8(system), tuple(_utf8(s) or s for s in stop)
    if text is not None and not text and bundle.exists():  # if it does not, that is said further on
        raise UsageError("the prompt is empty", "give some text with -p, -f or on stdin")
    if text is None and as_json:
        raise click.UsageError("--json needs a prompt: -p, -f or stdin")
    if trace is not None and device is None:
        raise click.UsageError("--trace needs --device emulate:PROFILE")
    check_outputs(trace)
    on_gpu = device is None and wants_cuda(bundle)
    if not on_gpu:
        refuse_attention(attention)

    from ktc.engine.sampling import SamplingOptions

    given: dict[str, Any] = {
        "temperature": 0.0 if greedy else temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    SamplingOptions.from_config(None, **given)  # complain before the weights are read
    if (bundle / "model").is_dir():
        from ktc.engine.chat import require_tokenizer

        require_tokenizer(bundle / "model")
    make_generator: Callable[[Any, Any], TextGenerator]
    if device is not None:
        from ktc.native.generate import NativeGenerator as make_generator
        from ktc.native.tokenizer import load_tokenizer

        options |= {"graph": graph, "context": context, "n_deferred": n_deferred, "n_skipped": n_skipped}
        model = load_emulated(bundle, verbose, device, **options)
    elif on_gpu:
        from ktc.engine.chat import load_tokenizer
        from ktc.native.generate import NativeGenerator as make_generator

        options |= {"graph": graph, "context": context, "n_deferred": n_deferred, "n_skipped": n_skipped}
        options["attention"] = attention
        model = load_session(bundle, verbose, **options)
    elif wants_graph(bundle, graph, context, n_deferred, n_skipped):
        from ktc.native.generate import NativeGenerator as make_generator
        from ktc.native.tokenizer import load_tokenizer

        options |= {"context": context, "n_deferred": n_deferred, "n_skipped": n_skipped}
        model = load_native(bundle, verbose, **options)
    else:
        from ktc.engine.chat import load_tokenizer
        from ktc.engine.generate import TextGenerator as make_generator

        model = load_model(bundle, verbose, **options)
    from ktc.engine.chat import has_chat_template

    tokenizer = load_tokenizer(Path(model.ktc_report.bundle) / "model")
    settings = {
        "sampling": SamplingOptions.from_config(model.generation_config, **given),
        "stop": stop,
        "max_tokens": max_tokens,
    }
    generator = make_generator(model, tokenizer)
    try:
        if text is not None:
            return _once(generator, text, chat, system, as_json, settings)
        if has_chat_template(tokenizer):
            converse(generator, system, settings)
        else:
            complete_lines(generator, settings)
        return 0
    finally:
        if verbose:
            _print_kernels(model)
        if device is not None:
            finish_emulated(model, trace)


def _utf8(argument: str | None) -> str | None:
    """An argument of the command line as text. Bytes that the locale could not decode are taken for UTF-8."""
    if argument is None or argument.isascii():
        return argument
    try:
        return os.fsencode(argument).decode("utf-8") if _SURROGATE.search(argument) else argument
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the text {argument[:80]!a} is not UTF-8: byte {error.start}", "convert it with iconv"
        ) from error


def _prompt(prompt: str | None, file: Path | None) -> str | None:
    """The text to complete; None = talk to the user on the terminal."""
    if prompt is not None:
        return prompt
    if file is None and sys.stdin.isatty():
        return None
    try:
        with contextlib.ExitStack() as stack:
            stdin = file is None or str(file) == "-"
            stream = sys.stdin.buffer if stdin else stack.enter_context(file.open("rb"))  # type: ignore[union-attr]
            data = stream.read(MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            raise UsageError(f"the prompt is larger than {MAX_PROMPT_BYTES >> 20} MiB", "is this the right file?")
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except OSError as error:
        raise unreadable("prompt", file or "-", error) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8: byte {error.start}", "convert it with iconv") from error


def _once(
    generator: TextGenerator, text: str, chat: bool, system: str | None, as_json: bool, settings: dict[str, Any]
) -> int:
    from ktc.engine.chat import encode_chat, encode_text

    if chat or system is not None:
        ids = encode_chat(generator.tokenizer, [*system_message(system), {"role": "user", "content": text}])
    else:
        ids = encode_text(generator.tokenizer, text)
    if settings["max_tokens"] is None:
        settings["max_tokens"] = 512
    out = generator.generate(ids, on_text=None if as_json else write, **settings)
    if as_json:
        print(json.dumps(out.to_json(), ensure_ascii=False))
    elif not out.text.endswith("\n"):
        write("\n")
    say(out)
    return EXIT_INTERRUPTED if out.finish_reason == "interrupted" else 0


def _print_kernels(model: Any) -> None:
    from ktc.engine.report import kernels_in_use

    calls = kernels_in_use(model)
    if calls:
        print("kernels used:", file=sys.stderr)
        for name, count in sorted(calls.items(), key=lambda item: -item[1]):
            print(f"  {count:>9}  {name}", file=sys.stderr)
