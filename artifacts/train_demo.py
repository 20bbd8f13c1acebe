"""Train the demo checkpoint: a 15.5M-parameter DeepSeek-V3 (MLA + MoE) that writes Shakespeare.

    python artifacts/train_demo.py --out artifacts/demo                 # fetch the text, train, save, report
    python artifacts/train_demo.py --out artifacts/demo --evaluate      # only measure an existing checkpoint

Minutes on one data-centre GPU, hours on a CPU; bound the time with --max-minutes: the schedule follows whichever of
epochs and time is further along, so that a shorter run is a complete, if weaker, training.

One epoch is only 1.6M tokens, so the difficulty is overfitting. What helps here: BPE-dropout (every epoch sees other
segmentations, annealed to the canonical one), dropout on embeddings, attention and residual branches, strong weight
decay, and keeping the checkpoint with the lowest validation loss. Experts are balanced the way DeepSeek-V3 does it,
without an auxiliary loss: `e_score_correction_bias` moves against each expert's load after every step.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_corpus import Corpus, encode_works, fetch, heldout_excerpt, load_corpus, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

WINDOW = 512  # tokens a window when measuring perplexity; windows do not overlap


def make_config(args: argparse.Namespace) -> DeepseekV3Config:
    """The shape of the demo: DeepSeek-V3 in small, every feature of its router in use."""
    return DeepseekV3Config(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=6,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=512,
        moe_intermediate_size=192,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
        attention_dropout=args.dropout,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def dense_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert on every token, unused ones weighted zero: two large GEMMs, 4x the FLOPs, far fewer launches."""
    tokens, width = hidden.shape
    experts = self.num_experts
    weights = hidden.new_zeros(tokens, experts, dtype=top_k_weights.dtype).scatter(1, top_k_index, top_k_weights)
    gate_up = F.linear(hidden, self.gate_up_proj.flatten(0, 1)).view(tokens, experts, -1)
    inner = self._apply_gate(gate_up) * weights.unsqueeze(-1).to(gate_up.dtype)
    return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).reshape(width, -1)).to(hidden.dtype)


