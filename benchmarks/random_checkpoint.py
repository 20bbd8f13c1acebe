"""Write a random checkpoint with DeepSeek-V2-Lite's shape: the load for compile and end-to-end benchmarks.

    python benchmarks/random_checkpoint.py OUT [--layers 27] [--seed 0]

27 layers are 15.7 B parameters, 31 GB of bf16; `--layers 14` is just over 16 GB. Weights are N(0, 0.02) drawn from
one seeded pool at random offsets (drawing every value afresh takes longer than writing them), norms are 1. Peak memory
is a few hundred megabytes. The text that such a model writes is noise: only speed and memory mean something.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def tensor_shapes(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Disk names and shapes of one decoder layer."""
    h, i = config["hidden_size"], config["moe_intermediate_size"]
    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    kvr, v = config["kv_lora_rank"], config["v_head_dim"]
    p = f"model.layers.{layer}."
    yield p + "input_layernorm.weight", (h,)
    yield p + "post_attention_layernorm.weight", (h,)
    yield p + "self_attn.q_proj.weight", (heads * (nope + rope), h)
    yield p + "self_attn.kv_a_proj_with_mqa.weight", (kvr + rope, h)
    yield p + "self_attn.kv_a_layernorm.weight", (kvr,)
    yield p + "self_attn.kv_b_proj.weight", (heads * (nope + v), kvr)
    yield p + "self_attn.o_proj.weight", (h, heads * v)
    if layer < config["first_k_dense_replace"]:
        blocks = [("mlp", config["intermediate_size"])]
    else:
        yield p + "mlp.gate.weight", (config["n_routed_experts"], h)
        blocks = [(f"mlp.experts.{e}", i) for e in range(config["n_routed_experts"])]
        blocks.append(("mlp.shared_experts", i * config["n_shared_experts"]))
    for name, width in blocks:
        yield f"{p}{name}.gate_proj.weight", (width, h)
        yield f"{p}{name}.up_proj.weight", (width, h)
        yield f"{p}{name}.down_proj.weight", (h, width)


class Pool:
    """bf16 N(0, 0.02) numbers as uint16; `draw(n)` yields n of them in contiguous pieces."""

    def __init__(self, seed: int, size: int = 1 << 25) -> None:
        self.rng = np.random.default_rng(seed)
        values = self.rng.standard_normal(size, dtype=np.float32) * np.float32(0.02)
        bits = values.view(np.uint32)
        self.values: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def draw(self, n: int) -> Iterator[NDArray[np.uint16]]:
        while n:
            start = int(self.rng.integers(0, self.values.size // 2))
            piece = self.values[start : start + min(n, self.values.size // 2)]
            n -= piece.size
            yield piece


def write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], pool: Pool) -> int:
    """Write one safetensors file; returns its data bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(blob)) + blob)
        for _, shape in tensors:
            if len(shape) == 1:
                f.write(np.full(shape, 0x3F80, np.uint16).tobytes())
                continue
            for piece in pool.draw(int(np.prod(shape))):
                f.write(memoryview(piece).cast("B"))
    return offset


def write_tokenizer(out: Path, config: dict[str, Any]) -> None:
    """A byte-level tokenizer (256 bytes + bos + eos), so that the model can be prompted with text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    # Every id the model can produce needs a text, or generated ids would be dropped silently.
    vocab |= {f"<{i}>": i for i in range(len(vocab), config["vocab_size"])}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(["<s>", "</s>"])
    tok.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = CONFIG | {"num_hidden_layers": args.layers}
    args.out.mkdir(parents=True, exist_ok=True)
    pool = Pool(args.seed)
    embed, h = config["vocab_size"], config["hidden_size"]
    shards: list[list[tuple[str, tuple[int, ...]]]] = [
        [("model.embed_tokens.weight", (embed, h)), ("model.norm.weight", (h,)), ("lm_head.weight", (embed, h))]
    ]
    shards += [list(tensor_shapes(config, layer)) for layer in range(args.layers)]
    index: dict[str, str] = {}
    total, start = 0, time.monotonic()
    for n, tensors in enumerate(shards, 1):
        name = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        total += write_shard(args.out / name, tensors, pool)
        index |= {t: name for t, _ in tensors}
        rate = total / (time.monotonic() - start) / 1e9
        print(f"\r{n}/{len(shards)} shards, {total / 1e9:.1f} GB, {rate:.2f} GB/s", end="", file=sys.stderr)
    print(file=sys.stderr)
    (args.out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    (args.out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    write_tokenizer(args.out, config)


if __name__ == "__main__":
    main()
