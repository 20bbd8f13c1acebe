"""Finding a checkpoint: path, hub id or short name; only harmless files are ever asked for."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from ktc.checkpoint import open_checkpoint, read_config
from ktc.checkpoint.hub_names import HUB_IDS
from ktc.checkpoint.source import resolve
from ktc.errors import CheckpointError, KtcError
from tests.checkpoint.files import f32, write_checkpoint


def without_response(kind: type[Exception]) -> Exception:
    """The error as the hub client raises it, less the HTTP response that its constructor wants."""
    return kind.__new__(kind)


def test_short_names_are_hub_ids() -> None:
    assert all(name == name.lower() and repo.count("/") == 1 for name, repo in HUB_IDS.items())
    assert HUB_IDS["deepseek-v3"] == "deepseek-ai/DeepSeek-V3"
    assert len(set(HUB_IDS.values())) == len(HUB_IDS)


@pytest.mark.parametrize("name", ["no-such-model", "./missing", "/missing/dir", "a/b/c", "org/config.json", "", "org/"])
def test_neither_path_nor_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is neither an existing path nor a Hugging Face id") as caught:
        open_checkpoint(name)
    assert "short name" in str(caught.value)


@pytest.mark.parametrize("network", [True, False])
def test_a_mistyped_path_that_looks_like_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts" / "demo").mkdir(parents=True)

    def download(repo: str, **options: Any) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

        if network:
            raise without_response(RepositoryNotFoundError)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"'artifacts/dmo' does not exist as a path, and .* hub") as caught:
        resolve("artifacts/dmo")
    assert caught.value.hint is not None and caught.value.hint.startswith("did you mean artifacts/demo? ")


def test_offline_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match="deepseek-ai/DeepSeek-V3 cannot be fetched from the Hugging Face hub"
    ) as caught:
        read_config("DeepSeek-V3")
    assert "give its directory" in str(caught.value)


@pytest.mark.parametrize("weights", [True, False])
def test_only_harmless_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    snapshot = tmp_path / "snapshots" / "0123abc"
    write_checkpoint(snapshot, {"a": f32(1)})
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = resolve("openai/gpt-oss-20b@main", weights=weights)
    assert (source.repo, source.revision, source.path) == ("openai/gpt-oss-20b", "0123abc", snapshot)
    assert asked["repo"] == "openai/gpt-oss-20b" and asked["revision"] == "main"

    def fetched(file: str) -> bool:
        return any(fnmatch(file, p) for p in asked["allow_patterns"]) and not any(
            fnmatch(file, p) for p in asked["ignore_patterns"]
        )

    assert all(map(fetched, ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE")))
    assert fetched("model-00001-of-00002.safetensors") == weights
    never = ("pytorch_model.bin", "modeling.py", "tokenization.py", "tokenizer.py", "a.pt", "original/x.safetensors")
    assert not any(map(fetched, never))


def test_hub_errors_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError

    for error, message in (
        (without_response(RepositoryNotFoundError), "the hub has no model org/name"),
        (without_response(GatedRepoError), "its licence must be accepted first"),
        (HTTPError("refused"), "org/name cannot be fetched from the Hugging Face hub: refused"),
        (OSError("No space left on device"), "org/name cannot be fetched.*No space left"),
    ):

        def download(*_: Any, error: Exception = error, **__: Any) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(CheckpointError, match=message):
            resolve("org/name")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "'llama' is a dense model"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq', which ktc does not read"),
    ],
)
def test_hopeless_models_are_refused_before_their_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], message: str
) -> None:
    snapshot = write_checkpoint(tmp_path / "snapshots" / "0123abc", {"a": f32(1)}, config)
    asked: list[str] = []

    def download(_: str, *, allow_patterns: list[str], **__: Any) -> str:
        asked.extend(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(KtcError, match=message):
        open_checkpoint("org/name")
    assert asked and "*.safetensors" not in asked


def test_weights_are_fetched_at_the_revision_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = write_checkpoint(tmp_path / "snapshots" / "0123abc", {"a": f32(1)})
    asked: list[tuple[str | None, bool]] = []

    def download(_: str, *, revision: str | None, allow_patterns: list[str], **__: Any) -> str:
        asked.append((revision, "*.safetensors" in allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    checkpoint = open_checkpoint("org/name")
    assert asked == [(None, False), ("0123abc", True)]
    assert (checkpoint.source.repo, checkpoint.source.revision) == ("org/name", "0123abc")
