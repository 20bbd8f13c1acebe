"""FP8 weights: e4m3 elements times a scale per block, per row or per tensor, decoded exactly to fp32.

The block size comes from the config and is never derived from shapes: DeepSeek's kv_a_proj has 576
rows in blocks of 128, so its fifth scale row covers 64 rows. Despite its name, `weight_scale_inv` is
multiplied. Each element is one fp32 product, so decoding rounds once and identically everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.checkpoint.safetensors_file import RawTensor, read_array
from ktc.checkpoint.tensors import TensorData, TensorInfo
from ktc.errors import CheckpointError

F32 = NDArray[np.float32]


def _e4m3_table() -> F32:
    """All 256 values of e4m3fn: bias 7, no infinity, 0x7f and 0xff are NaN."""
    code = np.arange(256, dtype=np.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa.astype(np.float64), -9), np.ldexp(8.0 + mantissa, exponent - 10)
    )
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    table: F32 = np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)
    return table


E4M3: F32 = _e4m3_table()
E8M0: F32 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)
_BAND = 32  # rows decoded at once: they stay in cache between the look-up and the product


def decode_scales(bits: NDArray[Any], dtype: str) -> F32:
    """Scales to fp32: F32 and F16 as they are, BF16 from its bits, U8 and F8_E8M0 as 2^(b - 127) (255 = NaN)."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("U8", "F8_E8M0"):
        return np.take(E8M0, bits)
    return np.asarray(bits, dtype=np.float32)


def parse_block(value: object) -> tuple[int, int] | None:
    """`weight_block_size` of a config: two positive integers, or None (one scale per row or tensor)."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise CheckpointError(f"config.json: weight_block_size is {value!r}; it should be two positive integers")
    return int(value[0]), int(value[1])


@dataclass(frozen=True, slots=True)
class Fp8:
    """W [.., N, K] = e4m3 * scale. `block` is (N, K) for one scale per tensor and (1, K) for one per row."""

    weight: RawTensor
    scale: RawTensor
    block: tuple[int, int]

    def info(self) -> TensorInfo:
        return TensorInfo("fp8", self.weight.shape, self.weight.file, self.weight.nbytes + self.scale.nbytes)

    def parts(self) -> tuple[str, ...]:
        return (self.weight.name, self.scale.name)

    def read(self, index: int | None = None) -> TensorData:
        """fp32 [.., N, K]; for a stack of experts, `index` reads one."""
        if index is not None and len(self.weight.shape) != 3:
            raise IndexError(f"{self.weight.name} is one matrix; it has no slice {index}")
        codes = read_array(self.weight, index)
        rows, columns = codes.shape[-2:]
        grid = math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1])
        scales = decode_scales(read_array(self.scale, index), self.scale.dtype).reshape(*codes.shape[:-2], *grid)
        if codes.ndim == 2:
            return TensorData(decode(codes, scales, self.block), "fp32")
        return TensorData(np.stack([decode(c, s, self.block) for c, s in zip(codes, scales, strict=True)]), "fp32")


def decode(codes: NDArray[np.uint8], scales: F32, block: tuple[int, int]) -> F32:
    """fp32 [N, K] from e4m3 codes [N, K] and scales [ceil(N/rows), ceil(K/columns)], a cache-sized band at a time."""
    rows, columns = codes.shape
    out = np.empty((rows, columns), dtype=np.float32)
    spread = np.repeat(scales, block[1], axis=1)[:, :columns]  # [block rows, K]; cuts a partial last block
    for begin in range(0, rows, _BAND):
        band = out[begin : begin + _BAND]
        np.take(E4M3, codes[begin : begin + _BAND], out=band, mode="clip")
        owner = np.arange(begin, begin + band.shape[0]) // block[0]  # block row of each row
        band *= spread[owner[0]] if owner[0] == owner[-1] else spread[owner]
    return out


def build(weight: RawTensor, raw: Mapping[str, RawTensor], block: tuple[int, int] | None) -> Fp8:
    """Find the scales of an FP8 weight and check their shape.

    Raises:
        CheckpointError: no scales, or scales whose shape does not follow from the config.
    """
    # `X.weight` goes with X.weight_scale_inv or X.weight_scale, a fused `X` with X_scale_inv or X_scale.
    scale = next((raw[n] for s in ("_scale_inv", "_scale") if (n := weight.name + s) in raw), None)
    where = f"{weight.file}: FP8 tensor {weight.name!r} {list(weight.shape)}"
    if scale is None:
        raise CheckpointError(f"{where} has no {weight.name}_scale_inv or {weight.name}_scale beside it")
    if scale.dtype not in ("F32", "BF16", "F16", "U8", "F8_E8M0"):
        raise CheckpointError(f"{where}: scales of data type {scale.dtype} are not supported")
    if len(weight.shape) not in (2, 3):
        raise CheckpointError(f"{where} is neither a matrix nor a stack of matrices")
    rows, columns = weight.shape[-2:]
    lead = weight.shape[:-2]
    accepted: dict[tuple[int, ...], tuple[int, int]] = {}
    if block is not None:
        accepted[(*lead, math.ceil(rows / block[0]), math.ceil(columns / block[1]))] = block
    elif not lead:
        accepted = {(): (rows, columns), (1,): (rows, columns), (rows,): (1, columns), (rows, 1): (1, columns)}
    else:
        accepted = {(*lead, rows, 1): (1, columns), (*lead, rows): (1, columns)}
    if scale.shape not in accepted:
        expected = " or ".join(str(list(s)) for s in accepted)
        source = f"weight_block_size {list(block)}" if block else "a config without weight_block_size"
        raise CheckpointError(
            f"{where}: its scales {scale.name!r} are {list(scale.shape)}, but {source} asks for {expected}",
            hint="the block size is taken from config.json and never guessed; check quantization_config there",
        )
    return Fp8(weight, scale, accepted[scale.shape])
