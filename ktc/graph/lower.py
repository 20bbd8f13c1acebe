"""Config + inventory -> Program. Lowering, not tracing: every family in scope is one skeleton (families.py).

What the plan packed runs on packed tiles, what it kept runs on the native operators over the kept
weights, which compute the same thing. An attention or a dense MLP that they cannot reproduce, or that the
recipe says so of, is a callback: Hugging Face's own code, which needs torch at run time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ktc.errors import UnsupportedModelError
from ktc.graph.assemble import Assembly
from ktc.graph.families import Skeleton, head_dim, skeleton_for
from ktc.graph.inventory import Inventory
from ktc.graph.ir import LOGITS, Node, Program
from ktc.graph.render import callback_notes
from ktc.graph.rotary import rotary_constants
from ktc.graph.verify import verify
from ktc.layout import Activation
from ktc.models.registry import family_for

ROPE_FREQUENCIES = "rope.inv_freq"
ACTIVATIONS: tuple[Activation, ...] = ("silu_mul", "silu_clamp", "swiglu_oai")
"""In the order of the native enumeration (runtime/src/graph/experts.h)."""
MLA_NORM_EPS = 1e-6
"""q_a_layernorm and kv_a_layernorm ignore config.rms_norm_eps (their constructor's default)."""


def lower(config: Any, inventory: Inventory, callbacks: Collection[str] = ()) -> Program:
    """Build and verify the program of a model.

    Args:
        config: transformers config object.
        callbacks: attention or MLP modules to leave to Hugging Face (`model.layers.0.mlp`), beside those that the
            inventory names.
    Raises:
        UnsupportedModelError: something that neither the native operators nor a callback can do.
    """
    program = _Lowering(config, inventory, dict.fromkeys(callbacks, "as asked for") | inventory.callbacks).run()
    verify(program, inventory.names(), inventory.moes)
    return program


class _Lowering(Assembly):
    """One model."""

    def __init__(self, config: Any, inventory: Inventory, callbacks: dict[str, str]) -> None:
        self.skeleton: Skeleton = skeleton_for(config)
        super().__init__(inventory, float(config.rms_norm_eps), self.skeleton.residual_scale, callbacks)
        self.config = config
        self.hidden = int(config.hidden_size)
        self.cos = self.sin = -1

    # ---- the model ----------------------------------------------------------------------------
    def run(self) -> Program:
        c, s = self.config, self.skeleton
        layers = int(c.num_hidden_layers)
        constants: dict[str, tuple[float, ...]] = {}
        x = self.buffer("embedding", self.hidden)
        self.nodes.append(
            Node("embed", "model.embed_tokens", (), (x,), params={"scale": s.embed_scale},
                 weights={"weight": self.tensor("model.embed_tokens.weight")})
        )  # fmt: skip
        rotary = self.rotary([f"model.layers.{layer}.self_attn" for layer in range(layers)])
        if rotary is not None:
            inv_freq, scaling = rotary
            constants[ROPE_FREQUENCIES] = inv_freq
            self.cos, self.sin = self.buffer("cos", len(inv_freq)), self.buffer("sin", len(inv_freq))
            self.nodes.append(
                Node("rope_table", "model.rotary_emb", (), (self.cos, self.sin), params={"scaling": scaling},
                     weights={"inv_freq": ROPE_FREQUENCIES})
            )  # fmt: skip
        moe_layers = [i for i in range(layers) if self.is_moe(i)]
        deltas: tuple[int, ...] = ()
        for layer in range(layers):
            module, tag = f"model.layers.{layer}", f"L{layer}"
            normed, x = self.norm(f"{module}.input_layernorm", x, f"{tag}.attention_in", deltas=deltas)
            attention = self.attention(layer, f"{module}.self_attn", normed, tag)
            normed, x = self.norm(f"{module}.post_attention_layernorm", x, f"{tag}.mlp_in", deltas=(attention,))
            block = f"{module}.{s.moe}"
            if layer in moe_layers:
                deltas = self.moe(block, normed, tag, last=layer == moe_layers[-1])
            else:
                deltas = (self.mlp(block, normed, f"{tag}.mlp"),)
        # The last residual sum and norm run on the wanted rows only.
        last = [self.last_rows(b) for b in (x, *deltas)]
        final, _ = self.norm("model.norm", last[0], "final", deltas=tuple(last[1:]), rows="R")
        divided = s.logit_divisor != 1.0
        logits = self.linear("lm_head", final, "undivided_logits" if divided else LOGITS, rows="R")
        vocab = self.cols(logits)
        if divided:
            out = self.buffer(LOGITS, vocab, "R")
            params = {"cols": vocab, "divisor": s.logit_divisor}
            self.nodes.append(Node("divide", "lm_head", (logits,), (out,), params=params))
        called = {node.module: self.callbacks.pop(node.module) for node in self.nodes if node.op == "callback"}
        if self.callbacks:
            raise UnsupportedModelError(f"the decode graph has no module {next(iter(self.callbacks))} to call")
        return Program(
            model_type=str(c.model_type),
            hidden=self.hidden,
            vocab=vocab,
            context=int(c.max_position_embeddings),
            buffers=tuple(self.buffers),
            states=tuple(self.states),
            nodes=tuple(self.nodes),
            constants=constants,
            notes=callback_notes(called),
        )

    def last_rows(self, x: int) -> int:
        y = self.buffer(f"{self.buffers[x].name}.last", self.cols(x), "R")
        self.nodes.append(Node("last_rows", self.buffers[x].name, (x,), (y,), params={"cols": self.cols(x)}))
        return y

    # ---- attention ----------------------------------------------------------------------------
    def rotary(self, attentions: list[str]) -> tuple[tuple[float, ...], float] | None:
        """The table of frequencies and its factor; None where no attention needs it: all are callbacks then."""
        stays = self.skeleton.attention_stays
        if not stays and self.callbacks.keys() >= set(attentions):
            return None
        try:
            if not stays:
                return rotary_constants(self.config)
        except UnsupportedModelError as error:
            stays = error.message
        for module in attentions:
            self.callbacks.setdefault(module, stays)
        return None

    def attention(self, layer: int, module: str, x: int, tag: str) -> int:
        make = self.mla if self.skeleton.attention == "mla" else self.gqa
        out = f"{tag}.attention_out"
        return self.native(
            module, x, out, lambda: self.linear(f"{module}.o_proj", make(layer, module, x, tag), out), attention=1,
            window=self.skeleton.window(layer), cache=self.cache_floats(layer),
        )  # fmt: skip

    def cache_floats(self, layer: int) -> int:
        """What Hugging Face's attention keeps of a position."""
        c = self.config
        if self.skeleton.attention == "mla":
            indexed = getattr(c, "indexer_types", None) is not None and c.indexer_types[layer] == "full"
            return int(c.kv_lora_rank) + int(c.qk_rope_head_dim) + (int(c.index_head_dim) if indexed else 0)
        return 2 * int(c.num_key_value_heads) * head_dim(c)

    def bf16(self, *projections: str) -> int:
        """1 if prefill may multiply queries, keys, values and probabilities in bf16.

        That is what the recipe says of an attention's data type through its projections: if all of them are packed
        and none is fp32, everything the attention reads was rounded to bf16 or coarser already.
        """
        packed = [self.inventory.linears.get(name) for name in projections]
        return int(all(linear is not None and linear.data_type != "fp32" for linear in packed))

    def gqa(self, layer: int, module: str, x: int, tag: str) -> int:
        c, s = self.config, self.skeleton
        heads, kv_heads, dim = int(c.num_attention_heads), int(c.num_key_value_heads), head_dim(c)
        q = self.linear(f"{module}.q_proj", x, f"{tag}.q")
        k = self.linear(f"{module}.k_proj", x, f"{tag}.k")
        v = self.linear(f"{module}.v_proj", x, f"{tag}.v")
        weights: dict[str, str] = {}
        for role, buffer in (("q_norm", q), ("k_norm", k)):
            weight = self.inventory.find(f"{module}.{role}.weight")
            if weight is None:
                continue
            if self.inventory.shape(weight)[0] == dim:
                weights[role] = weight  # per head, in the attention node
            else:
                normed, _ = self.norm(f"{module}.{role}", buffer, f"{tag}.{role}")
                q, k = (normed, k) if role == "q_norm" else (q, normed)
        if self.has(f"{module}.sinks"):
            weights["sinks"] = self.tensor(f"{module}.sinks")
        params = {
            "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "rotary_half": self.cols(self.cos),
            "window": s.window(layer), "rope": s.rope, "scale": s.scale, "norm_eps": self.eps, "clip": s.clip,
            "bf16": self.bf16(*(f"{module}.{p}_proj" for p in "qkvo")),
        }  # fmt: skip
        out = self.buffer(f"{tag}.heads", heads * dim)
        scratch = self.buffer(f"{tag}.attention_scratch", 0, "scratch")
        states = (self.state(f"{tag}.keys", kv_heads * dim), self.state(f"{tag}.values", kv_heads * dim))
        self.nodes.append(Node("gqa", module, (q, k, v, self.cos, self.sin), (out, scratch), states, params, weights))
        return out

    def mla(self, layer: int, module: str, x: int, tag: str) -> int:
        c, s = self.config, self.skeleton
        if c.q_lora_rank is None:
            q = self.linear(f"{module}.q_proj", x, f"{tag}.q")
        else:
            q = self.linear(f"{module}.q_a_proj", x, f"{tag}.q_a")
            q, _ = self.norm(f"{module}.q_a_layernorm", q, f"{tag}.q_a_norm", eps=MLA_NORM_EPS)
            q = self.linear(f"{module}.q_b_proj", q, f"{tag}.q")
        kv = self.linear(f"{module}.kv_a_proj_with_mqa", x, f"{tag}.kv")
        heads, v_dim, rank = int(c.num_attention_heads), int(c.v_head_dim), int(c.kv_lora_rank)
        params: dict[str, float] = {
            "heads": heads, "nope": int(c.qk_nope_head_dim), "rope_dim": int(c.qk_rope_head_dim),
            "v_dim": v_dim, "rank": rank, "rope": s.rope, "scale": s.scale,
            "norm_eps": MLA_NORM_EPS, "bf16": self.bf16(*(f"{module}.{p}" for p in (
                "q_proj" if c.q_lora_rank is None else "q_b_proj", "kv_a_proj_with_mqa", "o_proj"))),
        }  # fmt: skip
        weights = {
            "kv_norm": self.tensor(f"{module}.kv_a_layernorm.weight"), "kv_b": self.tensor(f"{module}.kv_b_proj.weight")
        }  # fmt: skip
        out = self.buffer(f"{tag}.heads", heads * v_dim)
        scratch = self.buffer(f"{tag}.attention_scratch", 0, "scratch")
        states = (self.state(f"{tag}.latent", rank + int(c.qk_rope_head_dim)),)
        self.nodes.append(Node("mla", module, (q, kv, self.cos, self.sin), (out, scratch), states, params, weights))
        return out

    # ---- MLP and MoE --------------------------------------------------------------------------
    def is_moe(self, layer: int) -> bool:
        block = f"model.layers.{layer}.{self.skeleton.moe}"
        routed = block in self.inventory.moes or self.has(f"{block}.{self.skeleton.router_name}.weight")
        return routed and block not in self.callbacks

    def mlp(self, module: str, x: int, tag: str) -> int:
        return self.native(module, x, f"{tag}.out", lambda: self.native_mlp(module, x, tag))

    def native_mlp(self, module: str, x: int, tag: str) -> int:
        if getattr(self.config, "hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModelError(f"activation {self.config.hidden_act!r} has no native operator")
        gate = self.linear(f"{module}.gate_proj", x, f"{tag}.gate")
        up = self.linear(f"{module}.up_proj", x, f"{tag}.up")
        h = self.buffer(f"{tag}.h", self.cols(gate))
        self.nodes.append(Node("silu_mul", module, (gate, up), (h,), params={"cols": self.cols(gate)}))
        return self.linear(f"{module}.down_proj", h, f"{tag}.out")

    def moe(self, module: str, x: int, tag: str, last: bool) -> tuple[int, ...]:
        s, r = self.skeleton, self.skeleton.router
        gate = f"{module}.{s.router_name}"
        weights = {"weight": self.tensor(f"{gate}.weight")}
        experts = self.inventory.shape(weights["weight"])[0]
        top_k = int(self.config.num_experts_per_tok)
        if self.has(f"{gate}.bias"):
            weights["bias"] = self.tensor(f"{gate}.bias")
        if r.choice_bias:
            weights["choice_bias"] = self.tensor(f"{module}.{r.choice_bias}")
        params: dict[str, float] = {
            "hidden": self.hidden, "experts": experts, "top_k": top_k, "score": r.score, "group_score": r.group_score,
            "n_group": r.n_group, "topk_group": r.topk_group, "renormalise": int(r.renormalise),
            "renormalise_eps": r.renormalise_eps, "scale": r.scale,
        }  # fmt: skip
        expert_weights = self.buffer(f"{tag}.expert_weights", top_k)
        expert_ids = self.buffer(f"{tag}.expert_ids", top_k, dtype="i64")
        outputs = (
            expert_weights, expert_ids, self.buffer(f"{tag}.router_logits", experts),
            self.buffer(f"{tag}.router_scratch", 0, "scratch"),
        )  # fmt: skip
        self.nodes.append(Node("router", gate, (x,), outputs, params=params, weights=weights))
        plan = self.inventory.moes.get(module)
        planned = plan.n_deferred_experts if plan is not None else 0
        # On the CPU device there is nothing to overlap with, so "auto" defers none.
        deferred = 0 if last or planned == "auto" else int(planned)
        params = {"top_k": top_k, "n_deferred": deferred, "last": int(last)}
        unpacked = {} if plan is not None else self.unpacked_experts(module, params)
        inputs = (x, expert_weights, expert_ids)
        self.nodes.append(Node("moe_submit", module, inputs, params=params, weights=unpacked, module=module))
        shared = self.shared(module, x, tag)
        routed = self.buffer(f"{tag}.routed", self.hidden)
        self.nodes.append(Node("moe_collect", module, (), (routed,), params={"hidden": self.hidden}))
        return (routed,) if shared is None else (routed, shared)

    def unpacked_experts(self, module: str, params: dict[str, float]) -> dict[str, str]:
        """Weights of a block that no rule matched, in the layout of Hugging Face's container; fills `params`."""
        family = family_for(self.config)
        shape = family.shape(self.config)
        fused = [names for names in family.experts if names.gate_up == "experts.gate_up_proj"]
        params |= {
            "experts": shape.experts, "hidden": shape.hidden, "intermediate": shape.intermediate,
            "activation": ACTIVATIONS.index(shape.activation), "alpha": shape.alpha, "limit": shape.limit,
            "transposed": int(any(n.transposed for n in fused)), "interleaved": int(any(n.interleaved for n in fused)),
        }  # fmt: skip
        roles = {r: f"{module}.experts.{r}_proj" for r in ("gate_up", "down")}
        weights = {role: self.tensor(name) for role, name in roles.items()}
        return weights | {f"{r}_bias": self.tensor(f"{n}_bias") for r, n in roles.items() if self.has(f"{n}_bias")}

    def shared(self, module: str, x: int, tag: str) -> int | None:
        s = self.skeleton
        if s.shared is None:
            return None
        out = self.mlp(f"{module}.{s.shared}", x, f"{tag}.shared")
        if s.shared_gate is None:
            return out
        gate = self.linear(f"{module}.{s.shared_gate}", x, f"{tag}.shared_gate")
        gated = self.buffer(f"{tag}.shared_gated", self.hidden)
        self.nodes.append(
            Node("sigmoid_mul", f"{module}.{s.shared_gate}", (gate, out), (gated,), params={"cols": self.hidden})
        )
        return gated
