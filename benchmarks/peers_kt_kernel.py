"""ktc's experts against the kt-kernel wheel on the same work in the same run.

kt-kernel is optional and never a dependency of ktc. Into an environment that has ktc and torch:
    pip install kt-kernel==0.7.2 gguf --no-deps
    python benchmarks/peers_kt_kernel.py --shape v2lite --tokens 1,1024
Where it is not installed, the script says so and exits with 0. Only tables are made here; the method (interleaving,
cold weights, limits in the same run) is that of `ktc bench kernels`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.errors import KtcError
from ktc.perf import kernel_bench, report
from ktc.perf.dense_experts import DenseExpert
from ktc.perf.experts import Contestant, layers_for
from ktc.perf.limits import default_cpus
from ktc.perf.routing import Routing
from ktc.perf.shapes import MoeShape, parse_shape

VERSION = "0.7.2"
# method -> (class in kt_kernel_ext.moe, data type of its arithmetic, bits per parameter without scales)
METHODS = {
    "int4": ("AMXInt4_MOE", "int4", 4),
    "int8": ("AMXInt8_MOE", "int8", 8),
    "bf16": ("AMXBF16_MOE", "bf16", 16),
}
MAX_TOKENS = 4096


class KtKernelExperts:
    """Layers of one kt-kernel MoE class, weights quantised by it from bf16 when it loads.

    Its engine is per process: `engine` is the CPUInfer that all layers share.
    """

    settle = 0.08  # its idle threads spin for about 50 ms after a call
    experts: int

    def __init__(
        self, extension: Any, engine: Any, method: str, shape: MoeShape, dense: list[DenseExpert], layers: int
    ) -> None:
        import torch

        class_name, self.data_type, bits = METHODS[method]
        kind = getattr(extension.moe, class_name, None)
        if kind is None:
            raise KtcError(f"kt-kernel {method}: this build has no {class_name}")
        self.name, self.layers, self.experts = f"kt-kernel {method}", layers, shape.experts
        scales = 4 * (2 * shape.intermediate + shape.hidden) if bits < 16 else 0  # f32 per output channel
        self.expert_bytes = shape.expert_params * bits / 8 + scales
        self.bits = 8 * self.expert_bytes / shape.expert_params
        self._torch, self._engine, self._shape = torch, engine, shape
        self._mask = torch.zeros(shape.experts, dtype=torch.bool)
        self._order = torch.arange(shape.experts, dtype=torch.int64)
        self._out = torch.zeros(0, shape.hidden, dtype=torch.bfloat16)
        sources = {
            name: torch.stack(
                [
                    torch.from_numpy(getattr(dense[e % len(dense)], name)).to(torch.bfloat16)
                    for e in range(shape.experts)
                ]
            )
            for name in ("gate", "up", "down")
        }
        self._moes = [self._load(extension, kind, layer, sources) for layer in range(layers)]

    def _load(self, extension: Any, kind: Any, layer: int, sources: dict[str, Any]) -> Any:
        shape = self._shape
        config = extension.moe.MOEConfig(
            shape.experts, shape.top_k, shape.hidden, shape.intermediate, self._mask.data_ptr()
        )
        config.layer_idx, config.pool, config.max_len = layer, self._engine.backend_, MAX_TOKENS
        for name, weights in sources.items():
            setattr(config, f"{name}_proj", weights.data_ptr())
        if self.data_type == "bf16":  # takes pointers per expert
            for name, weights in sources.items():
                setattr(config, f"{name}_projs", [[w.data_ptr() for w in weights]])
        moe = kind(config)
        self._engine.submit(moe.load_weights_task(self._order.data_ptr()))
        self._engine.sync()
        return moe

    def prepare(self, layer: int, x: NDArray[np.float32], routing: Routing) -> Callable[[], None]:
        torch = self._torch
        xt = torch.from_numpy(x).to(torch.bfloat16)
        ids, weights = torch.from_numpy(routing.ids), torch.from_numpy(routing.weights)
        size = torch.tensor([x.shape[0]], dtype=torch.int32)
        if self._out.shape[0] != x.shape[0]:
            self._out = torch.zeros(x.shape, dtype=torch.bfloat16)
        arguments = (
            size.data_ptr(), ids.shape[1], ids.data_ptr(), weights.data_ptr(), xt.data_ptr(), self._out.data_ptr(),
            False,
        )  # fmt: skip
        moe, engine = self._moes[layer], self._engine

        def call(keep: tuple[Any, ...] = (xt, ids, weights, size, self._out)) -> None:
            engine.submit(moe.forward_task(*arguments))
            engine.sync()

        return call

    def output(self) -> NDArray[np.float32]:
        out: NDArray[np.float32] = self._out.float().numpy()
        return out

    def about(self) -> dict[str, Any]:
        return {"kt-kernel": VERSION, "layers": self.layers}


def make_engine(extension: Any, threads: int) -> Any:
    """kt-kernel's thread pool: one sub-pool on node 0."""
    config = extension.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    return extension.CPUInfer(config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="v2lite")
    parser.add_argument("--tokens", default="1,16,1024")
    parser.add_argument("--format", default="int4,int8", help="of int4, int8, bf16")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--peers", default="none", help="PyTorch's peers too: grouped_mm, int4pack, int8pack")
    parser.add_argument("-o", "--output", choices=report.FORMS, default="md")
    parser.add_argument("--save", type=Path, help="also write the JSON there")
    args = parser.parse_args()
    try:
        from importlib.metadata import version

        import kt_kernel

        found = version("kt-kernel")
    except ImportError as error:
        print(
            f"skipped: kt-kernel {VERSION} is not installed ({error}); pip install kt-kernel=={VERSION} gguf --no-deps"
        )
        return 0
    if found != VERSION:
        print(f"note: kt-kernel {found} is installed, the figures to compare with are of {VERSION}", file=sys.stderr)
    extension = kt_kernel.kt_kernel_ext
    formats = args.format.split(",")
    threads = args.threads or len(default_cpus())
    engine = make_engine(extension, threads)
    missing: list[str] = []

    def peers(shape: MoeShape, dense: list[DenseExpert]) -> list[Contestant]:
        out: list[Contestant] = []
        for method in formats:
            layers = layers_for(shape.experts * shape.expert_params * METHODS[method][2] / 8)
            try:
                out.append(KtKernelExperts(extension, engine, method, shape, dense, layers))
            except (KtcError, RuntimeError) as error:
                missing.append(f"{shape.name}: {error}")
        return out

    options = kernel_bench.Options(
        shapes=[parse_shape(s) for s in args.shape.split(",")],
        tokens=[int(t) for t in args.tokens.split(",")],
        formats=formats,
        peers=[] if args.peers == "none" else args.peers.split(","),
        seconds=args.seconds,
        threads=threads,
    )
    result = kernel_bench.run(options, extra=peers, say=lambda text: print(text, file=sys.stderr))
    result.skipped += missing
    print(report.render(result, args.output))
    if args.save:
        args.save.write_text(report.render(result, "json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
