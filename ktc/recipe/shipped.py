"""YAML files that come with ktc (recipes, hardware profiles): found by path or by name, and read."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ktc.errors import RecipeError
from ktc.paths import expand
from ktc.recipe.yaml_marks import MAX_BYTES

_PACKAGE = Path(__file__).resolve().parent.parent
# Installed wheel first, then a source checkout.
ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)


@dataclass(frozen=True)
class Shipped:
    """One kind of shipped file.

    Attributes:
        kind: what messages call it ("hardware profile"); its last word also stands alone.
        folder: where it is below ROOTS.
        error: raised for every fault.
        also: other names there are, said after the list of shipped ones.
    """

    kind: str
    folder: Path
    error: type[RecipeError]
    also: str = ""

    def files(self) -> dict[str, Path]:
        """Name without suffix -> file."""
        for root in ROOTS:
            if (root / self.folder).is_dir():
                return {f.stem: f for f in sorted((root / self.folder).glob("*.yaml"))}
        return {}

    def prefixes(self) -> list[Path]:
        """Folders that a name may be written with: none, and each end of `folder`."""
        parts = self.folder.parts
        return [Path(*parts[i:]) for i in range(len(parts) + 1)]

    def read(self, path_or_name: str | Path) -> tuple[str, str, str]:
        """A file, or else a shipped one by name ("int4", "int4.yaml", "recipes/int4.yaml").

        Returns:
            text, what messages call the file, its name without suffix.
        Raises:
            self.error: not found (lists the shipped ones) or unreadable.
        """
        given = expand(path_or_name)
        path = self._find(given)
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise self.error(f"{path}: larger than {MAX_BYTES >> 20} MB", "is this the right file?")
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.error(f"{path}: not a text file (bad UTF-8 at byte {error.start})") from error
        except OSError as error:
            raise self.error(f"{path}: cannot be read: {error.strerror}") from error
        return text, str(path) if path == given else path.name, path.stem

    def _find(self, given: Path) -> Path:
        if given.is_file():
            return given
        if given.is_dir():
            raise self.error(f"{given}: is a directory, not a {self.kind}")
        shipped = self.files()
        name = given.name.removesuffix(".yaml")
        if given.parent in self.prefixes() and name in shipped:
            return shipped[name]
        near = difflib.get_close_matches(given.stem, shipped, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        short = self.kind.split()[-1]
        raise self.error(
            f"no {self.kind}{'' if ' ' in self.kind else ' file'} '{given}' and no shipped {short} of that name",
            f"{guess}shipped {short}s: {', '.join(shipped) or 'none found'}{self.also}",
        )
