"""compressed-tensors int4 ("pack-quantized", Kimi-K2-Thinking and later), decoded exactly to fp32.

`weight_packed` I32 [N, K/8] holds q + 8 in nibbles, element i in bits 4 * (i % 8) of word i / 8, so
that bytes hold the even column low and the odd column high. w = q * scale, one scale per `group` columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktc.checkpoint.fp8 import decode_scales, parse_block
from ktc.checkpoint.safetensors_file import RawTensor, read_array
from ktc.checkpoint.tensors import TensorData, TensorInfo
from ktc.errors import CheckpointError


@dataclass(frozen=True)
class Scheme:
    """Columns that share a scale; 0 = the whole row."""

    group: int


def _refuse(what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is quantised with compressed-tensors {what}, which ktc does not read",
        hint="of compressed-tensors, ktc reads symmetric int4 pack-quantized and e4m3 float-quantized weights",
    )


def parse_compressed_tensors(section: Mapping[str, Any]) -> tuple[Scheme | None, tuple[int, int] | None]:
    """`quantization_config` of compressed-tensors -> (int4 scheme, fp8 block); one of them or both may be None.

    Raises:
        CheckpointError: another format, width, type, strategy, an asymmetric scheme or an activation order.
    """
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refuse("without config_groups")
    int4: set[Scheme] = set()
    blocks: set[tuple[int, int] | None] = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _refuse("config_groups without weights")
        fmt = (group.get("format") if isinstance(group, Mapping) else None) or section.get("format")
        bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
        if fmt == "pack-quantized" and bits == 4 and kind == "int":
            if not weights.get("symmetric", True):
                raise _refuse("asymmetric int4 weights (symmetric: false)")
            if weights.get("actorder"):
                raise _refuse(f"activation ordering (actorder: {weights['actorder']!r})")
            if strategy == "channel":
                int4.add(Scheme(0))
            elif strategy == "group" and isinstance(weights.get("group_size"), int) and weights["group_size"] > 0:
                int4.add(Scheme(weights["group_size"]))
            else:
                raise _refuse(f"int4 strategy {strategy!r} with group_size {weights.get('group_size')!r}")
        elif fmt in ("float-quantized", "naive-quantized") and bits == 8 and kind == "float":
            if strategy == "block":
                blocks.add(parse_block(weights.get("block_structure")))
            elif strategy in ("channel", "tensor"):
                blocks.add(None)
            else:
                raise _refuse(f"fp8 strategy {strategy!r}")
        else:
            raise _refuse(f"format {fmt!r} with {bits}-bit {kind!r} weights")
    if len(int4) > 1 or len(blocks) > 1:
        raise _refuse("config_groups that differ from each other")
    return (int4.pop() if int4 else None), (blocks.pop() if blocks else None)


@dataclass(frozen=True, slots=True)
class Int4:
    """W [N, K] = q * scale[n, k / group]."""

    packed: RawTensor
    scale: RawTensor
    shape_tensor: RawTensor
    shape: tuple[int, int]
    group: int

    def info(self) -> TensorInfo:
        return TensorInfo("int4", self.shape, self.packed.file, self.packed.nbytes + self.scale.nbytes)

    def parts(self) -> tuple[str, ...]:
        return (self.packed.name, self.scale.name, self.shape_tensor.name)

    def read(self, index: int | None = None) -> TensorData:
        """fp32 [N, K]. A 4-bit integer times a bf16 scale is exact in fp32."""
        if index is not None:
            raise IndexError(f"{self.packed.name} is one matrix; it has no slice {index}")
        rows, columns = self.shape
        stated = tuple(int(v) for v in read_array(self.shape_tensor))
        if stated != self.shape:
            raise CheckpointError(
                f"{self.packed.file}: packed tensor {self.packed.name!r} holds [{rows}, {columns}] values, but"
                f" {self.shape_tensor.name!r} says {list(stated)}"
            )
        nibbles = read_array(self.packed).view(np.uint8)  # [N, K/2], little-endian words
        w = np.empty(self.shape, dtype=np.float32)
        w[:, 0::2] = nibbles & 15
        w[:, 1::2] = nibbles >> 4
        w -= 8.0
        scales = decode_scales(read_array(self.scale), self.scale.dtype)  # [N, groups]
        w.reshape(rows, -1, self.group)[...] *= scales[:, :, None]
        return TensorData(w, "fp32")


def build(packed: RawTensor, raw: Mapping[str, RawTensor], scheme: Scheme) -> Int4:
    """Find scales and shape of a packed weight and check them against each other.

    Raises:
        CheckpointError: a companion is missing, or the shapes contradict each other or the config.
    """
    stem = packed.name.removesuffix("_packed")
    where = f"{packed.file}: packed tensor {packed.name!r}"
    companions = [raw.get(stem + suffix) for suffix in ("_scale", "_shape")]
    if companions[0] is None or companions[1] is None:
        raise CheckpointError(f"{where} has no {stem}{'_shape' if companions[0] else '_scale'} beside it")
    scale, shape_tensor = companions[0], companions[1]
    if packed.dtype != "I32" or len(packed.shape) != 2:
        raise CheckpointError(f"{where} is {packed.dtype} {list(packed.shape)}; a packed weight is I32 [N, K/8]")
    if scale.dtype not in ("F32", "BF16", "F16"):
        raise CheckpointError(f"{where}: scales of data type {scale.dtype} are not supported")
    if shape_tensor.dtype not in ("I32", "I64") or shape_tensor.shape != (2,):
        raise CheckpointError(f"{where}: {shape_tensor.name!r} should be two integers")
    rows, columns = packed.shape[0], packed.shape[1] * 8  # weight_shape is checked against this on reading
    group = scheme.group or max(columns, 1)
    if columns < 1 or columns % group or scale.shape != (rows, columns // group):
        raise CheckpointError(
            f"{where} holds [{rows}, {columns}] values and has scales {list(scale.shape)}, which does not fit groups of"
            f" {group} columns",
            hint="the group size is taken from config.json; check quantization_config there",
        )
    return Int4(packed, scale, shape_tensor, (rows, columns), group)