def regularise(model: nn.Module, dropout: float) -> None:
    """Drop out the embeddings and the output of every attention and MLP block (training mode only)."""

    def hook(module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], dropout, module.training), *output[1:])
        return F.dropout(output, dropout, module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", ".self_attn")) or (name.endswith(".mlp") and "experts" not in name):
            module.register_forward_hook(hook)


class Balancer:
    """DeepSeek-V3's auxiliary-loss-free balancing: nudge each expert's selection bias against its load."""

    def __init__(self, model: nn.Module) -> None:
        self.gates = [m for name, m in model.named_modules() if name.endswith(".mlp.gate")]
        self.load: dict[nn.Module, Tensor] = {}
        for gate in self.gates:
            # the router is fp32 at inference, so keep autocast away from it
            gate.forward = torch.autocast(gate.weight.device.type, enabled=False)(gate.forward)
            gate.register_forward_hook(self._count)

    def _count(self, gate: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen = output[2].flatten()
        counts = torch.zeros(gate.num_experts, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        self.load[gate] = counts if gate.training else self.load.get(gate, torch.zeros_like(counts)) + counts

    @torch.no_grad()
    def update(self, rate: float) -> None:
        for gate in self.gates:
            load = self.load[gate]
            gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)

    def imbalance(self) -> float:
        """Mean over layers of (most loaded expert / average expert), over what was counted last."""
        return sum((load.max() / load.mean()).item() for load in self.load.values()) / len(self.load)


@dataclass
class Schedule:
    """How far training is: the further of epochs and minutes decides."""

    epochs: int
    max_minutes: float
    start: float = field(default_factory=time.monotonic)
    epochs_done: float = 0.0

    def minutes(self) -> float:
        return (time.monotonic() - self.start) / 60

    def progress(self) -> float:
        return min(1.0, max(self.epochs_done / self.epochs, self.minutes() / self.max_minutes))


def epochs(core: Tokenizer, works: list[str], args: argparse.Namespace, schedule: Schedule) -> Iterator[list[Tensor]]:
    """Batches [rows, seq_len], one list an epoch; the next epoch is tokenised in the background."""
    generator = torch.Generator().manual_seed(args.seed)

    def make() -> list[Tensor]:
        encoded = encode_works(core, works, args.bpe_dropout * max(0.0, 1 - schedule.progress() / 0.9))
        order = torch.randperm(len(encoded), generator=generator).tolist()
        stream = torch.tensor([token for i in order for token in encoded[i]])
        stream = stream.roll(int(torch.randint(len(stream), (1,), generator=generator)))
        rows = stream[: len(stream) // args.seq_len * args.seq_len].view(-1, args.seq_len)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        rows[torch.rand(len(rows), generator=generator) < 0.5, 0] = 0  # bos may also precede the middle of a work
        return [rows[i : i + args.rows] for i in range(0, len(rows) - args.rows + 1, args.rows)]

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(make)
        for _ in range(args.epochs):
            current, pending = pending, pool.submit(make)
            yield current.result()


@torch.no_grad()
def mean_loss(model: nn.Module, streams: list[list[int]], device: str, dtype: torch.dtype) -> tuple[float, int]:
    """Mean loss per predicted token over non-overlapping windows of every stream, and the number of predictions."""
    model.eval()
    total, count = 0.0, 0
    with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
        for stream in streams:
            windows = [stream[i : i + WINDOW] for i in range(0, len(stream) - 1, WINDOW)]
            tail = [windows.pop()] if len(windows[-1]) < WINDOW else []
            size = 8 if device == "cpu" else 64
            for batch in [*(windows[i : i + size] for i in range(0, len(windows), size)), *([tail] if tail else [])]:
                ids = torch.tensor(batch, device=device)
                predictions = ids[:, 1:].numel()
                total += model(ids, labels=ids, use_cache=False).loss.item() * predictions
                count += predictions
    return total / count, count


def save(model: DeepseekV3ForCausalLM, tokenizer: Any, out: Path, shard_size: str) -> None:
    """Write a bf16 checkpoint; the router stays fp32, as transformers loads it."""
    model = copy.deepcopy(model).cpu()
    for name, parameter in model.named_parameters():
        if ".mlp.gate." not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.config.attention_dropout = 0.0
    model.config._experts_implementation = None
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=1, pad_token_id=1, do_sample=True, temperature=0.8, top_p=0.95
    )
    model.save_pretrained(out, max_shard_size=shard_size)
    tokenizer.save_pretrained(out)


def train(corpus: Corpus, args: argparse.Namespace) -> None:
    """Train, keep the weights with the lowest validation loss, write them to `args.out`."""
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = make_config(args)
    tokenizer = train_tokenizer(corpus.train, config.vocab_size, args.seq_len)
    core = tokenizer.backend_tokenizer
    validation = encode_works(core, corpus.validation)

    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    model.set_experts_implementation("dense" if device == "cuda" else "eager")
    balancer = Balancer(model)
    regularise(model, args.dropout)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")

    schedule = Schedule(args.epochs, args.max_minutes)
    step, best, best_state, saved = 0, math.inf, None, 0.0
    for epoch, batches in enumerate(epochs(core, corpus.train, args, schedule)):
        model.train()
        running = torch.zeros((), device=device)
        for done, batch in enumerate(batches, 1):
            anneal = 0.5 * (1 + math.cos(math.pi * schedule.progress()))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min((step + 1) / args.warmup, 0.01 + 0.99 * anneal)
            ids = batch.to(device, non_blocking=True)
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            balancer.update(args.bias_rate * anneal)
            running += loss.detach()
            step += 1
            schedule.epochs_done = epoch + done / len(batches)
            finished = schedule.progress() >= 1.0 or step == args.max_steps
            if finished:
                break
        balancer.load.clear()
        loss_value, _ = mean_loss(model, validation, device, dtype)
        minutes, mark = schedule.minutes(), ""
        if loss_value < best:
            best, best_state, mark = loss_value, copy.deepcopy(model.state_dict()), "*"
        print(
            f"epoch {epoch + 1:3d} step {step:5d} {minutes:5.2f} min  train {running.item() / done:.4f}  "
            f"validation {loss_value:.4f} (perplexity {math.exp(loss_value):.2f}){mark}  "
            f"busiest expert {balancer.imbalance():.2f}x",
            flush=True,
        )
        balancer.load.clear()
        if mark and not finished and minutes - saved > args.save_minutes:
            saved = minutes
            save(model, tokenizer, args.out, args.shard_size)
        if finished:
            break
    assert best_state is not None
    model.load_state_dict(best_state)
    save(model, tokenizer, args.out, args.shard_size)
    record = {"steps": step, "epochs": epoch + 1, "minutes": round(schedule.minutes(), 2), "validation_loss": best}
    record |= {k: getattr(args, k) for k in ("seed", "lr", "dropout", "weight_decay", "bpe_dropout", "rows", "seq_len")}
    print(json.dumps(record))


def evaluate(args: argparse.Namespace, text: str) -> dict[str, float]:
    """Perplexity of the saved checkpoint on `text`: bf16 weights, fp32 arithmetic."""
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    ids = tokenizer(text, verbose=False)["input_ids"]
    loss, predictions = mean_loss(model, [ids], "cpu", torch.float32)
    nats = loss * (len(ids) - 1)  # the first token of a window is not predicted; charge it the mean
    return {
        "tokens": len(ids),
        "predictions": predictions,
        "loss": round(loss, 4),
        "perplexity_per_token": round(math.exp(loss), 2),
        "perplexity_per_word": round(math.exp(nats / len(text.split())), 1),
        "bits_per_byte": round(nats / math.log(2) / len(text.encode()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--corpus", type=Path, help="unpacked source distribution (default: download it)")
    parser.add_argument("--evaluate", action="store_true", help="measure OUT on OUT/heldout.txt; do not train")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="bound on training time")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps (smoke tests)")
    parser.add_argument("--save-minutes", type=float, default=0.5, help="least time between saves while training")
    parser.add_argument("--shard-size", default="16MB")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16, help="rows in a batch")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--bpe-dropout", type=float, default=0.1)
    parser.add_argument("--bias-rate", type=float, default=1e-3, help="step of e_score_correction_bias")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.evaluate:
        with tempfile.TemporaryDirectory() as tmp:
            corpus = load_corpus(args.corpus or fetch(Path(tmp)))
        (args.out / "heldout.txt").write_text(heldout_excerpt(corpus.test[0]), encoding="utf-8")
        train(corpus, args)
    print(json.dumps(evaluate(args, (args.out / "heldout.txt").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
