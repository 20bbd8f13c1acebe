"""Where a checkpoint is: a local directory, a hub id, or a short name. Finds it; does not look inside files.

Only safetensors, JSON, tokenizer and licence files are ever fetched: no pickle, no Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ktc.checkpoint.hub_names import HUB_IDS
from ktc.errors import CheckpointError
from ktc.paths import did_you_mean, expand

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?$")
SIDE_PATTERNS = ("*.json", "tokenizer*", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja", "LICENSE*")
WEIGHT_PATTERNS = ("*.safetensors",)
_NEVER = ("*.py", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.gguf", "*.onnx", "original/*", "metal/*")


@dataclass(frozen=True)
class Source:
    """A checkpoint that is on this machine.

    Attributes:
        path: its directory (or, for planning only, a config.json file).
        repo: hub id, or None for a local path.
        revision: commit hash in the hub, or None.
    """

    path: Path
    repo: str | None = None
    revision: str | None = None


def resolve(checkpoint: str | Path, *, weights: bool = True) -> Source:
    """Find `checkpoint`, downloading it if it is a hub id (`org/name`, `org/name@revision`) or a short name.

    Args:
        weights: False fetches only configs and tokenizers (enough for `ktc plan`).
    Raises:
        CheckpointError: no such path, or the hub cannot be reached, has no such repository or refuses access.
    """
    name = str(checkpoint)
    path = expand(checkpoint)
    if name and path.exists():
        return Source(path)
    repo = HUB_IDS.get(name.lower(), name)
    if not _HUB_ID.match(repo) or name.endswith((".json", ".safetensors")):
        raise CheckpointError(
            f"{name!r} is neither an existing path nor a Hugging Face id",
            hint=f"{did_you_mean(name)}give a directory, an id such as org/name, or a short name:"
            f" {', '.join(sorted(HUB_IDS)[:4])}, ...",
        )
    repo, _, revision = repo.partition("@")
    return _download(name, repo, revision or None, weights)


def _download(name: str, repo: str, revision: str | None, weights: bool) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [*SIDE_PATTERNS, *(WEIGHT_PATTERNS if weights else ())]
    try:
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=list(_NEVER)))
    except GatedRepoError as error:
        raise CheckpointError(
            f"the hub does not let you read {repo}: its licence must be accepted first",
            hint=f"accept it on the page of {repo}, then run `hf auth login`",
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = f"no revision {revision!r} of {repo}" if isinstance(error, RevisionNotFoundError) else f"no model {repo}"
        raise CheckpointError(
            f"{name!r} does not exist as a path, and the hub has {what}",
            hint=f"{did_you_mean(name)}check the spelling",
        ) from error
    # LocalEntryNotFoundError: offline, and nothing cached. HTTPError: every fault of the connection, refused requests
    # included. OSError: a full disk. ValueError: a name that the hub's own rules exclude.
    except (LocalEntryNotFoundError, HTTPError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{name!r} does not exist as a path, and {repo} cannot be fetched from the Hugging Face hub:"
            f" {_first_line(error)}",
            hint=f"{did_you_mean(name)}without a network, download the model elsewhere and give its directory",
        ) from error
    return Source(path, repo, path.name if path.parent.name == "snapshots" else revision)


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.removeprefix("Got: ")  # how the hub client begins what the connection said
