"""Attention of decode steps by FlashInfer: its planned wrappers over a session's static caches, read as pages.

torch's attention reads the whole static cache at every step, masked; these kernels read the positions in use. A
wrapper is *planned* outside the graph, before each step, for the number of positions that the step will see: the plan
goes into buffers whose addresses never change, so the captured graph reads the new one. Which positions a page holds
never changes either: page i of a cache is its rows i * PAGE and on, so nothing is copied or moved.

Written against flashinfer-python 0.7.4: the wrappers' documented signatures, and what its sources say of plans in graph
mode, that they keep their launch shape. It has never run on a GPU. Prefill stays with torch.
Letters: A query heads, K key heads, D head size, R latent rank, S positions of a cache, P pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ktc.cuda.mla import LaneMLAAttention, decoding_latent
from ktc.errors import UsageError

PAGE = 64
"""Positions of a page; a session's caches have a whole number of them."""
WORKSPACE_BYTES = 128 << 20
"""Of a wrapper's intermediate results: what FlashInfer's documentation recommends."""
BACKEND = "fa2"
"""The kernels that take every device from 8.0 on, and whose plans may be made anew under a captured graph."""
INTERFACE = "ktc_paged"
HEAD_SIZES = (64, 128, 256)
CHOICES = ("auto", "flashinfer", "torch")

_step: ContextVar[PagedAttention | None] = ContextVar("ktc_paged_attention", default=None)


def make_attention(choice: str, model: Any, context: int, windows: list[int]) -> tuple[PagedAttention | None, str]:
    """What a session's decode steps use.

    Args:
        choice: "auto", "flashinfer" or "torch".
        context: positions of the caches, a multiple of PAGE.
        windows: of each layer, keys that a token sees, 0 = all.
    Returns:
        FlashInfer's attention, planned once, or None for torch's; and the choice in words, for the report.
    Raises:
        UsageError: "flashinfer" where it cannot be used; it says why.
    """
    if choice not in CHOICES:
        raise UsageError(f"attention {choice!r} is not one of {', '.join(CHOICES)}")
    if choice == "torch":
        return None, "torch"
    reason = unusable(model)
    if not reason:
        try:
            attention = PagedAttention(model, context, windows)
            return attention, f"FlashInfer ({attention.kind}, {BACKEND}, pages of {PAGE})"
        except Exception as error:  # kernels are compiled at the first plan, and any of it may fail
            reason = f"FlashInfer cannot be planned: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if choice == "flashinfer":
        raise UsageError(f"--attention flashinfer: {reason}", "leave it out, or use --attention torch")
    return None, f"torch ({reason})"


def unusable(model: Any) -> str:
    """Why FlashInfer does not take this model on this device; "" if it does."""
    dtype = model.ktc_dtype
    for device in model.ktc_pipeline.devices:
        if device.type != "cuda":
            return f"the device is {device.type}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "the device is older than compute capability 8.0"
    try:
        wrappers()
    except ImportError as error:
        return f"flashinfer does not import: {error}; pip install 'ktc[cuda]'"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits, not in {dtype}"
    return unusable_shape(model)


def unusable_shape(model: Any) -> str:
    """As `unusable`, of the model alone."""
    modules = attention_modules(model)
    latent = [m for m in modules if isinstance(m, LaneMLAAttention)]
    if latent:
        first = latent[0]
        if len(latent) != len(modules) or len({(m.heads, m.rank, m.rope, m.scaling) for m in latent}) > 1:
            return "the layers have different attention"
        if first.rank % 128 or first.rope % 64:
            return f"latent attention of rank {first.rank} with {first.rope} rotary columns: multiples of 128 and 64"
        return ""
    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        return "latent attention without a ktc.MLAAttention rule"
    if any(getattr(m, "sinks", None) is not None for m in modules):
        return "attention with sinks"
    if config._attn_implementation not in ("sdpa", INTERFACE):
        return f"the model asks for {config._attn_implementation} attention"
    if len({getattr(m, "scaling", None) for m in modules}) > 1 or getattr(config, "attn_logit_softcapping", None):
        return "the layers have different attention"
    size = head_size(config)
    if size not in HEAD_SIZES:
        return f"heads of {size} columns: one of {', '.join(map(str, HEAD_SIZES))} is needed"
    return ""


