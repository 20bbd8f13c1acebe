# ruff: noqa: C408 - keyword arguments read like the config calls they stand for
"""Tiny random Hugging Face checkpoints of every family, in every encoding that ktc reads.

`make_tiny` writes a checkpoint with transformers' own `save_pretrained` and, for quantised formats,
rewrites its tensors by hand. A quantised checkpoint at P has a twin at `twin_of(P)`: the same model
with every weight dequantised to fp32 by torch, independently of ktc's decoders. Both are deterministic.

Routers are scaled so that nothing ties; correction biases, sinks, biases and norm weights are random,
so that dropping or misplacing one changes the output.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

INDEX = "model.safetensors.index.json"
FP8_BLOCK = (32, 32)  # small, so that tiny matrices have partial last blocks
INT4_GROUP = 32

_COMMON: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_MLA: dict[str, Any] = dict(kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
_V3: dict[str, Any] = dict(
    intermediate_size=96, moe_intermediate_size=32, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
    first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
)  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(_COMMON, **_V3, **_MLA, num_key_value_heads=4, n_group=4, topk_group=2, q_lora_rank=24),
    "deepseek_v2": dict(
        _COMMON, **{**_V3, "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5}, **_MLA,
        num_key_value_heads=4, n_group=4, topk_group=2, topk_method="group_limited_greedy", q_lora_rank=None,
    ),
    "qwen2_moe": dict(
        _COMMON, intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
    ),
    "qwen3_moe": dict(
        _COMMON, intermediate_size=96, moe_intermediate_size=32, num_key_value_heads=2, head_dim=16, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True,
    ),
    "mixtral": dict(_COMMON, intermediate_size=96, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": dict(_COMMON, intermediate_size=32, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2),
    "glm4_moe": dict(
        _COMMON, **_V3, num_key_value_heads=2, head_dim=16, n_group=1, topk_group=1, use_qk_norm=True,
        attention_bias=True,
    ),
    "gpt_oss": dict(
        _COMMON, intermediate_size=96, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=8, swiglu_limit=1.0,  # low enough to clamp on tiny activations
        rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
                             truncate=False, original_max_position_embeddings=32),
    ),
    "minimax_m2": dict(
        _COMMON, intermediate_size=32, num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2,
        rotary_dim=8,
    ),
    "granitemoe": dict(
        _COMMON, intermediate_size=32, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        tie_word_embeddings=True, embedding_multiplier=3.0, residual_multiplier=1.5, logits_scaling=6.0,
        attention_multiplier=0.25,
    ),
    "glm_moe_dsa": dict(
        _COMMON, **_V3, **_MLA, num_key_value_heads=4, n_group=1, topk_group=1, q_lora_rank=24, index_head_dim=16,
        index_n_heads=2, index_topk=64,
    ),
}  # fmt: skip
FAMILIES: tuple[str, ...] = tuple(TINY)
_ROUTER = (".mlp.gate.weight", ".mlp.router.weight", ".block_sparse_moe.router.weight")


def twin_of(path: Path) -> Path:
    """The exactly dequantised fp32 checkpoint that belongs to a quantised one."""
    return path.with_name(path.name + "-fp32")


def longrope(family: str) -> dict[str, Any]:
    """`rope_parameters` whose frequencies are others from position 32 on."""
    head = int(TINY[family].get("qk_rope_head_dim", 16))
    factors = {"short_factor": [1.0] * (head // 2), "long_factor": [1.0 + 0.5 * i for i in range(head // 2)]}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}


def tiny_config(family: str, **overrides: Any) -> Any:
    """The tiny config object of a family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**TINY[family], **overrides})


def tiny_model(family: str, *, dtype: str = "fp32", seed: int = 0, **overrides: Any) -> Any:
    """The tiny model itself, in memory, random as described above."""
    import torch
    from transformers import AutoModelForCausalLM

    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if name in tied:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(_ROUTER):
                # Logits of standard deviation 2 for unit activations: far from ties, and no sigmoid saturates.
                value = noise * 2.0 / tensor.shape[-1] ** 0.5
            elif name.endswith("norm.weight"):
                value = 1.0 + 0.2 * noise
            elif tensor.ndim == 1 or name.endswith("_bias"):
                value = 0.3 * noise  # linear and expert biases, correction biases, sinks
            elif "embed_tokens" in name:
                value = noise * (0.2 if tied else 1.0)
            else:
                value = noise * 1.2 / tensor.shape[-1] ** 0.5
            tensor.copy_(value)
    return model


def make_tiny(
    family: str,
    path: Path,
    *,
    dtype: str = "bf16",
    fmt: str = "plain",
    shards: int | None = None,
    seed: int = 0,
    tokenizer: str | None = None,
    **overrides: Any,
) -> Path:
    """Write a tiny random checkpoint to `path` and return it.

    Args:
        family: a key of TINY.
        dtype: "bf16", "fp16" or "fp32" of everything that is not quantised.
        fmt: "plain" (names as released checkpoints have them), "fused" (transformers 5's own fused names), "fp8",
            "int4" (compressed-tensors) or "mxfp4" (gpt_oss only). The last three also write `twin_of(path)`.
        shards: number of files; None = one.
        tokenizer: "byte" adds a byte-level tokenizer (256 bytes + <s>, </s>, <pad>; sets vocab_size to 260),
            "chat" one with a chat template and its control tokens too.
        overrides: config values, e.g. `hidden_size=192, moe_intermediate_size=320`.
    """
    if tokenizer is not None:
        overrides = dict(overrides, vocab_size=260, bos_token_id=256, eos_token_id=257, pad_token_id=258)
    model = tiny_model(family, dtype=dtype, seed=seed, **overrides)
    model.save_pretrained(path, save_original_format=fmt != "fused")
    if tokenizer is not None:
        write_byte_tokenizer(path, chat=tokenizer == "chat")
    if fmt in ("plain", "fused"):
        if shards:
            _write(path, _load(path), shards)
        return path
    return _quantise(family, path, fmt, shards)


