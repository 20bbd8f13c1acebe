"""Weights of a program straight from a Hugging Face model in memory: for tests and comparisons.

Nothing is packed: linears and experts run on the native operators over unpacked matrices. Imports torch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ktc.graph.build import Callback, WeightRef
from ktc.graph.ir import Node

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class ModelWeights:
    """Pointers into a model's parameters; holds what it converted."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tensors = {k: v.detach() for k, v in model.state_dict().items()}
        self._held: list[Any] = []

    def _ref(self, tensor: torch.Tensor) -> WeightRef:
        tensor = tensor.contiguous()
        self._held.append(tensor)
        rows = 1 if tensor.ndim < 2 else tensor.shape[0]
        return tensor.data_ptr(), _NAMES[tensor.dtype], rows, tensor.numel() // rows

    def matrix(self, name: str) -> WeightRef:
        return self._ref(self.tensors[name])

    def vector(self, name: str) -> WeightRef:
        return self._ref(self.tensors[name].float().flatten())

    def linear(self, node: Node) -> Any:
        raise AssertionError("a model in memory has no packed linears")

    def experts(self, module: str) -> Any:
        raise AssertionError("a model in memory has no packed experts")

    def callback(self, module: str) -> Callback:
        return module_callback(self.model.get_submodule(module))


def view(address: int, rows: int, cols: int) -> torch.Tensor:
    """f32 [rows, cols] over native memory."""
    raw = (ctypes.c_float * (rows * cols)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.float32).view(rows, cols)


def module_callback(module: Any) -> Callback:
    """Run a stateless module [1, T, H] -> [1, T, H] on a graph buffer."""

    def call(x: int, y: int, rows: int, cols: int, position: int) -> None:
        with torch.no_grad():
            out = module(view(x, rows, cols).unsqueeze(0))
            view(y, rows, cols).copy_((out[0] if isinstance(out, tuple) else out).reshape(rows, cols))

    return call
