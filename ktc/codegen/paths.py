"""Where templates and kernel headers are: in a source checkout, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

from ktc.errors import BuildError


def data_dir(kind: str) -> Path:
    """Directory of `kind`, "templates" or "include".

    A wheel carries them as `ktc/_data/<kind>`; a checkout has `templates/` and `runtime/include/`.

    Raises:
        BuildError: neither is there (a damaged installation).
    """
    package = Path(__file__).resolve().parent.parent
    places = {
        "templates": (package / "_data" / "templates", package.parent / "templates"),
        "include": (package / "_data" / "include", package.parent / "runtime" / "include"),
    }[kind]
    marks = {"templates": "experts.cpp.j2", "include": "ktc/abi.h"}
    for place in places:
        if (place / marks[kind]).is_file():
            return place
    raise BuildError(f"ktc's {kind} are missing: no {marks[kind]} under {places[0]} or {places[1]}", "reinstall ktc")


def header_files() -> list[Path]:
    """Every header that a kernel library may include, sorted."""
    return sorted((data_dir("include") / "ktc").rglob("*.h"))