def write_byte_tokenizer(path: Path, *, chat: bool = False) -> None:
    """A byte-level tokenizer: token id = byte, 256 <s>, 257 </s>, 258 <pad>, 259 <|user|>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = _byte_alphabet()
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>", "<|user|>"]
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<|user|>"],
    )  # fmt: skip
    if chat:
        fast.chat_template = (
            "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}\n"
            "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
        )
    fast.save_pretrained(path)


def _byte_alphabet() -> list[str]:
    """Character of each byte in GPT-2's byte-level alphabet, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(other)) for b in range(256)]


def _load(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def _write(path: Path, tensors: dict[str, Any], shards: int | None) -> None:
    """Replace the weights in `path`; tensors go round robin to shards, so an expert's matrices are split over files."""
    from safetensors.torch import save_file

    for file in (*path.glob("*.safetensors"), path / INDEX):
        file.unlink(missing_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if not shards:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / INDEX).write_text(json.dumps(index, indent=2))


# ---- quantised formats -----------------------------------------------------------------------------------------
def _quantise(family: str, path: Path, fmt: str, shards: int | None) -> Path:
    """Rewrite the checkpoint at `path` in an encoding, and its dequantised twin beside it."""
    tensors = _load(path)
    encode = {"fp8": _fp8, "int4": _int4, "mxfp4": _mxfp4}[fmt]
    stored: dict[str, Any] = {}
    twin: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts, value = encode(name, tensor) if _encoded(family, fmt, name, tensor) else ({name: tensor}, tensor)
        stored.update(parts)
        twin[name] = value.float()
    sections: dict[str, dict[str, Any]] = {
        "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": list(FP8_BLOCK)},
        "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
                 "ignore": ["lm_head", "re:.*self_attn.*"], "config_groups": {"group_0": {"targets": ["Linear"],
                 "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                             "group_size": INT4_GROUP, "actorder": None, "dynamic": False}}}},
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    }  # fmt: skip
    other = twin_of(path)
    shutil.copytree(path, other)
    _write(path, stored, shards)
    _write(other, twin, None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": sections[fmt]}, indent=2))
    (other / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))
    return path


def _encoded(family: str, fmt: str, name: str, tensor: Any) -> bool:
    if fmt == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    if ".experts." in name:
        return bool(tensor.ndim == 2)
    kept = ("embed_tokens", "lm_head", "norm", ".gate.weight", ".router.", "shared_expert_gate", "indexer")
    return fmt == "fp8" and tensor.ndim == 2 and not any(k in name for k in kept)


def _blocks(scale: Any, rows: int, columns: int) -> Any:
    """A scale grid spread over the elements; the last row and column of blocks may be partial."""
    return scale.repeat_interleave(FP8_BLOCK[0], 0).repeat_interleave(FP8_BLOCK[1], 1)[:rows, :columns]


def _fp8(name: str, tensor: Any) -> tuple[dict[str, Any], Any]:
    import torch

    w = tensor.float()
    rows, columns = w.shape
    grid = torch.zeros(-(-rows // FP8_BLOCK[0]), -(-columns // FP8_BLOCK[1]))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            r, c = i * FP8_BLOCK[0], j * FP8_BLOCK[1]
            grid[i, j] = w[r : r + FP8_BLOCK[0], c : c + FP8_BLOCK[1]].abs().max() / 448.0
    if ".experts." not in name:
        grid = torch.exp2(torch.ceil(torch.log2(grid)))  # so that decoding to bf16 is exact outside the experts
    codes = (w / _blocks(grid, rows, columns)).to(torch.float8_e4m3fn)
    value = codes.float() * _blocks(grid, rows, columns)
    return {name: codes, name + "_scale_inv": grid}, value


def _int4(name: str, tensor: Any) -> tuple[dict[str, Any], Any]:
    import torch

    w = tensor.float()
    rows, columns = w.shape
    groups = w.reshape(rows, -1, INT4_GROUP)
    scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    q = (groups / scale.float()[..., None]).round().clamp(-8, 7).reshape(rows, columns).to(torch.int64)
    value = q.float() * scale.float().repeat_interleave(INT4_GROUP, 1)
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for i in range(8):
        words |= (q[:, i::8] + 8) << (4 * i)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor([rows, columns], dtype=torch.int64)
    return {name + "_packed": packed, name + "_scale": scale, name + "_shape": shape}, value


def _mxfp4(name: str, tensor: Any) -> tuple[dict[str, Any], Any]:
    import torch

    w = tensor.float().transpose(1, 2)  # [E, out, in]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = w.reshape(*w.shape[:2], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-60))) - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    code = (scaled.abs()[..., None] - table).abs().argmin(-1)
    value = torch.where(scaled < 0, -table[code], table[code]) * torch.exp2(exponent)[..., None]
    nibble = code + 8 * (scaled < 0)
    blocks = (nibble[..., 0::2] | (nibble[..., 1::2] << 4)).to(torch.uint8)
    scales = (exponent + 127).to(torch.uint8)
    decoded = value.reshape(w.shape).transpose(1, 2)
    return {name + "_blocks": blocks, name + "_scales": scales}, decoded
