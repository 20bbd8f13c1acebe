"""Weights of a program straight from a Hugging Face model in memory: for tests and comparisons.

Nothing is packed: linears and experts run on the native operators over unpacked matrices. Imports torch.
"""

from __future__ import annotations

from typing import Any

import torch

from ktc.graph.build import Callback, WeightRef
from ktc.graph.callbacks import ModuleCallbacks
from ktc.graph.ir import Node

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class ModelWeights:
    """Pointers into a model's parameters; holds what it converted."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tensors = {k: v.detach() for k, v in model.state_dict().items()}
        self._held: list[Any] = []
        self.callbacks = ModuleCallbacks(model, int(model.config.max_position_embeddings))

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

    def callback(self, node: Node) -> Callback:
        return self.callbacks.make(node)
