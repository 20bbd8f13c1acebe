"""Small hand-made safetensors files and checkpoints for the reader's tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def header_bytes(header: Mapping[str, Any] | bytes) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body


def write_raw(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A safetensors file from (dtype, shape, bytes) of each tensor."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    path.write_bytes(header_bytes(header) + b"".join(data for _, _, data in tensors.values()))
    return path


def f32(*values: float) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", (len(values),), np.array(values, dtype="<f4").tobytes()


def array(dtype: str, values: Any) -> tuple[str, tuple[int, ...], bytes]:
    values = np.ascontiguousarray(values)
    return dtype, values.shape, values.tobytes()


def bf16_bits(values: Any) -> np.ndarray:
    """Bits of values that bf16 holds exactly."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype("<u2")


def write_checkpoint(path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **(config or {})}))
    write_raw(path / "model.safetensors", tensors)
    return path
