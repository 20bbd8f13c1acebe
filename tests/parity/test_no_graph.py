"""A family that was added without a decode graph: compile says so, Hugging Face's modules run it, --graph on is
refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ktc.compile import compile_checkpoint
from ktc.errors import UnsupportedModelError
from ktc.graph.families import SKELETONS
from tests.tiny import make_tiny


@pytest.fixture(scope="module", autouse=True)
def no_skeleton() -> Iterator[None]:
    """As a family is that has a file in ktc/models and nothing in ktc/graph/families.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(SKELETONS, "qwen3_moe")
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(bundle, what compiling said)."""
    folder = tmp_path_factory.mktemp("no-graph")
    checkpoint = make_tiny("qwen3_moe", folder / "m", tokenizer="byte")
    said: list[str] = []
    compile_checkpoint(checkpoint, "fp32", folder / "m.ktc", variants=(), jobs=1, say=said.append)
    return folder / "m.ktc", said


def test_compile_says_so_and_leaves_the_graph_out(bundle: tuple[Path, list[str]]) -> None:
    path, said = bundle
    assert not (path / "graph").exists()
    assert any("no decode graph" in line and "qwen3_moe" in line and "slower" in line for line in said)


def test_run_takes_the_modules_and_graph_on_is_refused(
    bundle: tuple[Path, list[str]], library: Callable[[str], Path], best_variant: str
) -> None:
    from ktc.cli.run_cmd import command

    def run(*more: str) -> Result:
        arguments = [str(bundle[0]), "-p", "hello", "--max-tokens", "3", "--greedy", "--kernel-library"]
        return CliRunner().invoke(command, [*arguments, str(library(best_variant)), *more], standalone_mode=False)

    plain = run()
    assert plain.exception is None, repr(plain.exception)
    for option in (("--graph", "on"), ("--deferred", "0")):
        result = run(*option)
        assert isinstance(result.exception, UnsupportedModelError)
        assert "qwen3_moe" in result.exception.message and "--graph off" in str(result.exception.hint)


def test_eval_names_a_way_out_that_there_is(bundle: tuple[Path, list[str]], tmp_path: Path) -> None:
    """`ktc eval` has no --graph."""
    from ktc.cli.eval_cmd import command

    text = tmp_path / "text"
    text.write_text("The quick brown fox. " * 20)
    result = CliRunner().invoke(command, [str(bundle[0]), "--text", str(text)], standalone_mode=False)
    assert isinstance(result.exception, UnsupportedModelError)
    assert "qwen3_moe" in result.exception.message
    assert str(result.exception.hint).endswith("`ktc run --graph off`")
