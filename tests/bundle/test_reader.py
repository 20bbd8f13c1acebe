"""Opening a bundle: everything that can be wrong with one is one clear error, before anything is loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktc.bundle import manifest, open_bundle
from ktc.bundle.files import check_relative
from ktc.errors import BundleError
from tests.bundle.conftest import edit_manifest, relist

EXPERTS = "weights/experts/node0/L001.safetensors"


def refused(bundle: Path, match: str) -> BundleError:
    with pytest.raises(BundleError, match=match) as error:
        open_bundle(bundle)
    return error.value


def test_a_whole_bundle_opens(bundle_copy: Path) -> None:
    bundle = open_bundle(bundle_copy)
    assert bundle.nodes == 1 and bundle.plan.model_type == "deepseek_v3"
    assert all(ref.file.is_file() for ref in bundle.tensors.values())
    assert manifest.canonical(bundle.manifest) == (bundle_copy / "manifest.json").read_bytes()


def test_not_a_bundle(tmp_path: Path, tiny_checkpoint) -> None:
    refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is not a directory")
    (tmp_path / "empty").mkdir()
    assert "continued by the same" in (refused(tmp_path / "empty", "it has no manifest.json").hint or "")
    error = refused(tiny_checkpoint("deepseek_v3"), "is a checkpoint, not a bundle")
    assert (error.hint or "").startswith("ktc compile")


@pytest.mark.parametrize("role", ["plan.json", "recipe.yaml", "model/config.json"])
def test_a_flipped_byte_in_a_small_file_is_seen_at_once(bundle_copy: Path, role: str) -> None:
    path = bundle_copy / role
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused(bundle_copy, f"{role}: sha256 .* is not the manifest's")


@pytest.mark.parametrize("name", [EXPERTS, "plan.json", "goldens.safetensors"])
def test_missing_truncated_and_longer_files(bundle_copy: Path, name: str) -> None:
    # failures C8, C9: a shard that is missing or cut short.
    path, data = bundle_copy / name, (bundle_copy / name).read_bytes()
    path.write_bytes(data[:-1])
    refused(bundle_copy, rf"{name}: {len(data) - 1} bytes, but the manifest says {len(data)}")
    path.write_bytes(data + b"x")
    refused(bundle_copy, rf"{name}: {len(data) + 1} bytes")
    path.unlink()
    assert "copy the bundle again" in (refused(bundle_copy, f"{name} is missing").hint or "")


@pytest.mark.parametrize("name", ["extra.txt", "model/modeling_evil.py", "kernels/amx/libktc_experts.so", ".hidden"])
def test_unlisted_files_are_refused(bundle_copy: Path, name: str) -> None:
    (bundle_copy / name).parent.mkdir(parents=True, exist_ok=True)
    (bundle_copy / name).write_text("x")
    refused(bundle_copy, "is not listed in the manifest")


def test_a_signature_file_is_allowed_and_not_believed(bundle_copy: Path) -> None:
    (bundle_copy / "manifest.sig").write_bytes(b"anything")
    open_bundle(bundle_copy)


@pytest.mark.parametrize("name", [EXPERTS, "plan.json", "manifest.json"])
def test_a_symbolic_link_to_a_file_is_refused(bundle_copy: Path, tmp_path: Path, name: str) -> None:
    shutil.move(bundle_copy / name, tmp_path / "elsewhere")
    (bundle_copy / name).symlink_to(tmp_path / "elsewhere")
    refused(bundle_copy, "symbolic link|not a bundle")


def test_a_symbolic_link_to_a_folder_is_refused(bundle_copy: Path, tmp_path: Path) -> None:
    shutil.move(bundle_copy / "weights", tmp_path / "weights")
    (bundle_copy / "weights").symlink_to(tmp_path / "weights")
    refused(bundle_copy, "weights is a symbolic link")


def test_a_folder_that_may_not_be_read_is_not_called_damaged(bundle_copy: Path, monkeypatch) -> None:
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("weights"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    refused(bundle_copy, r"cannot read .*weights: Permission denied")


def test_a_pipe_is_refused(bundle_copy: Path) -> None:
    os.mkfifo(bundle_copy / "pipe")
    refused(bundle_copy, "is not a regular file")


@pytest.mark.parametrize("path", ["../outside.bin", "model/../../x", "/etc/passwd", "a\\b", "./plan.json", "a//b", ""])
def test_a_path_out_of_the_bundle_is_refused(bundle_copy: Path, path: str) -> None:
    (bundle_copy.parent / "outside.bin").write_bytes(b"x")

    def change(value: dict) -> None:
        value["files"].append({"path": path, "size": 1, "sha256": "0" * 64, "role": "model"})

    edit_manifest(bundle_copy, change)
    refused(bundle_copy, r"leads out of the bundle|does not match")


@given(st.text(alphabet="./\\a\0", max_size=8))
def test_only_plain_relative_paths_are_accepted(name: str) -> None:
    try:
        check_relative(name, "x")
    except BundleError:
        return
    assert os.path.normpath(name) == name and not name.startswith("/") and ".." not in name.split("/")


@pytest.mark.parametrize("major", [0, 2, 99])
def test_an_unknown_major_version_is_refused(bundle_copy: Path, major: int) -> None:
    edit_manifest(bundle_copy, lambda m: m["format"].update(major=major))
    error = refused(bundle_copy, rf"bundle format {major}\.0, but this ktc reads 1\.x")
    assert "compile the checkpoint again" in (error.hint or "")


def test_the_version_is_judged_before_the_schema(bundle_copy: Path) -> None:
    (bundle_copy / "manifest.json").write_text('{"format": {"major": 7}, "everything": "else is different"}')
    refused(bundle_copy, "bundle format 7")


def test_i6_a_later_minor_with_new_fields_is_read(bundle_copy: Path) -> None:
    # failure I6: an unknown field rejected a package. A minor version may add fields anywhere.
    def change(value: dict) -> None:
        value["format"]["minor"] = 7
        value["novelty"] = {"a": [1]}
        for section in ("source", "model", "topology", "semantics", "created_by"):
            value[section]["novelty"] = 1
        for section in ("tensors", "files", "layouts"):
            value[section][0]["novelty"] = "x"

    plan_file = bundle_copy / "plan.json"
    plan = json.loads(plan_file.read_bytes())
    plan["novelty"] = 1
    for module in plan["modules"]:
        module["novelty"] = 1
        if module["moe"]:
            module["moe"]["novelty"] = 1
    plan_file.write_bytes(manifest.canonical(plan))
    relist(bundle_copy, "plan.json")
    edit_manifest(bundle_copy, change)
    assert open_bundle(bundle_copy).manifest["format"]["minor"] == 7


def test_an_unknown_required_feature_is_refused(bundle_copy: Path) -> None:
    edit_manifest(bundle_copy, lambda m: m["required_features"].append("experts.codebook9"))
    assert refused(bundle_copy, "does not know: experts.codebook9").hint == "update ktc"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "no format version"),
        ('{"format": 1}', "no format version"),
        ('{"format": {"major": true}}', "no format version"),
        ('{"format": {"major": 1, "major": 1}}', "the same key twice"),
        ('{"format": {"major": NaN}}', "NaN is not JSON"),
        ('{"format": {"major": 1, "minor": 0}}', "is a required property"),
        ("[" * 100_000, "not valid JSON"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_a_manifest_that_is_no_manifest(bundle_copy: Path, text: str, match: str) -> None:
    (bundle_copy / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(bundle_copy, match)


def changes() -> list[tuple[str, object, str]]:
    def tensor(**fields: object) -> object:
        return lambda m: m["tensors"][0].update(fields)

    return [
        ("offset past the end", tensor(offset=1 << 40), "does not fit its file"),
        ("size of another shape", tensor(nbytes=64), "does not fit its file or its shape"),
        ("negative offset", tensor(offset=-1), "less than the minimum"),
        ("a file that holds no weights", tensor(file="plan.json"), "not a listed weight file"),
        ("an unlisted file", tensor(file="weights/none"), "not a listed weight file"),
        ("a tensor twice", lambda m: m["tensors"].append(m["tensors"][0]), "listed twice"),
        ("a file twice", lambda m: m["files"].append(m["files"][0]), "a file is listed twice"),
        ("a tensor missing", lambda m: m["tensors"].pop(0), "missing or not as planned|holds 0 in sequence"),
        ("a node too many", lambda m: m["topology"].update(nodes=2), "for 1 nodes, but the manifest says 2"),
        ("no node", lambda m: m["topology"].update(nodes=0), "less than the minimum"),
        ("hash of no length", lambda m: m["files"][0].update(sha256="00"), "does not match"),
        ("kernel without file", lambda m: m["kernels"].append(KERNEL), "kernel amx does not match its file"),
        ("kernel features with blanks", lambda m: m["kernels"].append({**KERNEL, "variant": "a b"}), "does not match"),
    ]


KERNEL = {
    "variant": "amx", "file": "plan.json", "abi": 1, "layout": 1, "required_features": [], "glibc_max": None,
    "src_sha256": "", "compiler": "", "flags": [], "sha256": "0" * 64,
}  # fmt: skip


@pytest.mark.parametrize(("change", "match"), [c[1:] for c in changes()], ids=[c[0] for c in changes()])
def test_a_manifest_that_contradicts_itself(bundle_copy: Path, change, match: str) -> None:
    edit_manifest(bundle_copy, change)
    refused(bundle_copy, match)


def moe_of(plan: dict) -> dict:
    return next(m["moe"] for m in plan["modules"] if m["moe"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda p: moe_of(p).update(hidden=0), "less than the minimum"),
        (lambda p: moe_of(p).update(hidden="64; system('x')"), "is not of type 'integer'"),
        (lambda p: moe_of(p).update(data_type="int4 */ evil /*"), "is not one of"),
        (lambda p: moe_of(p).update(activation="evil"), "is not one of"),
        (lambda p: moe_of(p).update(experts=9), "missing or not as planned|has 9 experts"),
        (lambda p: moe_of(p).update(splits=[[0, 32], [32, 64]]), "splits"),
        (lambda p: moe_of(p).update(splits=[[0, 128]]), "splits"),
        (lambda p: moe_of(p).update(splits=[[64, 64]]), "splits"),
        (lambda p: moe_of(p).update(top_k=99), "top_k"),
        (lambda p: p.update(nodes=3), "for 3 nodes"),
        (lambda p: p["modules"][0].update(name="a/../b"), "does not match"),
        (lambda p: p["modules"][0].update(device="cpu; rm"), "does not match"),
        (lambda p: p["modules"][0].pop("operator"), "required property"),
        (lambda p: p.pop("modules"), "required property"),
    ],
)
def test_a_plan_with_unchecked_values_never_reaches_code_generation(bundle_copy: Path, change, match: str) -> None:
    """Parameters in a bundle are foreign: even with a matching hash they are checked before use (failure M3 too)."""
    path = bundle_copy / "plan.json"
    plan = json.loads(path.read_bytes())
    change(plan)
    path.write_bytes(manifest.canonical(plan))
    relist(bundle_copy, "plan.json")
    refused(bundle_copy, match)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_any_flipped_bit_of_the_manifest_is_refused_or_harmless(bundle_copy: Path, where: int, bit: int) -> None:
    """Never another exception than BundleError; what still opens is as good as the original."""
    path = bundle_copy / "manifest.json"
    original = path.read_bytes()
    data = bytearray(original)
    data[where % len(data)] ^= 1 << bit
    try:
        path.write_bytes(data)
        try:
            bundle = open_bundle(bundle_copy)
        except BundleError:
            return
        assert bundle.manifest["format"]["major"] == 1
        assert {e["path"] for e in bundle.manifest["files"]} == set(bundle.files)
    finally:
        path.write_bytes(original)


def test_canonical_json_is_a_function_of_its_content() -> None:
    assert manifest.canonical({"b": 1, "a": ["ü", 1.5]}) == manifest.canonical({"a": ["ü", 1.5], "b": 1})
    assert manifest.canonical({"a": "ü"}) == '{"a":"ü"}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        manifest.canonical({"a": float("nan")})


def test_reading_an_unlisted_or_changed_small_file(bundle_copy: Path) -> None:
    bundle = open_bundle(bundle_copy)
    with pytest.raises(BundleError, match=r"no model/x\.json in this bundle"):
        bundle.read("model/x.json")
    (bundle_copy / "recipe.yaml").write_bytes(b"x" * bundle.files["recipe.yaml"]["size"])  # after it was opened
    with pytest.raises(BundleError, match="not those the manifest lists"):
        bundle.read("recipe.yaml")
