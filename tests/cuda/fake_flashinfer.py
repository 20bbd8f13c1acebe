"""A stand-in for flashinfer's wrappers, for machines without a GPU. It is not flashinfer and shows nothing of it.

Written from the documented signatures of flashinfer-python 0.7.4: the arguments that ktc passes, under the same names,
with the checks that the documentation and sources state. `plan` keeps its metadata in the reserved buffers and
nowhere else, and `run` computes plain softmax attention from those buffers alone, as a replayed graph would. Every
call is recorded in `log`. test_paged.py compares these signatures with the real ones where flashinfer is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass
class Log:
    plans: list[dict[str, Any]] = field(default_factory=list)
    runs: int = 0
    fail: str = ""


log = Log()


def _int32(*tensors: Tensor) -> None:
    assert all(t.dtype == torch.int32 for t in tensors)


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        _int32(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert use_cuda_graph and backend == "fa2" and float_workspace_buffer.dtype == torch.uint8
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        _int32(*self.buffers)  # type: ignore[arg-type]
        self.planned: dict[str, Any] | None = None

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        query_layout: str = "packed",
        kv_cache_layout: str = "packed",
    ) -> None:
        if log.fail:
            raise RuntimeError(log.fail)
        assert head_dim_ckv % 128 == 0 and head_dim_kpe % 64 == 0
        assert query_layout == kv_cache_layout == "split"
        given = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        for reserved, source, larger in zip(self.buffers, given, (False, False, True, False), strict=True):
            assert reserved is not None and source is not None
            assert reserved.shape == source.shape or (larger and len(reserved) >= len(source))
            reserved[: len(source)].copy_(source)
        self.planned = {
            "heads": num_heads, "page": page_size, "scale": sm_scale, "widths": (head_dim_ckv, head_dim_kpe),
            "dtype": q_data_type, "causal": causal,
        }  # fmt: skip
        assert kv_data_type == q_data_type
        log.plans.append(self.planned | {"length": int(metadata.kv_len_arr[0])})  # type: ignore[index]

    def run(self, *, query: Any, kv_cache: Any) -> Tensor:
        assert self.planned is not None, "run before plan"
        log.runs += 1
        (q, q_rope), (ckv, kpe) = query, kv_cache
        p = self.planned
        assert q.dtype == q_rope.dtype == ckv.dtype == kpe.dtype == p["dtype"]
        assert q.shape == (1, p["heads"], p["widths"][0]) and q_rope.shape == (1, p["heads"], p["widths"][1])
        assert ckv.shape[1:] == (p["page"], p["widths"][0]) and kpe.shape[1:] == (p["page"], p["widths"][1])
        _, indptr, indices, lengths = self.buffers
        assert indptr is not None and indices is not None and lengths is not None
        pages = indices[int(indptr[0]) : int(indptr[1])].long()
        c = ckv[pages].flatten(0, 1)[: int(lengths[0])].float()
        r = kpe[pages].flatten(0, 1)[: int(lengths[0])].float()
        scores = (q[0].float() @ c.T + q_rope[0].float() @ r.T) * p["scale"]
        return (torch.softmax(scores, -1) @ c)[None].to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert use_cuda_graph and use_tensor_cores and backend == "fa2" and kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer[:4096].any()
        assert paged_kv_indptr_buffer is not None and paged_kv_last_page_len_buffer is not None
        assert paged_kv_indices_buffer is not None
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last = paged_kv_last_page_len_buffer
        _int32(self.indptr, self.indices, self.last)
        assert len(self.indptr) == len(self.last) + 1
        self.planned: dict[str, Any] | None = None

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        if log.fail:
            raise RuntimeError(log.fail)
        _int32(indptr, indices, last_page_len)
        assert len(indices) <= len(self.indices) and kv_data_type == q_data_type
        assert 1 <= int(last_page_len[0]) <= page_size
        self.indptr.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.last.copy_(last_page_len)
        self.planned = {
            "heads": num_qo_heads, "kv_heads": num_kv_heads, "size": head_dim, "page": page_size,
            "window": window_left, "scale": sm_scale, "dtype": q_data_type,
        }  # fmt: skip
        length = (int(indptr[1]) - 1) * page_size + int(last_page_len[0])
        log.plans.append(self.planned | {"length": length})

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert self.planned is not None, "run before plan"
        log.runs += 1
        p, (k, v) = self.planned, paged_kv_cache
        assert q.shape == (1, p["heads"], p["size"]) and q.dtype == k.dtype == v.dtype == p["dtype"]
        assert k.shape[1:] == v.shape[1:] == (p["kv_heads"], p["page"], p["size"]) and k.stride() == v.stride()
        assert k.stride(-1) == 1
        pages = self.indices[int(self.indptr[0]) : int(self.indptr[1])].long()
        length = (len(pages) - 1) * p["page"] + int(self.last[0])
        first = max(0, length - 1 - p["window"]) if p["window"] >= 0 else 0
        keys, values = (t[pages].transpose(1, 2).flatten(0, 1)[first:length].float() for t in (k, v))  # [S, K, D]
        group = p["heads"] // p["kv_heads"]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("hd,shd->hs", q[0].float(), keys) * p["scale"]
        return torch.einsum("hs,shd->hd", torch.softmax(scores, -1), values)[None].to(q.dtype)


def modules() -> dict[str, ModuleType]:
    """For sys.modules: `flashinfer` and `flashinfer.mla`."""
    top, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    vars(mla).update(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper, MLAPlanMetadata=MLAPlanMetadata)
    vars(top).update(BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper, mla=mla)
    return {"flashinfer": top, "flashinfer.mla": mla}
