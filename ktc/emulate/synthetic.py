"""A MoE model that exists only in memory: DeepSeek-V2's graph of any size, random weights, experts really packed.

Everything is what a bundle would give - plan, program, kernels, experts in huge pages with memory of their own in every
layer - except that device weights are slices of one random block, so that a stack of realistic experts needs neither a
checkpoint nor a disk. Routing comes from real (random) routers.
Letters: E experts, H hidden, I expert intermediate size, k experts per token.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ktc.engine.packed import native_moe
from ktc.errors import KtcError, UsageError
from ktc.graph.build import Callback, GraphExecutor, WeightRef
from ktc.graph.ir import Node
from ktc.perf.dense_experts import random_experts
from ktc.perf.experts import KtcWeights, kernel_library
from ktc.perf.shapes import SCHEMES, MoeShape
from ktc.plan.ir import Plan
from ktc.progress import status

FORMATS = ("int4", "int8", "bf16")
VOCAB = 4096
"""Small: lm_head is not what is measured."""
_RANK, _ROPE, _HEAD = 512, 64, 128  # of V2's latent attention
_SIGMA = 0.02


@dataclass(frozen=True)
class StackOptions:
    """
    Attributes:
        shape: of the routed experts; shared: shared experts of each layer, as wide as a routed one.
        data_type: of the routed experts, one of FORMATS; everything else is bf16.
        context: positions of the (real) caches.
        library: a kernel library to use instead of one built for this shape.
    """

    shape: MoeShape
    layers: int = 12
    shared: int = 2
    data_type: str = "int4"
    context: int = 64
    threads: int | None = None
    variant: str | None = None
    library: str | None = None
    seed: int = 0


def config(options: StackOptions) -> dict[str, Any]:
    """config.json of the stack."""
    shape = options.shape
    return {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "n_shared_experts": options.shared,
        "first_k_dense_replace": 0,
        "num_hidden_layers": options.layers,
        "num_attention_heads": max(1, shape.hidden // _HEAD),
        "num_key_value_heads": max(1, shape.hidden // _HEAD),
        "kv_lora_rank": _RANK,
        "q_lora_rank": None,
        "qk_nope_head_dim": _HEAD,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _HEAD,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }


def recipe_text(data_type: str) -> str:
    """Packed experts; everything else stays bf16, as it would on a GPU."""
    scheme = SCHEMES[data_type]
    group = {"int4": f", group: {scheme.group}, scale: {scheme.scale}, group_fallback: pad", "int8": ", group: channel"}
    return f"""version: 1
name: emulate-{data_type}
rules:
  - match: {{role: moe}}
    replace:
      class: ktc.FusedMoE
      device: cpu
      kwargs: {{backend: hybrid_AMX_AVX512, data_type: {data_type}{group.get(data_type, "")}, n_deferred_experts: 0}}
  - match: {{role: mla}}
    replace: {{class: ktc.MLAAttention, device: cpu}}
"""


class StackWeights:
    """Implements `ktc.graph.build.Weights`."""

    def __init__(self, plan: Plan, options: StackOptions, lib: Any, pool: Any) -> None:
        self.options, self.lib, self.pool = options, lib, pool
        self.shapes = {f"{m.name}.{key}": shape for m in plan.modules for key, (shape, _) in m.params.items()}
        rng = np.random.default_rng(options.seed)
        largest = max(int(np.prod(shape)) for shape in self.shapes.values())
        noise = (rng.standard_normal(largest + (1 << 16), dtype=np.float32) * np.float32(_SIGMA)).view(np.uint32)
        self._bf16 = (noise >> 16).astype(np.uint16)
        self._ones = np.ones(max(1 << 16, options.shape.hidden), np.float32)
        self.layer_of = {m.name: i for i, m in enumerate(plan.moe_modules())}
        self.experts_packed = KtcWeights(
            options.shape,
            SCHEMES[options.data_type],
            plan.nodes,
            random_experts(options.shape, options.seed),
            options.layers,
        )
        self._made: list[Any] = []

    def matrix(self, name: str) -> WeightRef:
        """A slice of the block that no other parameter begins at, most likely: routers differ from layer to layer."""
        shape = self.shapes[name]
        rows, columns = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (1, shape[0])
        offset = zlib.crc32(name.encode()) % (1 << 16) & ~31
        return self._bf16.ctypes.data + 2 * offset, "bf16", rows, columns

    def vector(self, name: str) -> WeightRef:
        """Of norms, all ones; there are no biases."""
        return self._ones.ctypes.data, "fp32", 1, int(np.prod(self.shapes[name]))

    def linear(self, node: Node) -> Any:
        raise KtcError(f"{node.name} is packed, and only experts should be")

    def experts(self, module: str) -> Any:
        packed = self.experts_packed
        made = native_moe(self.lib, self.pool, packed.plan, packed.pointers[self.layer_of[module]])
        self._made.append(made)
        return made

    def callback(self, node: Node) -> Callback:
        raise KtcError(f"{node.module} has no native operator")


def build_stack(options: StackOptions) -> tuple[GraphExecutor, Plan]:
    """The stack on the native executor, with a pool whose callers do not work.

    Raises:
        KtcError: an unknown format, fewer than three layers, not enough memory.
    """
    from ktc import _runtime

    if options.data_type not in FORMATS:
        raise UsageError(f"unknown format {options.data_type!r}", f"one of {', '.join(FORMATS)}")
    if options.layers < 3:
        raise UsageError(f"{options.layers} layers: at least 3 are needed for a layer in the middle")
    needed = options.layers * options.shape.experts * options.shape.expert_bytes(SCHEMES[options.data_type])
    if needed > (free := _available_bytes()):
        raise KtcError(
            f"the experts take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free",
            "give fewer --layers or --experts",
        )
    from ktc.codegen.spec import specs_for
    from ktc.engine import pool as pools
    from ktc.engine.opening import open_library
    from ktc.graph.inventory import Inventory
    from ktc.graph.lower import lower
    from ktc.models.registry import hf_config
    from ktc.plan import build_plan
    from ktc.recipe import parse_recipe

    with status("building the module tree"):
        values = config(options)
        plan = build_plan(values, parse_recipe(recipe_text(options.data_type), "<emulate>"))
        program = lower(hf_config(values), Inventory.from_plan(plan))
    if options.library is None:
        lib = kernel_library(specs_for(plan), options.variant)
    else:
        lib = open_library(options.library, own=True)
    placement = pools.place(_runtime.numa_nodes(), 1, options.threads)
    pool = pools.get_pool(placement, caller_works=False)
    with status("packing random experts"):
        weights = StackWeights(plan, options, lib, pool)
    return GraphExecutor(program, weights, pool, context=options.context, chunk=min(16, options.context)), plan


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62
