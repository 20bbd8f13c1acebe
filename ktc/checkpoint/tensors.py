"""What a reader hands out: a tensor's description and its decoded data. No files, no decoding here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

Format = Literal["plain", "fp8", "int4", "mxfp4"]
Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A logical tensor: what the model calls a weight, however many tensors on disk hold it.

    Attributes:
        dtype: element type on disk: "fp32", "bf16", "fp16", "fp8", "int4", "mxfp4", or, for plain tensors that
            are not weights, the safetensors name (I64, U8, ...).
        shape: logical shape, after decoding.
        file: the file that holds the elements (scales may be elsewhere).
        nbytes: bytes on disk, scales included.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorData:
    """Decoded elements: float32, float16, or bf16 as its bits in uint16. May be a strided view."""

    array: NDArray[Any]
    dtype: Dtype
