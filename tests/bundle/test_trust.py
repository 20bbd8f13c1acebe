"""Code in a bundle is foreign: what is loaded, what is refused, and what is built instead."""

from __future__ import annotations

import hashlib
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from ktc import _runtime
from ktc.bundle import kernel_for_host, open_bundle
from ktc.bundle.kernels import build_kernels
from ktc.bundle.trust import ready_library
from ktc.errors import BuildError, BundleError, UsageError
from ktc.host import this_host
from tests.bundle.conftest import edit_manifest, relist

LIBRARY = "kernels/portable/libktc_experts.so"


def test_a_library_built_here_is_loaded_from_a_private_copy(with_kernels: Path) -> None:
    bundle = open_bundle(with_kernels)
    path = kernel_for_host(bundle, "portable")
    assert not path.is_relative_to(bundle.path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == bundle.files[LIBRARY]["sha256"]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert _runtime.KernelLib(str(path)).variant == "portable"


def test_a_tampered_library_is_refused_when_the_bundle_is_opened(kernels_copy: Path) -> None:
    data = bytearray((kernels_copy / LIBRARY).read_bytes())
    data[-100] ^= 1
    (kernels_copy / LIBRARY).write_bytes(data)
    with pytest.raises(BundleError, match=rf"{LIBRARY}: sha256 .* is not the manifest's"):
        open_bundle(kernels_copy)


def test_a_library_tampered_after_opening_is_refused(kernels_copy: Path) -> None:
    bundle = open_bundle(kernels_copy)
    (kernels_copy / LIBRARY).write_bytes(b"\x7fELF evil")
    with pytest.raises(BundleError, match="was changed: its sha256 is not the manifest's"):
        kernel_for_host(bundle, "portable")


def test_a_library_swapped_with_its_hashes_is_not_trusted(kernels_copy: Path) -> None:
    """Whoever can change the library can change the manifest: then it is simply not one built here."""
    evil = (kernels_copy / LIBRARY).read_bytes() + b"evil"
    (kernels_copy / LIBRARY).write_bytes(evil)
    digest = hashlib.sha256(evil).hexdigest()
    relist(kernels_copy, LIBRARY)
    edit_manifest(kernels_copy, lambda m: m["kernels"][0].update(sha256=digest))
    bundle = open_bundle(kernels_copy)
    path = kernel_for_host(bundle, "portable")  # built, or had from the cache, from ktc's own templates
    assert hashlib.sha256(path.read_bytes()).hexdigest() != digest
    assert _runtime.KernelLib(str(path)).variant == "portable"


def test_without_trust_and_compiler_nothing_is_loaded(kernels_copy: Path, another_machine: Path) -> None:
    bundle = open_bundle(kernels_copy)
    with pytest.raises(BuildError) as error:
        kernel_for_host(bundle)
    digest = bundle.files[LIBRARY]["sha256"]
    assert f"--trust-kernel: portable {digest}" in (error.value.hint or "")
    assert ready_library(bundle) is None
    # naming the hash is what vouches, and it does so for that one library only
    path = kernel_for_host(bundle, None, (digest,))
    assert path.is_relative_to(another_machine)
    assert ready_library(bundle, (digest,)) == ("portable", str(path))
    with pytest.raises(BuildError):
        kernel_for_host(bundle, None, ("0" * 64,))


@pytest.mark.parametrize("digest", ["", "yes", "all", "ABC", "0" * 63, "../x"])
def test_a_hash_that_is_none_is_refused(with_kernels: Path, digest: str) -> None:
    with pytest.raises(UsageError, match="not a sha256"):
        kernel_for_host(open_bundle(with_kernels), None, (digest,))


def test_s14_a_variant_that_this_cpu_lacks_is_refused_before_it_is_opened(with_kernels: Path) -> None:
    # failure S14: illegal instruction on older CPUs. Here: the same machine without its AVX and AMX.
    bundle, old = open_bundle(with_kernels), replace(this_host(), features=frozenset({"sse2"}))
    for variant in ("amx", "zen4", "avx512vbmi", "avx512", "avxvnni", "avx2"):
        with pytest.raises(
            BundleError, match=rf"the {variant} kernels need .*, which this CPU does not offer"
        ) as error:
            kernel_for_host(bundle, variant, host=old)
        assert "portable" in (error.value.hint or "")
    assert kernel_for_host(bundle, None, host=old).is_file()  # the next best: portable


def test_s11_without_permission_amx_is_not_chosen(with_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # failure S11: AMX listed but not usable.
    monkeypatch.setattr(_runtime, "amx_permission", lambda: (False, "arch_prctl: not permitted"))
    host = this_host()
    assert not any(f.startswith("amx") for f in host.features) and host.amx == "arch_prctl: not permitted"
    with pytest.raises(BundleError, match="amx kernels need amx_"):
        kernel_for_host(open_bundle(with_kernels), "amx", host=host)


def test_an_unknown_variant_is_refused(with_kernels: Path) -> None:
    with pytest.raises(UsageError, match="no kernel variant 'sse9'"):
        kernel_for_host(open_bundle(with_kernels), "sse9")


@pytest.mark.parametrize("field", ["abi", "layout"])
def test_i4_a_library_of_another_abi_is_left_alone(kernels_copy: Path, another_machine: Path, field: str) -> None:
    # failure I4: a runtime update broke prebuilt libraries. Versions are compared before anything is opened.
    edit_manifest(kernels_copy, lambda m: m["kernels"][0].update({field: 99}))
    bundle = open_bundle(kernels_copy)
    with pytest.raises(BuildError):
        kernel_for_host(bundle, None, (bundle.files[LIBRARY]["sha256"],))


def test_a_library_that_asks_for_more_than_it_says_elsewhere_is_left_alone(
    kernels_copy: Path, another_machine: Path
) -> None:
    edit_manifest(kernels_copy, lambda m: m["kernels"][0].update(required_features=["quantum_unit"]))
    bundle = open_bundle(kernels_copy)
    with pytest.raises(BuildError):
        kernel_for_host(bundle, None, (bundle.files[LIBRARY]["sha256"],))


def test_i3_kernels_in_a_bundle_need_neither_python_nor_torch(with_kernels: Path) -> None:
    # failures I1, I3: prebuilt code tied to one torch or one Python. Also I2: the glibc it needs is recorded.
    from ktc.codegen.build import check

    newest = check(with_kernels / LIBRARY)
    (kernel,) = open_bundle(with_kernels).manifest["kernels"]
    assert kernel["glibc_max"] == (newest or None)
    needed = (with_kernels / LIBRARY).read_bytes()
    assert b"libpython" not in needed and b"libtorch" not in needed and b"PyInit" not in needed


def test_a_bundle_without_kernels_is_complete(compiled, with_kernels: Path) -> None:
    bundle = open_bundle(compiled("deepseek_v3"))
    assert bundle.manifest["kernels"] == []
    path = kernel_for_host(bundle, "portable")  # from the cache: the same shapes were built for `with_kernels`
    assert _runtime.KernelLib(str(path)).variant == "portable"


def test_i5_a_library_that_changed_in_the_cache_is_not_shipped(compiled, tmp_path: Path) -> None:
    kernels = build_kernels(open_bundle(compiled("deepseek_v3")).plan, ("portable",))
    lib = kernels.libs["portable"]
    copy = tmp_path / lib.path.name
    shutil.copy(lib.path, copy)
    with copy.open("ab") as file:
        file.write(b"x")
    from ktc.bundle.emit import Emitter

    kernels.libs["portable"] = replace(lib, path=copy)
    with pytest.raises(BuildError, match="changed after it was built"):
        kernels.emit(Emitter(tmp_path / "bundle"))
