"""Build kernel libraries: one per ISA variant, cached by everything that went into them.

Three verbs, each usable alone: `try_cached` looks, `build` makes, `check` proves that a file is what it claims to be.
`build_variants` strings them together: look, take the lock, look again, build, check, rename into place.
What a key covers: generated source, every header, compiler and its version, flags, the versions of ktc, ABI and layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ktc
from ktc.codegen import cache, elf
from ktc.codegen.compiler import Compiler, Compilers, find_compiler
from ktc.codegen.paths import data_dir, header_files
from ktc.codegen.render import render
from ktc.codegen.spec import KernelSpecs
from ktc.codegen.variants import VARIANTS, Variant
from ktc.errors import BuildError, DiskError
from ktc.layout import ABI_VERSION, LAYOUT_VERSION
from ktc.progress import Progress, announce, format_seconds

LIBRARY = "libktc_experts.so"
QUERY_SYMBOL = "ktc_kernel_query"
_SYSTEM_LIBRARIES = ("libc.so.", "libm.so.", "ld-linux")


@dataclass(frozen=True)
class BuiltLib:
    """A checked library in the cache.

    Attributes:
        variant: its name in VARIANTS.
        path, source: the library and the C++ it was built from.
        key, sha256: the build key and the hash of the file.
        flags, compiler: how it was compiled.
        required_features: CPU features as in /proc/cpuinfo.
        glibc_max: newest glibc symbol version it needs, or "".
    """

    variant: str
    path: Path
    source: Path
    key: str
    sha256: str
    flags: tuple[str, ...]
    compiler: str
    required_features: tuple[str, ...]
    glibc_max: str

    def build_json(self) -> dict[str, Any]:
        """What build.json beside the library says: everything but paths, plus the ABI and layout versions."""
        record = {k: v for k, v in asdict(self).items() if k not in ("path", "source")}
        return record | {"abi": ABI_VERSION, "layout": LAYOUT_VERSION, "ktc": ktc.__version__}


@dataclass(frozen=True)
class Job:
    """One library to have: its source, how to compile it, and the key of the two."""

    variant: Variant
    source: str
    compiler: Compiler
    key: str

    @property
    def directory(self) -> Path:
        return cache.cache_dir() / self.key


def make_job(specs: KernelSpecs, variant: str, compiler: Compiler | None = None) -> Job:
    """Raises BuildError for an unknown variant, missing templates or headers, or no compiler."""
    if variant not in VARIANTS:
        raise BuildError(f"unknown kernel variant {variant!r}", f"one of {', '.join(VARIANTS)}")
    compiler = compiler or find_compiler()
    source = render(specs, VARIANTS[variant])
    digest = hashlib.sha256()
    words = [source, compiler.version, *compiler.command, *VARIANTS[variant].flags]
    words += [ktc.__version__, str(ABI_VERSION), str(LAYOUT_VERSION)]
    root = data_dir("include")
    for header in header_files():
        words += [str(header.relative_to(root)), header.read_text()]
    for word in words:
        digest.update(f"{len(word)}:{word}".encode())
    return Job(VARIANTS[variant], source, compiler, digest.hexdigest()[:32])


def try_cached(job: Job) -> BuiltLib | None:
    """The library of this key, if it is there, whole, and was built here; anything else counts as absent."""
    try:
        record = json.loads((job.directory / "build.json").read_text())
        lib = _lib(job, record["sha256"], record["glibc_max"])
        whole = record == _plain(lib.build_json()) and cache.sha256_file(lib.path) == lib.sha256
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return lib if whole and cache.built_here(lib.sha256) else None


def build(job: Job, among: Compilers | None = None) -> BuiltLib:
    """Compile, check and move into the cache, replacing whatever is there under this key.

    Args:
        among: compilers that this one is to be ended with.
    Raises:
        BuildError: the compiler's last lines, or why the result is not fit for use.
        DiskError: the cache cannot be written.
    """
    try:
        work = Path(tempfile.mkdtemp(dir=cache.cache_dir(), prefix=".build-"))
    except OSError as e:
        raise DiskError(f"the kernel cache cannot be written: {e.strerror}", "set KTC_CACHE_DIR") from e
    try:
        source, library = work / "kernels.cpp", work / LIBRARY
        source.write_text(job.source)
        flags = (*job.variant.flags, f'-DKTC_SOURCE_KEY="{job.key}"')
        job.compiler.compile(source, library, flags, data_dir("include"), among)
        lib = _lib(job, cache.sha256_file(library), check(library))
        cache.write_atomic(work / "build.json", _json(lib.build_json()))
        cache.record_trust(lib.sha256, {"variant": lib.variant, "key": lib.key})
        _replace_directory(work, job.directory)
        return lib
    except OSError as e:
        hint = "make room there and for temporary files, or set KTC_CACHE_DIR (TMPDIR) to another place"
        raise DiskError(f"building kernels in {work} failed: {e.strerror}", hint) from e
    finally:
        if not os.environ.get("KTC_DEBUG"):
            shutil.rmtree(work, ignore_errors=True)


def check(library: Path) -> str:
    """Prove from its ELF tables that a library exports the query and nothing else, and needs libc at most.

    Returns:
        The newest glibc symbol version that it needs.
    Raises:
        BuildError: what is wrong with it.
    """
    info = elf.read_elf(library)
    if info.exports != (QUERY_SYMBOL,):
        raise BuildError(f"{library} exports {', '.join(info.exports) or 'nothing'} instead of {QUERY_SYMBOL} alone")
    foreign = [name for name in info.needed if not name.startswith(_SYSTEM_LIBRARIES)]
    if foreign:
        raise BuildError(f"{library} needs {', '.join(foreign)}; a kernel library may need libc and libm only")
    return info.glibc_max


def build_variants(
    specs: KernelSpecs,
    variants: Iterable[str],
    progress: Callable[[str, str], None] | None = None,
    jobs: int | None = None,
) -> dict[str, BuiltLib]:
    """Have every variant, from the cache where possible; compilers run in parallel.

    An interrupt ends them at once; the cache then has what was finished and nothing else.

    Args:
        progress: called with (variant, "cached" | "building" | "built") from the building threads.
        jobs: compilers at a time; default one per CPU this process may use.
    Raises:
        BuildError: of the first variant that fails, after the others have ended.
    """
    todo = [make_job(specs, name) for name in dict.fromkeys(variants)]
    say = progress or (lambda variant, event: None)
    compilers = Compilers()

    def have(job: Job) -> BuiltLib:
        lib = try_cached(job)
        if lib is None:
            with cache.lock(cache.cache_dir() / f"{job.key}.lock", compilers.ended):
                lib = try_cached(job)  # another process may have built it while we waited
                if lib is None:
                    say(job.variant.name, "building")
                    lib = build(job, compilers)
                    say(job.variant.name, "built")
                    return lib
        say(job.variant.name, "cached")
        return lib

    workers = jobs or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(max_workers=max(1, workers))
    try:
        futures = [pool.submit(have, job) for job in todo]
        wait(futures)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        compilers.end()
        raise
    finally:
        pool.shutdown()
    return {job.variant.name: f.result() for job, f in zip(todo, futures, strict=True)}


def build_and_say(
    specs: KernelSpecs, variants: Iterable[str], say: Callable[[str], None] = announce
) -> dict[str, BuiltLib]:
    """`build_variants`, for somebody who waits: with a bar if there are several.

    Args:
        say: told when compilers start and when they are done, which takes minutes; nothing if all are in the cache.
    Raises:
        BuildError: as `build_variants`.
    """
    names = list(dict.fromkeys(variants))
    missing = [name for name in names if try_cached(make_job(specs, name)) is None]
    if not missing:
        return build_variants(specs, names)
    say(f"building kernels: {', '.join(missing)} (once; this can take minutes)")
    began = time.monotonic()
    if len(names) == 1:
        built = build_variants(specs, names)
    else:
        with Progress("kernels", len(names), "libraries", report=False) as progress:

            def tell(variant: str, event: str) -> None:
                progress.update(0 if event == "building" else 1, f"{variant} {event}")

            built = build_variants(specs, names, tell)
    say(f"kernels built in {format_seconds(time.monotonic() - began)}")
    return built


def _lib(job: Job, sha256: str, glibc_max: str) -> BuiltLib:
    return BuiltLib(
        variant=job.variant.name,
        path=job.directory / LIBRARY,
        source=job.directory / "kernels.cpp",
        key=job.key,
        sha256=sha256,
        flags=job.variant.flags,
        compiler=job.compiler.version,
        required_features=job.variant.required_features,
        glibc_max=glibc_max,
    )


def _json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


def _plain(record: dict[str, Any]) -> Any:
    return json.loads(_json(record))


def _replace_directory(new: Path, final: Path) -> None:
    """Rename `new` to `final`; a stale `final` is moved aside first, so no reader sees a mixture."""
    new.chmod(0o700)
    if final.exists():
        aside = Path(tempfile.mkdtemp(dir=final.parent, prefix=".stale-"))
        final.rename(aside / "old")
        new.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        new.rename(final)
