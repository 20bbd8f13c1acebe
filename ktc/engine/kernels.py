"""Which kernels the native operators of a model are made with: forced by an option, wished by the recipe, or free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The hybrid backends and "auto" leave the choice to the runtime; "portable" is a matter of the library's variant.
_BACKEND_LABELS = {"AMX": "amx", "AVX512": "avx512", "AVX2": "avx2"}


@dataclass
class Kernels:
    """What native operators are made with.

    Attributes:
        force: part of a kernel's name that every operator must use, "" = free choice per call.
        min_rows: kernel label -> rows below which another one is better (measured by `ktc tune`).
        notes: wishes of the recipe that could not be met.
    """

    lib: Any
    pool: Any
    force: str = ""
    min_rows: Mapping[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def options(self, backend: str = "auto", scheme: str = "") -> dict[str, Any]:
        """Keywords for `_runtime.Moe` and `_runtime.Linear`; `backend` is the recipe's."""
        force, label = self.force, _BACKEND_LABELS.get(backend)
        if not force and label is not None:
            wanted = f"{label}:{scheme}:"
            if any(str(kernel["name"]).startswith(wanted) for kernel in self.lib.kernels()):
                force = f"{label}:"
            else:
                note = (
                    f"the recipe asks for backend {backend}; the {self.lib.variant} library has no such {scheme} kernel"
                )
                if note not in self.notes:
                    self.notes.append(note)
        return {"force": force, "min_rows": dict(self.min_rows)}
