"""Multi-head latent attention in its absorbed form, over the compressed cache.

Replaces the attention of the DeepSeek-V2 and -V3 classes. The cache holds what Hugging Face's own
class puts there (the normalised latent and the rotated shared key), so caches, masks and
`generate()` keep working; unlike it, keys and values are never expanded to heads: the query is
multiplied into the latent space instead (`q_nope W_UK`), and the weighted latent out of it (`W_UV`).
What this file is not: a kernel. It is torch code over the module's (packed) projections.

Letters: B batch, T new tokens, S cached tokens, A heads, dn/dr/dv head sizes (nope, rope, value),
R kv_lora_rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktc.engine.lane import Lane

PIECE_BYTES = 8 << 20
"""Scores and latent queries of one piece of work: bounds memory per thread for a prefill of any length, and cuts it
into pieces that do not depend on the number of threads."""

_CHILDREN = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj")


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved_out: bool) -> Tensor:
    """Rotate the pairs (x0, x1), (x2, x3), ... of the last axis.

    Args:
        x: [..., T, dr]; `cos`, `sin`: [..., T, dr / 2], broadcastable.
        interleaved_out: True keeps the pairs in place (DeepSeek-V2), False puts the first members of all pairs
            in front (DeepSeek-V3). Scores do not depend on it, cached keys do.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    first, second = even * cos - odd * sin, odd * cos + even * sin
    return torch.stack((first, second), dim=-1).flatten(-2) if interleaved_out else torch.cat((first, second), dim=-1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (x[i], x[i + dr/2]); used where `config.rope_interleave` is false. Shapes as in `rotate_pairs`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def mask_scores(scores: Tensor, mask: Tensor | None, begin: int, causal: bool) -> None:
    """Mask scores [B, A, t, S] of queries begin.. in place: by position if causal, else by `mask` (bool or added)."""
    count, seen = scores.shape[-2:]
    # the lowest number, not -inf: a row that sees nothing (padding) must not become NaN
    lowest = torch.finfo(scores.dtype).min
    if causal:
        future = torch.ones(count, seen, dtype=torch.bool, device=scores.device).triu(begin + 1)
        scores.masked_fill_(future, lowest)
    elif mask is not None:
        part = mask[:, :, begin : begin + count, :seen]
        if part.dtype == torch.bool:
            scores.masked_fill_(~part, lowest)
        else:
            scores.add_(part)


class KtcMLAAttention(nn.Module):
    """Absorbed MLA with the interface of `DeepseekV2Attention` and `DeepseekV3Attention`.

    Takes over the projections and norms of the attention it replaces under their names, so that the module
    tree (and a rule that matched a projection) stays as it was. `kv_b_proj` is read once by
    `absorb()` and then dropped.
    """

    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any
    kv_a_proj_with_mqa: Any
    kv_a_layernorm: Any
    o_proj: Any
    kv_b_proj: Any
    w_uk: Tensor  # [A, dn, R]
    w_uv: Tensor  # [A, R, dv]
    piece_bytes = PIECE_BYTES

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        original: Any = attention
        self.config = original.config
        self.layer_idx: int = original.layer_idx
        self.is_causal = True
        self.lane = Lane(1)
        self.heads: int = original.num_heads
        self.nope: int = original.qk_nope_head_dim
        self.rope: int = original.qk_rope_head_dim
        self.value: int = original.v_head_dim
        self.rank: int = original.kv_lora_rank
        self.scaling: float = original.scaling  # includes YaRN's mscale squared (failure A1: at every position)
        self.pairs: bool = bool(getattr(self.config, "rope_interleave", True))
        for name in _CHILDREN:
            setattr(self, name, getattr(original, name, None))
        self.kv_b_proj = original.kv_b_proj
        self.register_buffer("w_uk", None, persistent=False)
        self.register_buffer("w_uv", None, persistent=False)

    def absorb(self) -> None:
        """Split `kv_b_proj` [A * (dn + dv), R] into W_UK and W_UV (fp32) and drop it. Call once, after loading."""
        if self.kv_b_proj is None:
            return
        split = self.kv_b_proj.weight.detach().to(torch.float32).view(self.heads, self.nope + self.value, self.rank)
        self.w_uk = split[:, : self.nope].contiguous()
        self.w_uv = split[:, self.nope :].transpose(1, 2).contiguous()
        self.kv_b_proj = None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, T, H] -> ([B, T, H], None).

        Args:
            position_embeddings: (cos, sin) [B, T, dr] (v3) or complex [B, T, dr / 2] (v2).
            attention_mask: None (causal from the first cached position), bool [B, 1, T, S] (True = visible), or an
                additive float mask of that shape.
            cache: a Hugging Face cache; its layer gets latent [B, 1, T, R] and rotated key [B, 1, T, dr].
        """
        cache = past_key_values if cache is None else cache
        batch, new = hidden_states.shape[:2]
        query = self._query(hidden_states).view(batch, new, self.heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_rope = torch.split(query, [self.nope, self.rope], dim=-1)
        latent, k_rope = torch.split(self.kv_a_proj_with_mqa(hidden_states), [self.rank, self.rope], dim=-1)
        latent = self.kv_a_layernorm(latent).view(batch, 1, new, self.rank)
        k_rope = k_rope.reshape(batch, 1, new, self.rope)
        q_rope, k_rope = self._rotate(q_rope, k_rope, position_embeddings)
        if cache is not None:
            latent, k_rope = cache.update(latent, k_rope, self.layer_idx, kwargs=kwargs)
        out = self._attend(q_nope, q_rope, latent[:, 0], k_rope[:, 0], attention_mask)  # [B, T, A * dv]
        return self.o_proj(out), None

    def _query(self, hidden_states: Tensor) -> Tensor:
        if self.q_proj is not None:
            direct: Tensor = self.q_proj(hidden_states)
            return direct
        out: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        return out

    def _rotate(self, q: Tensor, k: Tensor, position: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        if position is None:
            raise ValueError("position_embeddings are required")
        if isinstance(position, Tensor):  # complex: DeepSeek-V2
            cos, sin = position.real.unsqueeze(1), position.imag.unsqueeze(1)
            return rotate_pairs(q, cos, sin, True), rotate_pairs(k, cos, sin, True)
        half = self.rope // 2  # cos and sin repeat the angles of the pairs twice
        cos, sin = position[0][..., :half].unsqueeze(1), position[1][..., :half].unsqueeze(1)
        if self.pairs:
            return rotate_pairs(q, cos, sin, False), rotate_pairs(k, cos, sin, False)
        return rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)

    def _attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        """q_nope [B, A, T, dn], q_rope [B, A, T, dr], latent [B, S, R], k_rope [B, S, dr] -> [B, T, A * dv]."""
        batch, heads, new, _ = q_nope.shape
        out = q_nope.new_empty(batch, new, heads, self.value)
        row_bytes = 4 * batch * heads * (latent.shape[1] + 2 * self.rank)
        step = max(1, min(new, self.piece_bytes // max(1, row_bytes)))

        def piece(begin: int) -> None:
            end = min(new, begin + step)
            rows = slice(begin, end)
            out[:, rows] = self._rows(q_nope[:, :, rows], q_rope[:, :, rows], latent, k_rope, mask, begin, new)

        self.lane.run(piece, range(0, new, step))
        return out.view(batch, new, heads * self.value)

    def _rows(
        self, q_nope: Tensor, q_rope: Tensor, c: Tensor, r: Tensor, mask: Tensor | None, begin: int, new: int
    ) -> Tensor:
        """Queries begin.. (t of them, of `new`): [B, A, t, .] -> [B, t, A, dv]."""
        batch, heads, count, _ = q_nope.shape
        causal = mask is None and new > 1
        if causal:  # without a mask query i sees keys 0..i (the cache was empty); a single query sees all of them
            c, r = c[:, : begin + count], r[:, : begin + count]
        seen, rows = c.shape[1], heads * count
        q = torch.matmul(q_nope, self.w_uk)  # [B, A, t, R]
        scores = torch.bmm(q.reshape(batch, rows, self.rank), c.transpose(1, 2))
        scores.baddbmm_(q_rope.reshape(batch, rows, self.rope), r.transpose(1, 2))
        scores = scores.mul_(self.scaling).view(batch, heads, count, seen)
        mask_scores(scores, mask, begin, causal)
        weights = torch.softmax(scores, dim=-1).view(batch, rows, seen)
        mixed = torch.bmm(weights, c).view(batch, heads, count, self.rank)
        return torch.matmul(mixed, self.w_uv).transpose(1, 2)
