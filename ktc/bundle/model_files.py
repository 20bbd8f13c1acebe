"""The parts of a checkpoint that travel with the bundle as they are: config, tokenizer, licences.

Nothing executable travels: no Python, and no `auto_map` that would name some. The quantisation section
of the config is dropped, because the bundle's weights are no longer what it describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ktc.checkpoint.safetensors_file import LFS_PREFIX
from ktc.errors import CheckpointError

DROPPED_KEYS = ("auto_map", "quantization_config", "compression_config")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
"""Any of them makes a tokenizer; tokenizer_config.json alone does not."""
_LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
GENERATED_CODE_NOTICE = """\
The C++ under kernels/src and the libraries under kernels/ are generated from, and contain, parts of ktc,
which is licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0
The weights and the files under model/ are under the licence of the model they were made from.
"""


def model_files(config: dict[str, Any], side_files: Iterable[Path]) -> dict[str, bytes]:
    """Path within the bundle -> content.

    Args:
        config: the checkpoint's config, aliases of `model_type` rewritten.
        side_files: the checkpoint's config, tokenizer, template and licence files.
    Raises:
        CheckpointError: a JSON file cannot be read.
    """
    out = {"LICENSES/ktc.txt": GENERATED_CODE_NOTICE.encode(), "model/config.json": _json(config)}
    for file in side_files:
        name = file.name
        if file.suffix == ".py" or name == "config.json" or name.endswith((".safetensors", ".index.json")):
            continue
        try:
            data = file.read_bytes()
            if data.startswith(LFS_PREFIX):
                raise CheckpointError(f"{file} is a Git LFS pointer", "run `git lfs pull` in the checkpoint's folder")
            if name.upper().startswith(_LICENCE_NAMES):
                out[f"LICENSES/{name}"] = data
            elif name in ("tokenizer_config.json", "generation_config.json"):
                out[f"model/{name}"] = _json(_object(data))
            else:
                if file.suffix == ".json":
                    _object(data)
                out[f"model/{name}"] = data
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is not what it should be: {error}", "fetch the file again") from error
    return out


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a JSON {type(value).__name__}, not an object")
    return value


def _json(value: dict[str, Any]) -> bytes:
    kept = {key: item for key, item in value.items() if key not in DROPPED_KEYS}
    return json.dumps(kept, indent=2, ensure_ascii=False).encode() + b"\n"


def licence_of(path: Path) -> str | None:
    """The licence a model card names in its front matter (`license: mit`), if there is one."""
    try:
        head = (path / "README.md").read_text("utf-8", "replace")[:4096]
    except OSError:
        return None
    found = re.search(r"\A---\n.*?^licen[sc]e:[ \t]*([\w.+-]+)[ \t]*$.*?^---$", head, re.MULTILINE | re.DOTALL)
    return found[1] if found else None
