"""One scheme of exit codes: what docs/cli.md lists is what the errors of every command end with."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

import ktc as package
from ktc.cli import main
from ktc.errors import BuildError, KtcError, UsageError
from tests.cli.runner import ktc

ROOT = Path(__file__).resolve().parents[2]
TEXT = "A text of a few words that is long enough for a window."
MINI = ("bench", "emulate", "--layers", 3, "--experts", 8, "--hidden", 128, "--intermediate", 64, "--top-k", 4)


def documented() -> dict[int, str]:
    section = (ROOT / "docs" / "cli.md").read_text("utf-8").split("## Errors and exit codes")[1].split("\n## ")[0]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", section, re.MULTILINE)}


def kinds(base: type[KtcError] = KtcError) -> Iterator[type[KtcError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def test_every_error_has_a_documented_code() -> None:
    for module in pkgutil.walk_packages(package.__path__, "ktc."):
        if module.name.count(".") < 3 and not module.name.startswith(("ktc._", "ktc.__main__")):
            importlib.import_module(module.name)
    codes = {kind.exit_code for kind in kinds()}
    assert codes | {0, main.EXIT_BUG, main.EXIT_INTERRUPTED, 128 + 13} == set(documented())
    assert UsageError.exit_code == click.UsageError.exit_code == 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "BUNDLE", "-p", ""), "the prompt is empty"),
        (("run", "BUNDLE", "-f", "no-such-file"), "cannot read the prompt: no-such-file: No such file or directory"),
        (("run", "BUNDLE", "--max-tokens", "abc"), "'abc' is not a whole number"),
        (("run", "BUNDLE", "--top-p", "abc"), "'abc' is not a number"),
        (("run", "BUNDLE", "-p", "x", "--temperature", -1), "temperature must be"),
        (("run", "BUNDLE", "-p", "x", "--top-p", 0), "top-p must be"),
        (("run", "BUNDLE", "-p", "x", "--deferred", 99), "fewer than 2 immediate"),
        (("run", "BUNDLE", "-p", "x", "--deferred", 99, "--skip", 1), "fewer than 2 immediate"),
        (("run", "BUNDLE", "-p", "x", "--skip", 99), "leaves none"),
        (("run", "BUNDLE", "-p", "x", "--chat"), "no chat template"),
        (("run", "BUNDLE", "-p", "x" * 100), "context full"),
        (("run", "BUNDLE", "-p", "x", "--graph", "off", "--context", 8), "--context needs the graph"),
        (("run", "BUNDLE", "-p", "x", "--trust-kernel", "abc"), "not a sha256"),
        (("run", "BUNDLE", "-p", "x", "--device", "cuda:0"), "not emulate:PROFILE"),
        (("run", "BUNDLE", "-p", "x", "-n", 5), "no option -n: here it is --max-tokens"),
        (("run", "BUNDLE", "-p", "x", "-n5"), "no option -n: here it is --max-tokens"),
        (("run", "BUNDLE", "-p", "x", "--max-new-tokens", 5), "here it is --max-tokens"),
        (("run", "BUNDLE", "--promt", "x"), "No such option"),
        (("run", "BUNDLE", "-p", "x", "--kernel", "nonsense"), "possible here: "),
        (("run", "BUNDLE", "-p", "x", "--kernel", "nonsense", "--graph", "off"), "whose name contains 'nonsense'"),
        (("inspect", "BUNDLE", "--trust-kernel", "abc"), "not a sha256"),
        (("repack", "BUNDLE", "-n", 9, "-o", "no.ktc"), "cannot be split over 9 nodes"),
        (("repack", "BUNDLE", "-n", 1, "-o", "BUNDLE"), "already exists"),
        (("bench", "BUNDLE", "-p", 0, "-n", 0), "nothing to measure"),
        (("bench", "BUNDLE", "-p", 1000), "do not fit the model's context"),
        (("eval", "BUNDLE", "--text", "no-such-file"), "cannot read the text"),
        (("eval", "BUNDLE", "--text", "TEXT", "--window", 1000), "does not fit the context"),
        (("eval", "BUNDLE", "--text", "TEXT", "--limit", 1, "--window", 8), "fewer than two tokens"),
        (("profile", "BUNDLE", "--text", "TEXT", "--window", 1000), "does not fit the context"),
        (("bench", "kernel"), "did you mean `ktc bench kernels`?"),
        (("bench", "emulated", "--layers", 3), "did you mean `ktc bench emulate`?"),
        (("simulate", "x"), "profiles: h200-spr, paper-2x8452y-a100, this-machine ("),
        (("bench", "kernels", "--tokens", "two"), "not a list of positive numbers"),
        (("bench", "kernels", "--shape", "x"), "unknown shape"),
        (("bench", "kernels", "--format", "int3"), "unknown format"),
        (("tune", "--format", "int3"), "unknown format"),
        ((*MINI, "--format", "int3"), "unknown format"),
        ((*MINI, "--shares", "74"), "not CPU:DEVICE"),
        ((*MINI, "--deferred", "two"), "not a list of numbers"),
        (("bench", "kernels", "--breakdown", "--plot", "p.png"), "--plot draws the comparison"),
        (("bench", "kernels", "--emulate-nodes", 2), "--emulate-nodes is for --breakdown"),
        (("bench", "kernels", "--plot", "p.nonsense"), "no format for pictures is called '.nonsense'"),
        ((*MINI, "--plot", "p.nonsense"), "no format for pictures is called '.nonsense'"),
        (("bench", "BUNDLE", "--device", "emulate:paper-2x8452y-a100", "--plot", "p.txt"), "no format for pictures"),
        (("eval", "BUNDLE", "--text", "TEXT", "--table", "--plot", "p.txt"), "no format for pictures"),
        (("compile", "x", "--variants", "mmx"), "no kernel variant 'mmx'"),
        (("plan", "x", "--nodes", 0), "--nodes"),
    ],
)
def test_wrong_usage_is_2(
    compiled, text: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], said: str
) -> None:
    known = {"BUNDLE": None, "TEXT": text}
    if "BUNDLE" in arguments:
        known["BUNDLE"] = compiled("deepseek_v3", tokenizer="byte", max_position_embeddings=48)
    assert ktc(*(known.get(a, a) if isinstance(a, str) else a for a in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("ktc: error: ") == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("compile", "no/such/checkpoint"), 3),
        (("plan", "x", "--recipe", "no-such-recipe"), 4),
        (("simulate", "x", "-H", "no-such-profile"), 4),
        (("run", "no-such-bundle", "-p", "x"), 6),
        (("inspect", "no-such-bundle"), 6),
        (("verify", "no-such-bundle"), 6),
        (("profile", "no-such-bundle", "--text", __file__, "-o", "no-folder/x.json"), 8),
        (("run", "no-such-bundle", "-p", "x", "--device", "emulate:h200-spr", "--trace", "no-folder/x.json"), 8),
        (("simulate", "x", "--trace", "no-folder/x.json"), 8),
        ((*MINI, "--trace", "no-folder/x.json"), 8),
        ((*MINI, "--save-profile", "no-folder/x.yaml"), 8),
        (("bench", "kernels", "--save", "no-folder/x.json"), 8),
    ],
)
def test_what_is_missing_has_the_code_of_its_kind(arguments: tuple[str, ...], code: int) -> None:
    assert ktc(*arguments) == code


def test_no_kernels_to_be_had_is_7(compiled, another_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = compiled("deepseek_v3", tokenizer="byte", max_position_embeddings=48)
    assert ktc("run", bundle, "-p", "x") == 7
    assert "no C++ compiler to build one\n  hint: install g++" in capsys.readouterr().err


def test_a_compiler_that_fails_is_7(
    compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KTC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    assert ktc("run", compiled("deepseek_v3", tokenizer="byte", max_position_embeddings=48), "-p", "x") == 7
    assert "does not run" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_library_that_is_none_is_named_once(
    command: str, compiled: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "no.so"
    library.write_bytes(b"not ELF")
    more = ("-p", "x") if command == "run" else ()
    assert (
        ktc(command, compiled("deepseek_v3", tokenizer="byte"), *more, "--kernel-library", library)
        == BuildError.exit_code
    )
    said = capsys.readouterr().err
    assert said.count("kernel library") == 1 and "hint: leave out --kernel-library" in said
