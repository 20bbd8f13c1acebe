"""A static key/value cache whose position is data, and the masks that go with it.

Hugging Face's own static cache counts its length in Python for sliding windows, which a captured graph cannot replay.
Here every layer has buffers for the whole context, new rows go where a tensor of positions says, and what
may be seen is the mask's business, windows included. The step's shape never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ktc.cuda.host_cache import HostCaches


class StaticCache(Cache):  # type: ignore[misc]
    """One sequence.

    Args:
        context: positions that every layer has.
        host: layer -> the `HostCaches` of its device, for layers whose cache is in host memory.

    Attributes:
        positions: i64 [T], where the rows of the next step go.
        here: their copy on the device of the layer that runs.
        in_place: whether the next step's attention reads caches in host memory where they lie (FlashInfer).
        seen: how many positions the next step may look at; None = all of them (masked), as a captured step must.
    """

    def __init__(self, context: int, host: Mapping[int, HostCaches] | None = None) -> None:
        super().__init__(layers=[])
        self.context, self.host, self.in_place = context, host or {}, False
        self.positions: Tensor | None = None
        self.seen: int | None = None
        self.here: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """On devices, working copies included."""
        own = sum(t.nbytes for layer, pair in self._buffers.items() if layer not in self.host for t in pair)
        return own + sum(caches.device_nbytes for caches in set(self.host.values()))

    @property
    def host_nbytes(self) -> int:
        return sum(t.nbytes for layer, pair in self._buffers.items() if layer in self.host for t in pair)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [1, heads, T, d] at `positions`; all keys and values that may be seen. (For latent attention: the
        latent and the rotated key.)"""
        assert self.positions is not None
        found = self._buffers.get(layer_idx)
        if found is None:  # before capture: a warm-up step goes through every layer
            found = self._buffers[layer_idx] = (self._room(layer_idx, key_states), self._room(layer_idx, value_states))
        keys, values = found
        positions = self.here(self.positions)
        keys.index_copy_(2, positions, key_states)
        values.index_copy_(2, positions, value_states)
        if layer_idx in self.host and not self.in_place:
            keys, values = self.host[layer_idx].working_copies(keys, values)
        return (keys, values) if self.seen is None else (keys[:, :, : self.seen], values[:, :, : self.seen])

    def _room(self, layer: int, states: Tensor) -> Tensor:
        batch, heads, _, width = states.shape
        shape = torch.Size((batch, heads, self.context, width))
        if layer in self.host:
            return self.host[layer].room(shape, states.dtype)
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Hugging Face asks when it makes positions or masks itself; both are always given here."""
        raise NotImplementedError("positions and masks are the caller's")


class Masks:
    """Additive masks [1, 1, T, S] in the computing type.

    Args:
        windows: of each layer, keys that a token sees, 0 = all.
        layer_types: the config's, where layers differ.
    """

    def __init__(
        self,
        windows: list[int],
        layer_types: list[str] | None,
        context: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.columns = torch.arange(context, device=device)
        self.dtype, self.lowest = dtype, torch.finfo(dtype).min
        self.windows: dict[str, int] | int
        if len(set(windows)) == 1:
            self.windows = windows[0]
        else:
            assert layer_types is not None and len(layer_types) == len(windows)
            self.windows = dict(zip(layer_types, windows, strict=True))

    def __call__(self, positions: Tensor, seen: int | None) -> Tensor | dict[str, Tensor]:
        """positions [T] on the device -> the mask, or one per type of layer, as the model's forward takes it."""
        columns = self.columns if seen is None else self.columns[:seen]
        if isinstance(self.windows, int):
            return self._mask(positions, columns, self.windows)
        return {kind: self._mask(positions, columns, window) for kind, window in self.windows.items()}

    def _mask(self, positions: Tensor, columns: Tensor, window: int) -> Tensor:
        hidden = columns[None, :] > positions[:, None]
        if window:
            hidden = hidden | (columns[None, :] <= positions[:, None] - window)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, self.lowest)[None, None]


def masks_for(config: Any, context: int, device: torch.device, dtype: torch.dtype) -> Masks:
    """The masks of a model's layers."""
    return Masks(windows_of(config), getattr(config, "layer_types", None), context, device, dtype)


def windows_of(config: Any) -> list[int]:
    """Of each layer, keys that a token sees, itself included; 0 = all."""
    from ktc.graph.families import skeleton_for

    window: Callable[[int], int] = skeleton_for(config).window
    return [window(layer) for layer in range(int(config.num_hidden_layers))]
