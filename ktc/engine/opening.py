"""A bundle on its way into an engine: judged, its kernel library opened, and what is slower than it could be noted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc.errors import BuildError, BundleError, KtcError, UsageError

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle


def open_judged(
    path: str | Path, emulate_nodes: bool, trust_sha256: Sequence[str], own_kernels: bool
) -> tuple[Bundle, list[str]]:
    """The opened bundle, and what its verdict finds slower than it could be. Loads nothing of it.

    Args:
        own_kernels: the user brings a kernel library: what the bundle has does not matter.
    Raises:
        BundleError: damaged, or not for this machine. BuildError: no kernel library can be had here.
    """
    from ktc.bundle import open_bundle, verdict

    bundle = open_bundle(path)
    degraded = []
    for part in verdict(bundle, emulate_nodes=emulate_nodes, trust_sha256=trust_sha256).parts:
        if part.name == "kernels" and own_kernels:
            continue
        if part.level in ("UNSUPPORTED", "NEEDS_REPACK"):
            kind = BuildError if part.name == "kernels" else BundleError
            raise kind(f"{bundle.path}: {part.reason}", part.fix or None)
        if part.level == "RUNS_SLOWER":
            degraded.append(f"{part.reason}{f' ({part.fix})' if part.fix else ''}")
    return bundle, degraded


def open_kernels(
    bundle: Bundle, variant: str | None, trust_sha256: Sequence[str], own: str | Path | None
) -> tuple[Any, list[str]]:
    """The kernel library: the user's own, or the trusted or locally built one for this host; and whether the best
    variant could not be had (failure M6).

    Raises:
        BundleError, BuildError: see `kernel_for_host`; or the library cannot be opened.
    """
    from ktc.bundle import kernel_for_host
    from ktc.codegen.variants import runnable
    from ktc.host import this_host

    lib = open_library(kernel_for_host(bundle, variant, trust_sha256) if own is None else own, own is not None)
    best = runnable(this_host().features)[0]
    chosen = variant is not None or own is not None
    return lib, [] if chosen or lib.variant == best else [f"{lib.variant} kernels, but this CPU runs {best}"]


def no_kernel(bundle: Bundle, lib: Any, forced: str, error: Exception) -> KtcError:
    """What to raise where an operator found no kernel in the library: the fault is the user's if he forced one.

    Args:
        forced: part of a kernel's name (`--kernel`), or nothing.
    """
    return forced_kernel(lib, forced, error) or BuildError(f"{bundle.path}: {error}")


def forced_kernel(lib: Any, forced: str, error: Exception) -> UsageError | None:
    """The error if it is that no kernel is called as the user wants (`forced`, see `no_kernel`)."""
    if not forced or "whose name contains" not in str(error):  # words of the runtime
        return None
    labels = dict.fromkeys(str(kernel["name"]).partition(":")[0] for kernel in lib.kernels())
    what = str(error).partition(" has ")[2].partition("; it has ")[0] or str(error)
    return UsageError(
        f"--kernel {forced}: the {lib.variant} library has {what}",
        f"possible here: {', '.join(labels)}; --variant chooses another library",
    )


def open_library(path: str | Path, own: bool = False) -> Any:
    """
    Args:
        own: the user named this file.
    Raises:
        BuildError: it cannot be loaded, or is not a kernel library of this ABI and layout.
    """
    from ktc import _runtime

    try:
        return _runtime.KernelLib(os.fsencode(path))
    except RuntimeError as error:  # names the file itself
        hint = "leave out --kernel-library: the kernels are then chosen or built here" if own else None
        raise BuildError(str(error), hint) from error