def attention_modules(model: Any) -> list[Any]:
    """The attention module of each decoder layer."""
    return [layer.self_attn for layer in model.get_decoder().layers]


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def wrappers() -> tuple[Any, Any, Any]:
    """FlashInfer's MLA wrapper, its plan metadata, and its decode wrapper.

    Raises:
        ImportError: not installed, or a release without them.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    return BatchMLAPagedAttentionWrapper, MLAPlanMetadata, BatchDecodeWithPagedKVCacheWrapper


class DevicePlans:
    """The planned wrappers of one device: one for latent attention, else one per window size."""

    def __init__(self, model: Any, device: torch.device, pages: int, windows: set[int], latent: Any) -> None:
        self.device, self.dtype, self.pages = device, model.ktc_dtype, pages
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._page_ids = torch.arange(pages, dtype=torch.int32)
        self.mla: Any = None
        self.gqa: dict[int, Any] = {}
        mla, self._metadata, decode = wrappers()
        if latent is not None:
            self._shape = {
                "num_heads": latent.heads,
                "head_dim_ckv": latent.rank,
                "head_dim_kpe": latent.rope,
                "sm_scale": float(latent.scaling),
            }
            buffers = {"qo_indptr": 2, "kv_indptr": 2, "kv_indices": pages, "kv_len_arr": 1}
            self.mla = mla(self._workspace, use_cuda_graph=True, backend=BACKEND, **self._reserve(buffers))
            return
        config = model.config.get_text_config()
        self._shape = {
            "num_qo_heads": int(config.num_attention_heads),
            "num_kv_heads": int(config.num_key_value_heads),
            "head_dim": head_size(config),
            "sm_scale": float(attention_modules(model)[0].scaling),
        }
        names = ("indptr", "indices", "last_page_len")
        buffers = {f"paged_kv_{name}_buffer": n for name, n in zip(names, (2, pages, 1), strict=True)}
        self._page_ids = self._page_ids.to(device)  # that planner copies them, the other one reads them
        for window in sorted(windows):
            self.gqa[window] = decode(
                self._workspace, "HND", use_cuda_graph=True, use_tensor_cores=True, backend=BACKEND,
                **self._reserve(buffers),
            )  # fmt: skip

    def _reserve(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        return {name: torch.zeros(n, dtype=torch.int32, device=self.device) for name, n in sizes.items()}

    def plan(self, length: int) -> None:
        """As `PagedAttention.plan`."""
        used = -(-length // PAGE)
        indptr = torch.tensor([0, used], dtype=torch.int32)
        if self.mla is not None:
            metadata = self._metadata.csr(
                torch.tensor([0, 1], dtype=torch.int32),
                indptr,
                self._page_ids,
                torch.tensor([length], dtype=torch.int32),
            )
            self.mla.plan(
                metadata=metadata, page_size=PAGE, causal=False, q_data_type=self.dtype, kv_data_type=self.dtype,
                query_layout="split", kv_cache_layout="split", **self._shape,
            )  # fmt: skip
            return
        last = torch.tensor([length - (used - 1) * PAGE], dtype=torch.int32)
        for window, wrapper in self.gqa.items():
            wrapper.plan(
                indptr, self._page_ids, last, page_size=PAGE, window_left=window - 1 if window else -1,
                q_data_type=self.dtype, kv_data_type=self.dtype, **self._shape,
            )  # fmt: skip


class PagedAttention:
    """The planned wrappers of one session, on each device that has layers.

    Attributes:
        kind: "mla" or "gqa".
    """

    def __init__(self, model: Any, context: int, windows: list[int]) -> None:
        if context % PAGE:
            raise ValueError(f"caches of {context} positions are not whole pages of {PAGE}")
        self.pages, self._windows = context // PAGE, list(windows)
        first = attention_modules(model)[0]
        self.kind = "mla" if isinstance(first, LaneMLAAttention) else "gqa"
        pipeline = model.ktc_pipeline
        self._of_layer: dict[int, DevicePlans] = {}
        for stage, device in zip(pipeline.stages, pipeline.devices, strict=True):
            if stage.layers:
                here = {windows[layer] for layer in stage.layers}
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    plans = DevicePlans(model, device, self.pages, here, first if self.kind == "mla" else None)
                self._of_layer |= dict.fromkeys(stage.layers, plans)
        if self.kind == "gqa":
            _register(model)
        self.plan(context)

    def plan(self, length: int) -> None:
        """Attention over the first `length` positions, from the next step on. Never inside a graph; the streams are
        idle or run nothing that reads the plan."""
        for plans in dict.fromkeys(self._of_layer.values()):
            with torch.cuda.device(plans.device) if plans.device.type == "cuda" else nullcontext():
                plans.plan(length)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is enqueued inside is a decode step of this session."""
        token = _step.set(self)
        latent = decoding_latent.set(self.latent if self.kind == "mla" else None)
        try:
            yield
        finally:
            _step.reset(token)
            decoding_latent.reset(latent)

    def latent(self, layer: int, q: Tensor, q_rope: Tensor, c: Tensor, r: Tensor) -> Tensor:
        """q [1, A, R], q_rope [1, A, dr], c [S, R], r [S, dr] -> [1, A, R]."""
        pages = (c.view(self.pages, PAGE, -1), r.view(self.pages, PAGE, -1))
        out: Tensor = self._of_layer[layer].mla.run(query=(q, q_rope), kv_cache=pages)
        return out

    def grouped(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [1, A, 1, D], key and value [1, K, S, D] -> [1, 1, A, D]."""
        split = (key.shape[1], self.pages, PAGE, key.shape[3])
        pages = tuple(t.view(split).transpose(0, 1) for t in (key, value))  # [P, K, PAGE, D], as they lie
        q = query[0].transpose(0, 1).contiguous()
        out: Tensor = self._of_layer[layer].gqa[self._windows[layer]].run(q, pages)
        return out[None]


def paged_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: FlashInfer inside a session's decode step, torch's SDPA anywhere else."""
    session = _step.get()
    if session is not None and query.shape[0] == 1 and query.shape[2] == 1:
        return session.grouped(int(module.layer_idx), query, key, value), None  # type: ignore[arg-type]
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out


def _register(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(INTERFACE, paged_forward)
    AttentionMaskInterface.register(INTERFACE, sdpa_mask)
    model.set_attn_implementation(INTERFACE)
