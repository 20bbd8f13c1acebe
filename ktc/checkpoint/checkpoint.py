"""A checkpoint on disk: its config, its files, and its tensors by name, read lazily one at a time.

Opening reads headers only, checks every file, and refuses a damaged checkpoint before any work is
done. What the tensors mean to a model is for `experts.py` and `audit.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ktc.checkpoint.codecs import Codec, Quantization, group_tensors, parse_quantization
from ktc.checkpoint.safetensors_file import LFS_PREFIX, RawTensor, read_header
from ktc.checkpoint.source import Source, resolve
from ktc.checkpoint.tensors import TensorData, TensorInfo
from ktc.errors import CheckpointError
from ktc.models.registry import family_for, rewrite_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SIDE_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError names the file and the line of a fault."""
    try:
        data = path.read_bytes()
        if data.startswith(LFS_PREFIX):
            raise CheckpointError(f"{path} is a Git LFS pointer", hint="run `git lfs pull` in the checkpoint's folder")
        value = json.loads(data, parse_constant=_no_constant)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def read_config(checkpoint: str | Path) -> dict[str, Any]:
    """config.json of a directory, hub id, short name or config file; aliases rewritten. Reads no weights."""
    return _config_of(resolve(checkpoint, weights=False).path)


def _config_of(path: Path) -> dict[str, Any]:
    file = path if path.is_file() else path / "config.json"
    try:
        found = file.is_file()
        if path.is_dir():
            next(path.iterdir(), None)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not found:
        if (path / "manifest.json").is_file() and (path / "plan.json").is_file():
            raise CheckpointError(f"{path} is a bundle, not a checkpoint", hint=f"run it: ktc run {path}")
        raise CheckpointError(f"{path} has no config.json", hint="give the directory of a Hugging Face checkpoint")
    return rewrite_config(read_json(file))


class Checkpoint:
    """An open checkpoint. Holds no file open and caches no weights; safe to use from several threads.

    Attributes:
        path: the directory.
        config: raw config.json, `model_type` aliases rewritten.
        source: path, hub id and revision.
        files: the safetensors files, sorted.
        side_files: config, tokenizer, chat template and licence files (never Python).
        raw: tensors as they lie on disk, by name.
    """

    def __init__(self, source: Source, config: dict[str, Any], raw: dict[str, RawTensor], files: list[Path]) -> None:
        self.source = source
        self.path = source.path
        self.config = config
        self.raw = raw
        self.files = files
        self.quantization: Quantization = parse_quantization(config)
        self._codecs: dict[str, Codec] = group_tensors(raw, self.quantization)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def side_files(self) -> list[Path]:
        licences = (p for p in self.path.iterdir() if p.name.upper().startswith(("LICENSE", "LICENCE")))
        named = (self.path / name for name in _SIDE_NAMES)
        return sorted({p for p in (*named, *licences) if p.is_file() and p.suffix != ".py"})

    def names(self) -> list[str]:
        """Logical tensor names (`X.weight` for an FP8 or packed weight and its scales), in file order."""
        return list(self._codecs)

    def __contains__(self, name: str) -> bool:
        return name in self._codecs

    def _codec(self, name: str) -> Codec:
        codec = self._codecs.get(name)
        if codec is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return codec

    def info(self, name: str) -> TensorInfo:
        """Data type, logical shape and file of a tensor; reads nothing."""
        return self._codec(name).info()

    def parts(self, name: str) -> tuple[str, ...]:
        """Names on disk that make up a logical tensor."""
        return self._codec(name).parts()

    def read(self, name: str, index: int | None = None) -> TensorData:
        """Decode one tensor, or slice `index` of its first axis. FP8, int4 and MXFP4 come as exact fp32.

        Raises:
            CheckpointError: no such tensor, a data type that is no weight type, or a file that changed.
        """
        return self._codec(name).read(index)


def open_checkpoint(checkpoint: str | Path) -> Checkpoint:
    """Open a local directory, hub id or short name; every file is checked before this returns.

    Raises:
        CheckpointError: anything missing, damaged, not safetensors, or in an encoding that ktc does not read.
        UnsupportedModelError: a hub id of a model that ktc does not support (its weights are not fetched).
    """
    source = resolve(checkpoint, weights=False)
    path = source.path
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory", hint="give the directory of a Hugging Face checkpoint")
    config = _config_of(path)
    _refuse_modelopt(path)
    if source.repo is not None:
        # Whatever the config alone rules out is refused before hundreds of gigabytes are fetched.
        family_for(config)
        parse_quantization(config)
        source = resolve(f"{source.repo}@{source.revision}" if source.revision else source.repo)
        path = source.path
    index = path / INDEX
    if (path / SINGLE).exists():
        files, weight_map = [path / SINGLE], None
    elif index.exists():
        weight_map = _weight_map(index)
        files = sorted({path / file for file in weight_map.values()})
        for file in files:
            if not file.exists():
                missing = next(n for n, f in weight_map.items() if f == file.name)
                raise CheckpointError(
                    f"{file} is missing: {INDEX} says that it holds {missing!r} and"
                    f" {sum(f == file.name for f in weight_map.values()) - 1} more tensors",
                    hint="the download is incomplete; fetch this file",
                )
    else:
        files, weight_map = [_only_file(path)], None
    raw = _merge(files)
    if weight_map is not None:
        _check_index(index, weight_map, raw)
    return Checkpoint(source, config, raw, files)


def _refuse_modelopt(path: Path) -> None:
    file = path / "hf_quant_config.json"
    if file.is_file():
        section = read_json(file).get("quantization")
        algorithm = section.get("quant_algo") if isinstance(section, dict) else None
        raise CheckpointError(
            f"{file}: the checkpoint is quantised by modelopt ({algorithm}), which ktc does not read",
            hint="use the BF16, FP8, int4 (compressed-tensors) or MXFP4 release of this model",
        )


def _only_file(path: Path) -> Path:
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1 and "-of-" not in found[0].name:
        return found[0]
    if found:
        raise CheckpointError(
            f"{path} has {len(found)} safetensors files ({found[0].name}, ...) but no {INDEX}",
            hint="fetch the index file of the checkpoint",
        )
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if pickles:
        raise CheckpointError(
            f"{path} has no safetensors files, only {pickles[0]}",
            hint="ktc never opens pickle files; convert the model with save_pretrained(..., safe_serialization=True)",
        )
    raise CheckpointError(f"{path} has no safetensors files", hint=f"expected {SINGLE} or {INDEX}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map", hint="fetch the index file of the checkpoint again")
    for name, file in weight_map.items():
        # A file name is a plain name in this directory: an index must not make us read anything else.
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise CheckpointError(
                f"{index}: tensor {name!r} is said to be in {file!r}, which is not the name of a safetensors file"
                " in the same directory"
            )
    return weight_map


def _merge(files: Iterable[Path]) -> dict[str, RawTensor]:
    out: dict[str, RawTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in out:
                raise CheckpointError(f"tensor {name!r} is in two files: {out[name].file} and {file}")
            out[name] = tensor
    return out


def _check_index(index: Path, weight_map: dict[str, str], raw: dict[str, RawTensor]) -> None:
    for name, file in weight_map.items():
        tensor = raw.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{index}: tensor {name!r} is said to be in {file}, which does not hold it",
                hint="index and shards do not belong together; fetch both again",
            )
        if tensor.file.name != file:
            raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file} but is in {tensor.file.name}")
