"""`LaneLinear`: a dense linear that the recipe quantised, on the device.

int4 runs on PyTorch's own weight-only kernel (tinygemm, `_weight_int4pack_mm`): it is part of torch, needs no package
beside it, takes groups of 32, 64 and 128, and never synchronises, so a CUDA graph may hold it. It computes in bf16;
activations are not quantised. Everything else (other types, and shapes that it does not take) is dequantised once and
multiplied as a plain matrix. The stored integers are kept as they are; scales are rounded to the computing type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ktc.layout import MatrixLayout
from ktc.plan.ir import LinearPlan

TINYGEMM_GROUPS = (32, 64, 128)


class PackedParts:
    """The stored tensors of a packed linear, as numpy arrays (U8 tiles, F32 scales, U8 multipliers, F32 bias)."""

    def __init__(self, plan: LinearPlan, arrays: dict[str, NDArray[Any]]) -> None:
        self.plan, self.layout = plan, plan.layout
        self.tiles, self.scale = arrays["tiles"], arrays.get("scale")
        self.mult, self.bias = arrays.get("mult"), arrays.get("bias")

    def dense(self) -> Tensor:
        """W f32 [n, k], dequantised."""
        return self._unpacked()[: self.plan.n, : self.plan.k]

    def _unpacked(self) -> Tensor:
        from ktc import _runtime

        layout, scheme = self.layout, self.layout.scheme
        out = np.empty((layout.n_pad, layout.k_pad), np.float32)
        tiles = _aligned(self.tiles)
        scale = None if self.scale is None else np.ascontiguousarray(self.scale).view(np.float32)
        mult = None if self.mult is None else np.ascontiguousarray(self.mult)
        _runtime.unpack_matrix(
            tiles.ctypes.data,
            0 if scale is None else scale.ctypes.data,
            0 if mult is None else mult.ctypes.data,
            layout.n_pad,
            layout.k_pad,
            scheme.data_type,
            scheme.scale,
            scheme.group,
            out.ctypes.data,
        )
        return torch.from_numpy(out)

    def group_scales(self) -> Tensor:
        """f32 [n_pad, groups]: what each group's integers are multiplied by. Schemes with groups only."""
        layout = self.layout
        assert self.scale is not None and layout.scheme.group
        groups = layout.k_pad // layout.scheme.group
        scale = torch.from_numpy(np.array(self.scale).view(np.float32))
        if layout.scheme.scale == "group":
            return _rows(scale, groups)
        assert self.mult is not None
        return scale[:, None] * _rows(torch.from_numpy(np.array(self.mult)).float(), groups)

    def integers(self) -> Tensor:
        """q i32 [n_pad, k_pad]: the dequantised weight divided by its scale is within an ulp of an integer."""
        scale = self.group_scales().repeat_interleave(self.layout.scheme.group, 1)
        return torch.where(scale != 0, torch.round(self._unpacked() / scale), 0.0).to(torch.int32)


def _aligned(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes at a 64-byte boundary."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if flat.ctypes.data % 64 == 0:
        return flat
    room = np.empty(flat.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + flat.size] = flat
    return room[start : start + flat.size]


def _rows(blocks: Tensor, groups: int) -> Tensor:
    """[n_pad / 32][groups][32] -> [n_pad, groups]."""
    return blocks.view(-1, groups, 32).transpose(1, 2).reshape(-1, groups)


def takes_int4(layout: MatrixLayout, dtype: torch.dtype) -> bool:
    """Whether the int4 kernel takes this linear as it is stored."""
    scheme = layout.scheme
    return (
        scheme.data_type == "int4"
        and scheme.scale in ("integer", "group")
        and scheme.group in TINYGEMM_GROUPS
        and layout.k == layout.k_pad
        and layout.k % scheme.group == 0
        and dtype == torch.bfloat16
    )


class LaneLinear(nn.Module):
    """y [..., n] = x [..., k] W^T + b in the type of x.

    Attributes:
        kernel: "int4" (tinygemm) or the name of the type it was dequantised to; set by `load`.
    """

    weight: Tensor | None
    packed: Tensor | None
    scales: Tensor | None
    bias: Tensor | None

    def __init__(self, plan: LinearPlan) -> None:
        super().__init__()
        self.plan = plan
        self.in_features, self.out_features = plan.k, plan.n
        self.kernel = ""
        for name in ("weight", "packed", "scales", "bias"):
            self.register_buffer(name, None, persistent=False)

    def load(self, parts: PackedParts, device: Any, dtype: torch.dtype) -> None:
        """Move the weights to the device in the form that the kernel reads."""
        if parts.bias is not None:
            bias = torch.from_numpy(np.array(parts.bias).view(np.float32))
            self.bias = bias[: self.plan.n].to(device, dtype)
        if takes_int4(parts.layout, dtype):
            self.packed, self.scales = pack_int4(parts.integers(), parts.group_scales(), device)
            self.kernel = "int4"
        else:
            self.weight = parts.dense().to(device, dtype)
            self.kernel = str(dtype).removeprefix("torch.")

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return functional.linear(x, self.weight, self.bias)
        assert self.packed is not None and self.scales is not None
        rows = x.reshape(-1, self.in_features).to(self.scales.dtype).contiguous()
        out = multiply_int4(rows, self.packed, self.scales, self.plan.group)[:, : self.out_features]
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.plan.scheme}, {self.kernel}"


def pack_int4(q: Tensor, scale: Tensor, device: Any) -> tuple[Tensor, Tensor]:
    """tinygemm's form of W = scale * q.

    Args:
        q: i32 [n, k] in [-8, 7], n a multiple of 32; scale: f32 [n, groups].
    Returns:
        (packed weight, scales and zeros bf16 [groups, n, 2]) on the device.
    """
    unsigned = (q + 8).to(device)
    k_tiles = next(tiles for tiles in (8, 4, 2) if q.shape[1] % (16 * tiles) == 0)
    if unsigned.device.type == "cuda":
        pairs = (unsigned[:, ::2] << 4 | unsigned[:, 1::2]).to(torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), k_tiles)
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned.contiguous(), k_tiles)
    both = torch.stack((scale.T, torch.zeros_like(scale.T)), dim=-1)  # w = (u - 8) * scale + zero
    return packed, both.to(device, torch.bfloat16).contiguous()


def multiply_int4(x: Tensor, packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """x bf16 [M, k] -> bf16 [M, n]."""
    if x.device.type == "cuda":
        out: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, group, scales)
    else:
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)
    return out
