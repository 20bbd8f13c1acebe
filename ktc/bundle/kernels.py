"""Kernel libraries on their way into a bundle: built by ktc.codegen, copied beside their source and build record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ktc.bundle.emit import Emitter
from ktc.codegen import cache
from ktc.codegen.build import LIBRARY, BuiltLib, build_and_say
from ktc.codegen.paths import data_dir, header_files
from ktc.codegen.spec import specs_for
from ktc.codegen.variants import VARIANTS, runnable
from ktc.errors import BuildError
from ktc.host import this_host
from ktc.layout import ABI_VERSION, LAYOUT_VERSION
from ktc.plan.ir import Plan


@dataclass(frozen=True)
class KernelSet:
    """The built libraries of one plan, by variant, best first."""

    libs: dict[str, BuiltLib]

    @property
    def variants(self) -> list[str]:
        return list(self.libs)

    @property
    def nbytes(self) -> int:
        return sum(lib.path.stat().st_size for lib in self.libs.values())

    def best_here(self) -> str | None:
        """The best of them that this machine can run."""
        return next((v for v in runnable(this_host().features, automatic=False) if v in self.libs), None)

    def emit(self, out: Emitter) -> list[dict[str, Any]]:
        """Copy libraries, build records, generated C++ and headers into the bundle; the manifest's `kernels`.

        Raises:
            BuildError: a library in the cache changed since it was built.
        """
        entries = []
        for variant, lib in self.libs.items():
            data, source = lib.path.read_bytes(), lib.source.read_bytes()
            if hashlib.sha256(data).hexdigest() != lib.sha256:
                raise BuildError(f"{lib.path} changed after it was built", f"delete {cache.cache_dir()} and try again")
            file = f"kernels/{variant}/{LIBRARY}"
            out.add(file, data, "kernel")
            record = json.dumps(lib.build_json(), indent=1, sort_keys=True) + "\n"
            out.add(f"kernels/{variant}/build.json", record.encode(), "build")
            out.add(f"kernels/src/{variant}.cpp", source, "source")
            entries.append(
                {
                    "variant": variant,
                    "file": file,
                    "abi": ABI_VERSION,
                    "layout": LAYOUT_VERSION,
                    "required_features": list(lib.required_features),
                    "glibc_max": lib.glibc_max or None,
                    "src_sha256": hashlib.sha256(source).hexdigest(),
                    "compiler": lib.compiler,
                    "flags": list(lib.flags),
                    "key": lib.key,
                    "sha256": lib.sha256,
                }
            )
        include = data_dir("include")
        for header in header_files():
            out.add(f"kernels/src/{header.relative_to(include).as_posix()}", header.read_bytes(), "source")
        return entries


def build_kernels(plan: Plan, variants: Sequence[str] | None, say: Callable[[str], None] = lambda _: None) -> KernelSet:
    """Build every variant, or have it from the cache.

    Args:
        variants: names; None = all that a host may choose by itself.
        say: told when compilers start and when they are done, which takes minutes; nothing if all are in the cache.
    Raises:
        BuildError: no compiler, or it failed.
    """
    names = [name for name, v in VARIANTS.items() if (v.automatic if variants is None else name in variants)]
    specs = specs_for(plan)
    built = build_and_say(specs, names, say)
    return KernelSet({name: built[name] for name in names})
