"""`KtcEmbedding`: a token table kept as it lies in the bundle; the looked-up rows are widened to fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class KtcEmbedding(nn.Module):
    """ids [...] -> f32 [..., H] from a table [V, H] of any float type.

    The table is a buffer, not a parameter: it is no part of the arithmetic, and `model.dtype` (the type of the
    first parameter) must stay fp32.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, padding_idx: int | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight).to(torch.float32)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {str(self.weight.dtype).removeprefix('torch.')}"
