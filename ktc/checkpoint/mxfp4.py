"""MXFP4 experts as gpt-oss stores them: e2m1 nibbles with one e8m0 scale per 32 inputs, decoded exactly to fp32.

`X_blocks` U8 [E, out, in/32, 16] (low nibble = even element) and `X_scales` U8 [E, out, in/32]. The model's
parameter X is [E, in, out], so what `read` returns is the transposed view of the decoded matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktc.checkpoint.fp8 import decode_scales
from ktc.checkpoint.safetensors_file import RawTensor, read_array
from ktc.checkpoint.tensors import TensorData, TensorInfo
from ktc.errors import CheckpointError

BLOCK = 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
# Both elements of every byte, low nibble first, as one 8-byte item: one look-up a byte.
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=1).view(np.uint64).ravel()


def decode(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """fp32 [.., in] from blocks [.., in/32, 16] and scales [.., in/32]: e2m1 * 2^(scale - 127)."""
    values = np.take(_PAIRS, blocks).view(np.float32)
    values *= decode_scales(scales, "U8")[..., None]
    return values.reshape(*blocks.shape[:-2], -1)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A stack of E matrices; logical shape [E, in, out]."""

    blocks: RawTensor
    scales: RawTensor

    def info(self) -> TensorInfo:
        experts, rows, groups, _ = self.blocks.shape
        nbytes = self.blocks.nbytes + self.scales.nbytes
        return TensorInfo("mxfp4", (experts, groups * BLOCK, rows), self.blocks.file, nbytes)

    def parts(self) -> tuple[str, ...]:
        return (self.blocks.name, self.scales.name)

    def read(self, index: int | None = None) -> TensorData:
        """fp32 [in, out] of expert `index` (a transposed view), or [E, in, out]."""
        decoded = decode(read_array(self.blocks, index), read_array(self.scales, index))
        return TensorData(decoded.swapaxes(-1, -2), "fp32")


def build(blocks: RawTensor, raw: Mapping[str, RawTensor]) -> Mxfp4:
    """Find the scales of an MXFP4 tensor and check the shapes.

    Raises:
        CheckpointError: scales are missing, or shapes do not fit.
    """
    name = blocks.name.removesuffix("_blocks") + "_scales"
    where = f"{blocks.file}: MXFP4 tensor {blocks.name!r} {list(blocks.shape)}"
    scales = raw.get(name)
    if scales is None:
        raise CheckpointError(f"{where} has no {name} beside it")
    if len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK // 2:
        raise CheckpointError(f"{where} should be [E, out, in/32, 16]")
    if scales.dtype != "U8" or scales.shape != blocks.shape[:-1]:
        raise CheckpointError(
            f"{where}: its scales are {scales.dtype} {list(scales.shape)}, not U8 {list(blocks.shape[:-1])}"
        )
    return Mxfp4(blocks, scales)
