"""Which encoding a tensor on disk has: groups disk tensors into logical ones and picks the codec of each.

`X.weight` + `X.weight_scale_inv` is one FP8 weight, `X.weight_packed` + scales one int4 weight,
`X_blocks` + `X_scales` one MXFP4 weight; everything else is plain. Decoding itself is in
`fp8.py`, `int4.py` and `mxfp4.py`; quantisation methods that have no codec are refused here by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ktc.checkpoint import fp8, int4, mxfp4
from ktc.checkpoint.safetensors_file import RawTensor, read_array
from ktc.checkpoint.tensors import Dtype, TensorData, TensorInfo
from ktc.errors import CheckpointError

_PLAIN: dict[str, Dtype] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_SUPPORTED = "ktc reads BF16, F16, F32, FP8 (F8_E4M3) blocks, compressed-tensors int4 (pack-quantized) and MXFP4"


class Codec(Protocol):
    """Decodes one logical tensor."""

    def info(self) -> TensorInfo: ...

    def read(self, index: int | None = None) -> TensorData:
        """The tensor, or slice `index` of its first axis."""
        ...

    def parts(self) -> tuple[str, ...]:
        """Names of the tensors on disk that it is made of."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor stored in the data type it is used in."""

    raw: RawTensor

    def info(self) -> TensorInfo:
        return TensorInfo(_PLAIN.get(self.raw.dtype, self.raw.dtype), self.raw.shape, self.raw.file, self.raw.nbytes)

    def read(self, index: int | None = None) -> TensorData:
        if self.raw.dtype not in _PLAIN:
            raise CheckpointError(
                f"{self.raw.file}: tensor {self.raw.name!r} has data type {self.raw.dtype}, which is not a weight type"
                " that ktc reads",
                hint=_SUPPORTED,
            )
        return TensorData(read_array(self.raw, index), _PLAIN[self.raw.dtype])

    def parts(self) -> tuple[str, ...]:
        return (self.raw.name,)


@dataclass(frozen=True)
class Quantization:
    """The checkpoint's `quantization_config`, as far as it decides how bytes are read."""

    method: str = "none"  # "none", "fp8", "compressed-tensors", "mxfp4"
    block: tuple[int, int] | None = None  # fp8: rows, columns that share a scale
    int4: int4.Scheme | None = None


def _refuse(what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint is quantised with {what}, which ktc does not read", hint=_SUPPORTED)


def parse_quantization(config: Mapping[str, Any]) -> Quantization:
    """Read `quantization_config` of a config.json.

    Raises:
        CheckpointError: a method, format or parameter that ktc has no decoder for; it is named.
    """
    section = config.get("quantization_config") or config.get("compression_config")
    if section is None:
        return Quantization()
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: quantization_config is {section!r}, not an object")
    method = section.get("quant_method")
    if method == "fp8":
        fmt = str(section.get("fmt", "e4m3"))
        if "e4m3" not in fmt:
            raise _refuse(f"fp8 format {fmt!r}")
        return Quantization("fp8", block=fp8.parse_block(section.get("weight_block_size")))
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method == "compressed-tensors":
        scheme, block = int4.parse_compressed_tensors(section)
        return Quantization("compressed-tensors", block=block, int4=scheme)
    raise _refuse(f"quant_method {method!r}")


# Tensors that only encodings without a decoder have.
_FOREIGN: tuple[tuple[str, str], ...] = (
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".g_idx", "GPTQ"),
    (".weight_scale_2", "NVFP4"),
    (".weight_global_scale", "NVFP4"),
    (".weight_zero_point", "asymmetric compressed-tensors (weight_zero_point)"),
    (".weight_g_idx", "compressed-tensors with activation ordering (weight_g_idx)"),
    (".absmax", "bitsandbytes"),
)


def group_tensors(raw: Mapping[str, RawTensor], quant: Quantization) -> dict[str, Codec]:
    """Disk tensors -> logical tensors by name, in disk order. Shapes of companions are checked.

    Raises:
        CheckpointError: tensors of an encoding that ktc does not read, or companions missing or misshapen.
    """
    for name, tensor in raw.items():
        for suffix, what in _FOREIGN:
            if name.endswith(suffix):
                error = _refuse(what)
                raise CheckpointError(f"{tensor.file}: tensor {name!r}: {error.message}", hint=error.hint)
    mains: dict[str, tuple[str, Codec]] = {}
    taken: set[str] = set()
    for tensor in raw.values():
        built = _build_fp8(tensor, raw, quant) or _build_int4(tensor, raw, quant) or _build_mxfp4(tensor, raw, quant)
        if built is not None:
            mains[tensor.name] = built
            taken.update(built[1].parts())
    out: dict[str, Codec] = {}
    for name, tensor in raw.items():
        if name in taken and name not in mains:
            continue
        logical, codec = mains.get(name) or (name, Plain(tensor))
        if logical in out:
            raise CheckpointError(f"{tensor.file}: tensor {logical!r} is stored twice, in two encodings")
        out[logical] = codec
    return out


def _build_fp8(tensor: RawTensor, raw: Mapping[str, RawTensor], quant: Quantization) -> tuple[str, Codec] | None:
    if not tensor.dtype.startswith("F8_E") or tensor.dtype == "F8_E8M0":
        return None
    if tensor.dtype != "F8_E4M3":
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has data type {tensor.dtype}; of FP8, ktc reads F8_E4M3 only",
            hint=_SUPPORTED,
        )
    return tensor.name, fp8.build(tensor, raw, quant.block)


def _build_int4(tensor: RawTensor, raw: Mapping[str, RawTensor], quant: Quantization) -> tuple[str, Codec] | None:
    if not tensor.name.endswith(".weight_packed"):
        return None
    if quant.int4 is None:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is packed, but config.json describes no packed int4 weights",
            hint="config.json's quantization_config does not belong to these files",
        )
    return tensor.name.removesuffix("_packed"), int4.build(tensor, raw, quant.int4)


def _build_mxfp4(tensor: RawTensor, raw: Mapping[str, RawTensor], quant: Quantization) -> tuple[str, Codec] | None:
    if not tensor.name.endswith("_blocks") or tensor.dtype != "U8":
        return None
    if quant.method != "mxfp4":
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} looks like MXFP4, but config.json does not say quant_method mxfp4",
            hint="config.json's quantization_config does not belong to these files",
        )
    return tensor.name.removesuffix("_blocks"), mxfp4.build(tensor, raw)
