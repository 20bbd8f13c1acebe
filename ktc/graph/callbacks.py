"""Hugging Face's modules as nodes of a program: what a callback runs on the executor's buffers. Imports torch.

An MLP is a function of its rows. An attention also gets what the model around it would have handed it: position
embeddings from the model's own rotary embedding, a causal mask, and a cache whose rows are positions, so that a
step at an earlier position overwrites what was newer. Where the modules come from is the caller's business
(ktc/native/modules.py, oracle.py).
"""

from __future__ import annotations

import ctypes
import inspect
from typing import Any

import numpy as np
import torch

from ktc.errors import KtcError
from ktc.graph.build import Callback
from ktc.graph.ir import Node


def view(address: int, rows: int, cols: int) -> torch.Tensor:
    """f32 [rows, cols] over native memory."""
    raw = (ctypes.c_float * (rows * cols)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.float32).view(rows, cols)


class PositionCache:
    """The part of Hugging Face's cache interface that attention modules use, for one sequence.

    Args:
        context: positions; their memory is taken when they are first written.
    Attributes:
        position: where the next `update` writes.
    """

    def __init__(self, context: int) -> None:
        self.context = context
        self.position = 0
        self._stored: dict[tuple[int, str], torch.Tensor] = {}

    def _append(self, key: tuple[int, str], new: torch.Tensor) -> torch.Tensor:
        """new [..., T, D] at `position`; all [..., position + T, D]."""
        if key not in self._stored:
            shape = (*new.shape[:-2], self.context, new.shape[-1])
            self._stored[key] = torch.from_numpy(np.zeros(shape, np.float32))  # zeroed on first touch
        end = self.position + new.shape[-2]
        stored = self._stored[key]
        stored[..., self.position : end, :] = new
        return stored[..., :end, :]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (or latent and rotated key) [1, A, T, D] -> those of every position so far."""
        return self._append((layer_idx, "keys"), key_states), self._append((layer_idx, "values"), value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Keys of a sparse attention's indexer [1, T, D] -> those of every position so far."""
        return self._append((layer_idx, "indexer"), indexer_key_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.position


def causal_mask(rows: int, position: int, window: int) -> torch.Tensor:
    """Added to scores: f32 [1, 1, rows, position + rows]; `window`: keys that a token sees, 0 = all."""
    query = torch.arange(position, position + rows)[:, None]
    key = torch.arange(position + rows)[None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]


class ModuleCallbacks:
    """Callbacks into the modules of one Hugging Face model (or of what is needed of one), for one sequence.

    Args:
        model: has the modules that nodes name and, if one of them is an attention, `model.rotary_emb`.
        context: positions of the caches.
    """

    def __init__(self, model: Any, context: int) -> None:
        self.model = model
        self.cache = PositionCache(context)
        self._first = ""  # the attention that comes first in a step
        self._step: dict[str, Any] = {}
        self._masks: dict[int, torch.Tensor] = {}

    def make(self, node: Node) -> Callback:
        """What a `callback` node calls; nodes in the program's order.

        Raises (when called):
            KtcError: the module raised, or made numbers that are not finite out of finite ones.
        """
        name = node.module
        module = self.model.get_submodule(name)
        attention = bool(node.params.get("attention"))
        window = int(node.params.get("window", 0))
        if attention and not self._first:
            self._first = name
        takes = inspect.signature(module.forward).parameters

        def call(x: int, y: int, rows: int, cols: int, position: int) -> None:
            try:
                with torch.inference_mode():
                    given = view(x, rows, cols).clone()  # the executor's memory is its own again after the call
                    if attention:
                        out = self._attend(name, module, given[None], position, window, takes)
                    else:
                        out = module(given[None])
                        out = out[0] if isinstance(out, tuple) else out
                    out = out.reshape(rows, cols)
                    finite = bool(torch.isfinite(out).all()) or not bool(torch.isfinite(given).all())
                    view(y, rows, cols).copy_(out)
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                raise KtcError(
                    f"{name}: Hugging Face's code failed at position {position}: {type(error).__name__}: {text}",
                    "ktc run --graph off runs the whole model in Hugging Face's code, to compare",
                ) from error
            if not finite:
                raise KtcError(
                    f"{name}: Hugging Face's code made NaN or infinite numbers at position {position}",
                    "run `ktc verify` on the bundle",
                )

        return call

    def _attend(self, name: str, module: Any, x: torch.Tensor, position: int, window: int, takes: Any) -> torch.Tensor:
        """x [1, T, H] at `position` -> [1, T, H]."""
        rows = x.shape[1]
        if name == self._first:  # once for all layers of a step, as in the model
            ids = torch.arange(position, position + rows)[None]
            rotary = self.model.get_submodule("model.rotary_emb")
            self._step = {"position_ids": ids, "position_embeddings": rotary(x, position_ids=ids)}
            self._masks = {}
            self.cache.position = position
        if window not in self._masks:
            self._masks[window] = causal_mask(rows, position, window)
        out = module(hidden_states=x, attention_mask=self._masks[window], cache=self.cache, **self._step)
        if "prev_topk_indices" in takes:  # sparse attention: later layers may use this one's choice of keys
            self._step["prev_topk_indices"] = out[2]
        result: torch.Tensor = out[0]
        return result
