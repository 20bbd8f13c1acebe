"""YAML to plain Python values that remember their line and column. Knows nothing about recipes.

The subset is `yaml.safe_load`'s, minus what makes a recipe ambiguous or a bomb: duplicate keys,
keys that are not strings, merge keys, and documents that grow beyond a few thousand values through aliases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from ktc.errors import RecipeError

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 32

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Mark:
    """A 1-based position in the file."""

    line: int
    column: int


@dataclass(frozen=True)
class Document:
    """A parsed document.

    Attributes:
        value: dicts, lists, strings, numbers, booleans, None.
        values: path of every value -> where it starts.
        keys: path of every mapping entry -> where its key starts.
        file: name used in messages.
    """

    value: Any
    values: dict[Path, Mark]
    keys: dict[Path, Mark]
    file: str

    def at(self, path: Path, key: bool = False) -> str:
        """`file:line:column` of a value (or of its key); of the nearest known parent if there is none."""
        table = self.keys if key else self.values
        while path and path not in table:
            path = path[:-1]
        mark = table.get(path) or self.values.get(path) or Mark(1, 1)
        return f"{self.file}:{mark.line}:{mark.column}"

    def line(self, path: Path) -> int:
        return self.values[path].line


def parse(text: str, file: str) -> Document:
    """Parse one YAML document.

    Raises:
        RecipeError: not YAML, or outside the subset above; the message starts with file:line:column.
    """
    if len(text.encode()) > MAX_BYTES:
        raise RecipeError(
            f"{file}: larger than {MAX_BYTES >> 20} MB", "a recipe is a page of YAML; is this the right file?"
        )
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise RecipeError(f"{file}: is empty", "a recipe is a list of match -> replace rules")
        walk = _Walk(loader, file)
        value = walk.visit(node, (), 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        context = f" ({error.context})" if error.context else ""
        raise RecipeError(f"{where}: not valid YAML: {error.problem}{context}") from error
    except yaml.YAMLError as error:  # e.g. a control character
        raise RecipeError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise RecipeError(f"{file}: nested too deeply to be a recipe") from error
    finally:
        if loader is not None:
            loader.dispose()
    return Document(value, walk.values, walk.keys, file)


class _Walk:
    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self.loader, self.file = loader, file
        self.values: dict[Path, Mark] = {}
        self.keys: dict[Path, Mark] = {}

    def visit(self, node: yaml.Node, path: Path, depth: int) -> Any:
        mark = Mark(node.start_mark.line + 1, node.start_mark.column + 1)
        self.values[path] = mark
        if depth > MAX_DEPTH or len(self.values) > MAX_VALUES:
            raise RecipeError(
                f"{self.file}:{mark.line}:{mark.column}: the document expands to more than"
                f" {MAX_VALUES} values or {MAX_DEPTH} levels",
                "write the rules out instead of nesting YAML aliases",
            )
        if isinstance(node, yaml.MappingNode):
            out: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = self._key(key_node, out)
                self.keys[(*path, key)] = Mark(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
                out[key] = self.visit(value_node, (*path, key), depth + 1)
            return out
        if isinstance(node, yaml.SequenceNode):
            return [self.visit(item, (*path, i), depth + 1) for i, item in enumerate(node.value)]
        try:
            return self.loader.construct_object(node)
        except ValueError as error:  # e.g. a date that does not exist
            raise RecipeError(f"{self.file}:{mark.line}:{mark.column}: bad value: {error}") from error

    def _key(self, node: yaml.Node, seen: dict[str, Any]) -> str:
        where = f"{self.file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
            shown = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            raise RecipeError(
                f"{where}: key {shown} is not a plain name", "recipe keys are words such as match, replace"
            )
        key = str(node.value)
        if key in seen:
            raise RecipeError(
                f"{where}: key '{key}' appears twice in the same mapping", "YAML would silently keep the last"
            )
        return key
