"""Absorbed latent attention on a device: the CPU module's algebra, scores and softmax in fp32 over whatever is stored.

The cache keeps the latent and the rotated key; nothing is expanded to heads. One piece serves a decode step; a long
prefill is cut so that its scores stay within a budget. These matrix products read the whole static cache, masked;
FlashInfer's kernels (paged.py), where they can be used, read the positions in use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

from ktc.engine.mla import KtcMLAAttention, mask_scores

SCORE_BYTES = 256 << 20
"""Scores of one piece, fp32."""
decoding_latent: ContextVar[Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor] | None] = ContextVar(
    "ktc_decoding_latent", default=None
)
"""Set while a decode step is enqueued whose scores and softmax another library computes (paged.py): layer, q [1, A, R],
rotated q [1, A, dr], the layer's caches [S, R] and [S, dr] -> [1, A, R]."""


class LaneMLAAttention(KtcMLAAttention):
    """`KtcMLAAttention` for 16-bit types: results in the type of the hidden states."""

    piece_bytes = SCORE_BYTES

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move W_UK and W_UV; call after `absorb`."""
        self.w_uk = self.w_uk.to(device, dtype)
        self.w_uv = self.w_uv.to(device, dtype)

    def _rotate(self, q: Tensor, k: Tensor, position: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        rotated_q, rotated_k = super()._rotate(q, k, position)
        return rotated_q.to(q.dtype), rotated_k.to(k.dtype)

    def _rows(
        self, q_nope: Tensor, q_rope: Tensor, c: Tensor, r: Tensor, mask: Tensor | None, begin: int, new: int
    ) -> Tensor:
        """Queries begin.. (t of them, of `new`): [B, A, t, .] -> [B, t, A, dv]."""
        batch, heads, count, _ = q_nope.shape
        elsewhere = decoding_latent.get()
        if elsewhere is not None and batch == new == 1:
            q = torch.matmul(q_nope, self.w_uk)  # [1, A, 1, R]
            mixed = elsewhere(self.layer_idx, q[:, :, 0], q_rope[:, :, 0], c[0], r[0])
            return torch.matmul(mixed[:, :, None], self.w_uv).transpose(1, 2)
        causal = mask is None and new > 1
        if causal:  # as in the base class: without a mask query i sees keys 0..i
            c, r = c[:, : begin + count], r[:, : begin + count]
        seen, rows = c.shape[1], heads * count
        q = torch.matmul(q_nope, self.w_uk)  # [B, A, t, R]
        scores = bmm_fp32(q.reshape(batch, rows, self.rank), c.transpose(1, 2))
        scores += bmm_fp32(q_rope.reshape(batch, rows, self.rope), r.transpose(1, 2))
        scores = scores.mul_(self.scaling).view(batch, heads, count, seen)
        mask_scores(scores, mask, begin, causal)
        weights = torch.softmax(scores, dim=-1).to(c.dtype).view(batch, rows, seen)
        mixed = torch.bmm(weights, c).view(batch, heads, count, self.rank)
        return torch.matmul(mixed, self.w_uv).transpose(1, 2)


def bmm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a [B, m, k] @ b [B, k, n] accumulated and returned in fp32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.device.type == "cuda":
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
