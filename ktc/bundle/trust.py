"""Which kernel library runs on this machine. Code from a bundle is foreign until proven otherwise.

A library of a bundle is loaded only if it was built on this machine (the trust store of ktc.codegen.cache)
or if the user named its sha256. There is no switch that trusts everything. Otherwise the kernels are
built here from ktc's own templates, with integer parameters from the checked plan. What is loaded is
a private copy that was hashed after it was made. Signatures are reserved in the format, not checked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktc.bundle.reader import Bundle
from ktc.errors import BuildError, BundleError, DiskError, KtcError, UsageError
from ktc.host import Host, this_host
from ktc.layout import ABI_VERSION, LAYOUT_VERSION


def trusted(kernel: dict[str, Any], trust_sha256: Sequence[str]) -> bool:
    """Whether a manifest's kernel entry names a library that may be loaded here."""
    from ktc.codegen.cache import built_here

    return kernel["sha256"] in trust_sha256 or built_here(kernel["sha256"])


def cached_build(bundle: Bundle, variant: str) -> Path | None:
    """The library that was built here for this bundle's shapes, if it is in the cache. Builds nothing."""
    from ktc.codegen.build import make_job, try_cached
    from ktc.codegen.spec import specs_for

    try:
        lib = try_cached(make_job(specs_for(bundle.plan), variant))
    except KtcError:
        return None
    return lib.path if lib else None


def ready_library(bundle: Bundle, trust_sha256: Sequence[str] = (), host: Host | None = None) -> tuple[str, str] | None:
    """(variant, path) of the library that `kernel_for_host` would return without building one, or None.

    Raises:
        UsageError: a hash that is none.
    """
    from ktc.codegen.variants import runnable

    _check_hashes(trust_sha256)
    host = host or this_host()
    for name in runnable(host.features):
        kernel = _shipped(bundle, name, host)
        if kernel is not None and trusted(kernel, trust_sha256):
            return name, str(private_copy(bundle, kernel))
        if (path := cached_build(bundle, name)) is not None:
            return name, str(path)
    return None


def kernel_for_host(
    bundle: Bundle, variant: str | None = None, trust_sha256: Sequence[str] = (), *, host: Host | None = None
) -> Path:
    """A kernel library that is safe to open on this machine.

    Args:
        variant: which one; None = the best that this CPU runs and that can be had.
        trust_sha256: hashes of libraries in the bundle that the user vouches for.
    Raises:
        UsageError: no such variant, or a hash that is none.
        BundleError: the CPU lacks what `variant` needs (nothing is opened: never SIGILL), or a library that is not
            what the manifest says.
        BuildError: no library is trusted and none can be built.
    """
    from ktc.codegen.variants import VARIANTS, runnable

    _check_hashes(trust_sha256)
    host = host or this_host()
    if variant is not None:
        if variant not in VARIANTS:
            raise UsageError(f"no kernel variant {variant!r}", f"there are {', '.join(VARIANTS)}")
        missing = sorted(set(VARIANTS[variant].required_features) - host.features)
        if missing:
            raise BundleError(
                f"the {variant} kernels need {', '.join(missing)}, which this CPU does not offer",
                f"variants for this CPU: {', '.join(runnable(host.features, automatic=False))}",
            )
    first_error: BuildError | None = None
    for name in [variant] if variant else runnable(host.features):
        kernel = _shipped(bundle, name, host)
        if kernel is not None and trusted(kernel, trust_sha256):
            return private_copy(bundle, kernel)
        try:
            return _build(bundle, name)
        except BuildError as error:
            first_error = first_error or error
    assert first_error is not None  # "portable" runs everywhere, so the loop ran
    hashes = [f"{k['variant']} {k['sha256']}" for k in bundle.manifest["kernels"]]
    vouch = f"; or vouch for a library of the bundle with --trust-kernel: {'; '.join(hashes)}" if hashes else ""
    raise BuildError(first_error.message, f"{first_error.hint or 'a C++ compiler is needed'}{vouch}")


def _check_hashes(trust_sha256: Sequence[str]) -> None:
    for digest in trust_sha256:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise UsageError(f"--trust-kernel {digest}: not a sha256", "it is 64 hexadecimal digits in lower case")


def _shipped(bundle: Bundle, variant: str, host: Host) -> dict[str, Any] | None:
    """The bundle's library of a variant, if it speaks this ABI and layout and the CPU has what it needs."""
    for kernel in bundle.manifest["kernels"]:
        versions = (kernel["abi"], kernel["layout"]) == (ABI_VERSION, LAYOUT_VERSION)
        if kernel["variant"] == variant and versions and set(kernel["required_features"]) <= host.features:
            found: dict[str, Any] = kernel
            return found
    return None


def _build(bundle: Bundle, variant: str) -> Path:
    from ktc.codegen.build import build_and_say
    from ktc.codegen.spec import specs_for

    return build_and_say(specs_for(bundle.plan), [variant])[variant].path


def private_copy(bundle: Bundle, kernel: dict[str, Any]) -> Path:
    """Copy a library to the user's cache and hash the copy: what was checked is what will be opened.

    Raises:
        BundleError: the bytes are not those of the manifest.
        DiskError: the cache cannot be written.
    """
    from ktc.codegen.cache import cache_dir, write_atomic

    try:
        data = (bundle.path / kernel["file"]).read_bytes()
    except OSError as error:
        raise BundleError(f"{bundle.path / kernel['file']}: {error.strerror}") from error
    folder = cache_dir() / "copies" / kernel["sha256"]
    copy: Path = folder / Path(kernel["file"]).name
    if hashlib.sha256(data).hexdigest() != kernel["sha256"]:
        raise BundleError(
            f"{bundle.path / kernel['file']} was changed: its sha256 is not the manifest's",
            "do not use this bundle: copy it again from where it came, or compile it again",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise DiskError(
            f"the kernel cache {folder} cannot be written: {error.strerror}", "set KTC_CACHE_DIR"
        ) from error
    write_atomic(copy, data)
    if hashlib.sha256(copy.read_bytes()).hexdigest() != kernel["sha256"]:
        raise BundleError(f"{copy} changed while it was being copied")
    return copy
