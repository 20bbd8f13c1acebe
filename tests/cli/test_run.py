"""`ktc run` as a user calls it, in process and, where a terminal or a signal matters, as a real process."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ktc.cli.run_cmd import command
from ktc.codegen.variants import runnable
from ktc.errors import BundleError, KtcError
from ktc.host import this_host
from tests.bundle.conftest import relist
from tests.tiny import make_tiny

LONG = 100_000  # context of the long bundle: it never runs full by itself


def compiled(folder: Path, name: str, **options: object) -> Path:
    from ktc.compile import compile_checkpoint

    checkpoint = make_tiny("deepseek_v3", folder / name, **options)  # type: ignore[arg-type]
    compile_checkpoint(checkpoint, "int4", folder / f"{name}.ktc", variants=(), jobs=1)
    return folder / f"{name}.ktc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def chat_bundle(folder: Path) -> Path:
    return compiled(folder, "chat", tokenizer="chat", max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def short_bundle(folder: Path) -> Path:
    return compiled(folder, "short", tokenizer="byte", max_position_embeddings=48)


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments], input=stdin, standalone_mode=False)


def ok(result: Result) -> Result:
    assert result.exception is None, repr(result.exception)
    return result


def test_text_on_stdout_and_speed_on_stderr(chat_bundle: Path) -> None:
    result = ok(run(chat_bundle, "-p", "Hello", "--max-tokens", 5, "--greedy"))
    assert result.stdout.endswith("\n") and len(result.stdout) > 1
    assert "prompt 6 tokens" in result.stderr and "decode 5 tokens" in result.stderr
    assert "tokens/s" not in result.stdout


def test_json_is_one_object_with_everything(chat_bundle: Path) -> None:
    out = json.loads(ok(run(chat_bundle, "-p", "Hello", "--max-tokens", 5, "--json", "--seed", 4)).stdout)
    assert set(out) == {"text", "ids", "finish_reason", "seed", "timings"}
    assert out["seed"] == 4 and len(out["ids"]) <= 5 and out["finish_reason"] in ("length", "stop")
    assert out["timings"]["prompt_tokens"] == 6 and out["timings"]["decode_tokens"] == len(out["ids"])


def test_a_seed_repeats(chat_bundle: Path) -> None:
    options = ("-p", "Hello", "--max-tokens", 12, "--json", "--temperature", 1.2, "--top-k", 50, "--min-p", 0.01)
    runs = [json.loads(run(chat_bundle, *options, "--seed", seed).stdout)["ids"] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_prompt_comes_from_a_file_or_stdin(chat_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("héllo\n")
    options = ("--greedy", "--max-tokens", 4, "--json")
    given = [
        run(chat_bundle, "-p", "héllo\n", *options),
        run(chat_bundle, "-f", file, *options),
        run(chat_bundle, "-f", "-", *options, stdin="héllo\n"),
        run(chat_bundle, *options, stdin="héllo\n"),
    ]
    assert len({tuple(json.loads(ok(r).stdout)["ids"]) for r in given}) == 1


def test_stop_text_is_not_printed(chat_bundle: Path) -> None:
    free = json.loads(run(chat_bundle, "-p", "Hello", "--greedy", "--max-tokens", 40, "--json").stdout)["text"]
    stop = free[5:8]
    out = json.loads(run(chat_bundle, "-p", "Hello", "--greedy", "--json", "--stop", stop).stdout)
    assert out["finish_reason"] == "stop" and out["text"] == free[: free.find(stop)]


def test_a3_a_full_context_is_said(short_bundle: Path) -> None:
    # failure A3: aborted at the end of the context
    result = ok(run(short_bundle, "-p", "Hello", "--temperature", 0, "--stop", "\0\0"))
    assert "context full" in result.stderr
    with pytest.raises(KtcError, match="context full: the prompt has 61 tokens, and there is room for 48"):
        raise run(short_bundle, "-p", "x" * 60).exception  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", ""), "the prompt is empty"),
        (("-f", "/nowhere/at/all"), "cannot read the prompt"),
        (("-p", "x", "--temperature", "-1"), "temperature"),
        (("-p", "x", "--top-p", "0"), "top-p"),
        (("-p", "x", "-f", "y"), "either --prompt or --file"),
        (("-p", "x", "--variant", "sse9"), "sse9"),
        (("-p", "x", "--trust-kernel", "yes"), "not a sha256"),
        (("-p", "x", "--stop", ""), "--stop needs a text"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], message: str, short_bundle: Path) -> None:
    result = run(short_bundle, *arguments)
    assert result.exception is not None and message in str(result.exception)
    assert result.stdout == ""


def test_bytes_that_are_no_text_are_refused(short_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    result = run(short_bundle, "-f", file)
    assert "not UTF-8: byte 3" in str(result.exception)


def test_a_byte_order_mark_is_no_text(short_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfab")
    out = json.loads(ok(run(short_bundle, "-f", tmp_path / "bom.txt", "--max-tokens", 1, "--json")).stdout)
    assert out["timings"]["prompt_tokens"] == 3
    monkeypatch.setattr("ktc.cli.run_cmd.MAX_PROMPT_BYTES", 4)
    assert "prompt is larger than" in str(run(short_bundle, "-f", tmp_path / "bom.txt").exception)


def test_an_input_with_nothing_in_it_is_said(short_bundle: Path) -> None:
    process = start(short_bundle, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and b"the prompt is empty" in out and b"on stdin" in out


def test_an_input_is_read_to_its_end(short_bundle: Path) -> None:
    process = start(short_bundle, "--greedy", "--max-tokens", "2", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"ab\n")
    process.stdin.flush()
    time.sleep(0.5)
    assert process.poll() is None  # there may be more
    out, _ = process.communicate(b"cd\n", timeout=120)
    assert process.returncode == 0 and b"prompt 7 tokens" in out  # with the BOS token


def test_one_token_has_no_decode_rate(short_bundle: Path) -> None:
    assert ok(run(short_bundle, "-p", "ab", "--max-tokens", 1, "--greedy")).stderr.startswith("prompt 3 tokens, ")
    line = ok(run(short_bundle, "-p", "ab", "--max-tokens", 1, "--greedy")).stderr
    assert "; decode 1 token; " in line.replace("\n", "; ") and " 0.0 tokens/s" not in line
    timings = json.loads(ok(run(short_bundle, "-p", "ab", "--max-tokens", 1, "--json")).stdout)["timings"]
    assert timings["decode_tokens_per_second"] is None and timings["prompt_tokens_per_second"] > 0


def test_arguments_that_are_no_text_are_refused(short_bundle: Path) -> None:
    result = run(short_bundle, "-p", "caf\udce9")  # what Python makes of the byte 0xe9
    assert "is not UTF-8: byte 3" in str(result.exception)


def test_arguments_that_the_locale_could_not_decode(short_bundle: Path) -> None:
    options = ("--greedy", "--max-tokens", 3, "--json")
    plain = json.loads(ok(run(short_bundle, "-p", "é", *options)).stdout)
    escaped = json.loads(ok(run(short_bundle, "-p", "é".encode().decode("ascii", "surrogateescape"), *options)).stdout)
    assert plain["ids"] == escaped["ids"] and plain["timings"]["prompt_tokens"] == 3


def test_without_a_tokenizer_no_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc.cli import run_cmd

    bundle = compiled(folder, "mute")
    for name in ("load_model", "load_native"):
        monkeypatch.setattr(run_cmd, name, None)
    assert "no tokenizer in" in str(run(bundle, "-p", "x").exception)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True, "temperature": "hot"}, "generation_config.json: temperature is 'hot'"),
        ({"do_sample": True, "top_p": 0}, "generation_config.json: top-p must be in"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
@pytest.mark.parametrize("graph", ["on", "off"])
def test_settings_of_the_model_that_make_no_sense(
    short_bundle: Path, tmp_path: Path, settings: dict[str, object], message: str, graph: str
) -> None:
    bundle = Path(shutil.copytree(short_bundle, tmp_path / "odd.ktc"))
    (bundle / "model/generation_config.json").write_text(json.dumps(settings))
    relist(bundle, "model/generation_config.json")
    assert message in str(run(bundle, "-p", "x", "--max-tokens", 2, "--graph", graph).exception)
    if "do_sample" in settings:
        ok(run(bundle, "-p", "x", "--max-tokens", 2, "--graph", graph, "--temperature", 1, "--top-p", 1))


def test_verbose_says_what_runs_where(short_bundle: Path) -> None:
    result = ok(run(short_bundle, "-p", "x", "--max-tokens", 2, "-v"))
    assert "routed experts int4-g16c" in result.stderr and "kernels used:" in result.stderr


def start(bundle: Path, *arguments: str, stdin: int, stdout: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TERM": "dumb"}
    return subprocess.Popen(
        [sys.executable, "-m", "ktc", "run", str(bundle), *arguments],
        stdin=stdin, stdout=stdout, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
    )  # fmt: skip


class Terminal:
    """The other end of a pseudo-terminal."""

    def __init__(self, fd: int) -> None:
        self.fd, self.text = fd, b""

    def expect(self, wanted: bytes, seconds: float = 90) -> None:
        """Read until `wanted` has come after what was expected before."""
        deadline = time.monotonic() + seconds
        while wanted not in self.text:
            if not select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"{wanted!r} did not come; got {self.text[-2000:]!r}")
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # the process is gone
                data = b""
            if not data:
                raise AssertionError(f"the end came before {wanted!r}: {self.text[-2000:]!r}")
            self.text += data
        self.text = self.text[self.text.index(wanted) + len(wanted) :]

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())


def test_chat_on_a_terminal(chat_bundle: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(chat_bundle, "--seed", "1", "--temperature", "1.5", "--top-p", "1", stdin=theirs, stdout=theirs)
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        terminal.expect(b"/reset forgets")
        terminal.expect(b"> ")
        terminal.send("hi\n")
        terminal.expect(b"\n")  # the echo
        time.sleep(1)  # an answer without end is running, or an end-of-text token came by chance
        os.kill(process.pid, signal.SIGINT)
        terminal.expect(b"tokens/s")
        terminal.expect(b"> ")  # the program goes on
        terminal.send("/reset\n")
        terminal.expect(b"> ")
        terminal.send("/help\n")
        terminal.expect(b"Ctrl-D")
        terminal.send("\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(ours)


def test_ctrl_c_ends_the_text_not_the_report(chat_bundle: Path) -> None:
    process = start(
        chat_bundle,
        "-p",
        "x",
        "--max-tokens",
        str(LONG - 10),
        "--greedy",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        terminal = Terminal(process.stdout.fileno())
        first = os.read(terminal.fd, 1)
        os.kill(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert first
        if b"; interrupted" in rest:
            assert process.returncode == 130
        else:  # the greedy text ended by itself before the signal came
            assert process.returncode == 0 and b"tokens/s" in rest
    finally:
        process.kill()


def test_a_reader_that_goes_away_is_no_error(chat_bundle: Path) -> None:
    line = f"{sys.executable} -m ktc run {chat_bundle} -p x --greedy --max-tokens 300 | head -c 1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(["bash", "-c", line], capture_output=True, env=environment, timeout=120)
    assert b"Traceback" not in done.stderr and b"error" not in done.stderr


@pytest.mark.parametrize("graph", ["on", "off"])
def test_m6_kernels_that_could_not_be_built_are_missed(
    short_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: str
) -> None:
    """failures.md M6: the best variant silently not engaged. The compiler here is too old for anything but SSE."""
    if runnable(this_host().features)[0] == "portable":
        pytest.skip("this CPU runs the portable kernels only")
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-mavx*) exit 1;; esac\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path / "cache"))
    result = ok(run(short_bundle, "-p", "x", "--max-tokens", 2, "--graph", graph))
    assert "ktc: note: portable kernels, but this CPU runs " in result.stderr
    assert "portable kernels, but" in str(run(short_bundle, "-p", "x", "--graph", graph, "--strict").exception)


def test_strict_refuses_nothing_that_was_chosen(folder: Path, short_bundle: Path) -> None:
    from ktc.compile import compile_checkpoint

    for chosen in (("--variant", "portable"), ("--threads", 1), ("--kernel", "avx"), ("--graph", "off")):
        if chosen != ("--kernel", "avx") or runnable(this_host().features)[0] != "portable":
            ok(run(short_bundle, "-p", "x", "--max-tokens", 1, "--strict", *chosen))
    nodes = len(this_host().nodes) + 1
    checkpoint = make_tiny("deepseek_v3", folder / "wide", tokenizer="byte", moe_intermediate_size=64 * nodes)
    compile_checkpoint(checkpoint, "int4", folder / "wide.ktc", nodes=nodes, variants=(), jobs=1)
    refused = run(folder / "wide.ktc", "-p", "x", "--strict", "--emulate-nodes").exception
    assert isinstance(refused, KtcError) and "(--emulate-nodes)" in refused.message


def test_what_was_asked_for_and_is_not_done_is_said(folder: Path, short_bundle: Path) -> None:
    from ktc.compile import compile_checkpoint

    recipe = folder / "deferring.yaml"
    text = (Path(__file__).resolve().parents[2] / "recipes" / "int4.yaml").read_text()
    recipe.write_text(text.replace("n_deferred_experts: 0", "n_deferred_experts: 1"))
    checkpoint = make_tiny("deepseek_v3", folder / "deferring", tokenizer="byte", num_experts_per_tok=4, topk_group=4)
    compile_checkpoint(checkpoint, str(recipe), folder / "deferring.ktc", variants=(), jobs=1)
    deferring = (folder / "deferring.ktc", "-p", "ab", "--max-tokens", 2)
    assert "defers" not in ok(run(*deferring)).stderr
    assert "note: the recipe defers experts" in ok(run(*deferring, "--graph", "off")).stderr
    strict = run(*deferring, "--graph", "off", "--strict").exception
    assert isinstance(strict, KtcError) and "the recipe defers experts" in str(strict)
    long = ok(run(short_bundle, "-p", "ab", "--max-tokens", 2, "--context", 1000)).stderr
    assert "a context of 1000 positions was asked for; the model has 48" in long


def test_a_tokenizer_that_went_missing(folder: Path, short_bundle: Path) -> None:
    broken = folder / "no-tokenizer.ktc"
    shutil.copytree(short_bundle, broken)
    (broken / "model" / "tokenizer.json").unlink()
    error = run(broken, "-p", "ab").exception
    assert isinstance(error, BundleError) and "missing" in error.message
