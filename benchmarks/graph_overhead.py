"""What a decode step costs outside the heavy kernels: a DeepSeek-V3-shaped program with its kernels made trivial.

    python benchmarks/graph_overhead.py [--layers 61] [--hidden 7168]

Norms, router choice, activations, residuals, submit and collect and the walk over the nodes run as they
do in a model; attention, router logits and experts return at once,
linears only fill their outputs and are not counted. Prints microseconds a layer and where they go.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ktc.graph.build import Callback, GraphExecutor, WeightRef
from ktc.graph.inventory import Inventory
from ktc.graph.ir import Node, Program
from ktc.graph.lower import lower
from ktc.models.registry import meta_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--deferred", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    program = _program(args.layers, args.hidden)
    graph = GraphExecutor(
        program, _Noise(args.hidden), None, context=64, chunk=1, trivial=True, n_deferred=args.deferred
    )
    ids, logits = np.array([0]), np.empty((1, program.vocab), np.float32)
    print(f"{args.layers} layers, hidden {args.hidden}, {len(program.nodes)} nodes, operators {graph.native.isa}")
    spent: dict[str, list[int]] = {}
    for _ in range(args.steps):
        graph.native.profile(True)
        graph.native.step(ids, 5, True, logits)
        times = {op: ns for op, (ns, _) in graph.native.times().items()}
        times["outside linears"] = sum(times.values()) - times["linear"]
        for op, ns in times.items():
            spent.setdefault(op, []).append(ns)
    for op, ns_list in sorted(spent.items(), key=lambda item: -np.median(item[1])):
        middle, best = np.median(ns_list) / 1000 / args.layers, np.min(ns_list) / 1000 / args.layers
        print(f"  {op:<15} {middle:6.2f} us a layer (best {best:.2f})")


def _program(layers: int, hidden: int) -> Program:
    """DeepSeek-V3's shape (the defaults of its config class), MoE in every layer."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "deepseek_v3", num_hidden_layers=layers, hidden_size=hidden, first_k_dense_replace=0, vocab_size=1024
    )
    return lower(config, Inventory.from_model(meta_model(config)))


class _Noise:
    """Weights of a program whose kernels read none: one shared block, large enough for every vector."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        self.block = np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32)

    def matrix(self, name: str) -> WeightRef:
        return self.block.ctypes.data, "fp32", 1, self.hidden

    def vector(self, name: str) -> WeightRef:
        return self.block.ctypes.data, "fp32", 1, self.hidden

    def linear(self, node: Node) -> Any:
        raise AssertionError("nothing is packed")

    def experts(self, module: str) -> Any:
        raise AssertionError("nothing is packed")

    def callback(self, module: str) -> Callback:
        raise AssertionError("no callbacks")


if __name__ == "__main__":
    main()
