"""Program + weights -> a native executor.

`Weights` is the only thing an executor needs to know about where weights come from: a bundle
(ktc/native/weights.py) or a Hugging Face model in memory (ktc/graph/oracle.py). The executor holds
pointers: whoever keeps it must keep the `Weights` too (`GraphExecutor` does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ktc.graph.arena import ArenaLayout, plan_arena
from ktc.graph.ir import Node, Program
from ktc.graph.verify import verify
from ktc.plan.deferral import check_split

PREFILL_CHUNK = 512
"""Rows of one prefill step: bounds every intermediate, whatever the prompt's length."""

WeightRef = tuple[int, str, int, int]
"""(address, "fp32" | "bf16" | "fp16", rows, columns); a vector has 1 row."""
Callback = Callable[[int, int, int, int, int], None]
"""(address of x, address of y, rows, columns, position), both f32."""

MATRIX_ROLES = {
    "moe_submit": {"gate_up", "down"},
    "embed": {"weight"},
    "linear": {"weight"},
    "mla": {"kv_b"},
    "router": {"weight"},
}


class Weights(Protocol):
    """Where weights come from. Everything returned stays valid as long as this object lives."""

    def matrix(self, name: str) -> WeightRef:
        """A parameter in its stored data type."""

    def vector(self, name: str) -> WeightRef:
        """A parameter widened to fp32."""

    def linear(self, node: Node) -> Any:
        """The native packed linear of a `linear` node that has tiles."""

    def experts(self, module: str) -> Any:
        """The packed experts of a MoE block: a `_runtime.Moe`."""

    def callback(self, node: Node) -> Callback:
        """Hugging Face's code of a `callback` node's module."""


@runtime_checkable
class FileTables(Protocol):
    """Weights that can leave a table in its file."""

    def table(self, name: str) -> Any:
        """The `_runtime.TableFile` of a parameter whose rows `embed` looks up; None: it is in memory, see `matrix`."""


def check_deferral(program: Program, n_deferred: int | None, n_skipped: int) -> None:
    """
    Raises:
        UsageError: fewer than 2 experts would stay immediate, or deferring and skipping at once.
    """
    for node in program.nodes:
        if node.op != "moe_submit":
            continue
        top_k = int(node.params["top_k"])
        deferred = int(node.params.get("n_deferred", 0)) if n_deferred is None else n_deferred
        check_split(top_k, deferred, n_skipped, f"{node.module}: ")


def plan_layouts(program: Program, threads: int, chunk: int, runtime: Any) -> list[ArenaLayout]:
    """One layout for decode, which stays in the cache, and one for a prefill chunk."""
    sizes = sorted({1, min(16, chunk), chunk})
    return [plan_arena(program, rows, threads, runtime.graph_scratch) for rows in sizes]


class GraphExecutor:
    """A program bound to its weights. One step at a time; `position` is the caller's."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        pool: Any = None,
        *,
        context: int | None = None,
        chunk: int = PREFILL_CHUNK,
        n_deferred: int | None = None,
        n_skipped: int = 0,
        isa: str = "",
        trivial: bool = False,
        runtime: Any = None,
    ) -> None:
        """
        Args:
            pool: the process's native pool; None = the calling thread only.
            context: positions of the caches; the program's own by default.
            chunk: most rows of one step.
            n_deferred: experts deferred per MoE layer; None = what the program says.
            isa: force the operators' instruction set (tests).
            trivial: heavy kernels do nothing (overhead measurements only).
        Raises:
            UsageError: the deferral is not possible. ProgramError: the program is malformed.
        """
        if runtime is None:
            from ktc import _runtime as runtime
        verify(program)
        check_deferral(program, n_deferred, n_skipped)
        self.program, self.weights, self.pool = program, weights, pool
        self._isa = isa
        self.context = min(program.context, context) if context else program.context
        self.chunk = min(chunk, self.context)
        threads = pool.threads if pool is not None else 1
        self.layouts = plan_layouts(program, threads, self.chunk, runtime)
        self.native = runtime.Executor(
            pool,
            [(b.rows, b.row_bytes) for b in program.buffers],
            [s.floats_per_position * self.context for s in program.states],
            [(layout.max_rows, layout.nbytes, list(layout.offsets)) for layout in self.layouts],
            self.context,
            program.vocab,
            n_deferred=-1 if n_deferred is None else n_deferred,
            n_skipped=n_skipped,
            trivial=trivial,
            isa=isa,
        )
        self._dense_scratch = runtime.DenseScratch()
        self._constants = {k: np.array(v, dtype=np.float32) for k, v in program.constants.items()}
        for node in program.nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        packed = "tiles" in node.weights
        experts = None
        if node.op == "moe_submit" and node.weights:
            experts = self._unpacked_experts(node)
        elif node.op == "moe_submit":
            experts = self.weights.experts(node.module)
        table = self._table(node)
        elsewhere = packed or table is not None or node.op == "moe_submit"
        refs = {} if elsewhere else {r: self._ref(node, r) for r in node.weights}
        self.native.add(
            node.op,
            node.name,
            list(node.inputs),
            list(node.outputs),
            list(node.states),
            dict(node.params),
            refs,
            linear=self.weights.linear(node) if packed else None,
            experts=experts,
            callback=self.weights.callback(node) if node.op == "callback" else None,
            table=table,
        )

    def _table(self, node: Node) -> Any:
        if node.op != "embed" or not isinstance(self.weights, FileTables):
            return None
        return self.weights.table(node.weights["weight"])

    def _ref(self, node: Node, role: str) -> WeightRef:
        name = node.weights[role]
        if name in self._constants:
            vector = self._constants[name]
            return vector.ctypes.data, "fp32", 1, vector.size
        return self.weights.matrix(name) if role in MATRIX_ROLES.get(node.op, ()) else self.weights.vector(name)

    def _unpacked_experts(self, node: Node) -> Any:
        p = node.params
        biased = [f"{r}_bias" for r in ("gate_up", "down") if f"{r}_bias" in node.weights]
        options: dict[str, Any] = {k: int(p[k]) for k in ("experts", "top_k", "hidden", "intermediate", "activation")}
        options |= {k: bool(p[k]) for k in ("transposed", "interleaved")}
        options |= {k: p[k] for k in ("alpha", "limit")}
        options |= {role: self._ref(node, role) for role in ("gate_up", "down")}
        options |= {role: self._ref(node, role)[0] for role in biased}
        return self.native.dense_experts(self._dense_scratch, isa=self._isa, **options)

    def set_deferral(self, n_deferred: int | None, n_skipped: int = 0) -> None:
        """Change how many experts are deferred or skipped, from the next decode step on; None = what the program says.

        Raises:
            UsageError: as on construction; nothing has changed.
        """
        check_deferral(self.program, n_deferred, n_skipped)
        self.native.set_deferral(-1 if n_deferred is None else n_deferred, n_skipped)

    def step(
        self, ids: NDArray[np.int64], position: int, *, decode: bool = False, rows: int = 1
    ) -> NDArray[np.float32]:
        """Run ids [T] at `position`; logits [rows, vocab] of the last `rows` tokens. T <= chunk."""
        logits = np.empty((rows, self.program.vocab), dtype=np.float32)
        self.native.step(ids, position, decode, logits)
        return logits

    @property
    def prefill_type(self) -> str:
        """Data type of attention over many rows: "bf16" if the program allows it and the CPU has it, else "fp32"; "in
        torch" if no attention is native."""
        if not any(node.op in ("gqa", "mla") for node in self.program.nodes):
            return "in torch"
        wanted = any(node.params.get("bf16") for node in self.program.nodes)
        return "bf16" if wanted and self.native.has_bf16 else "fp32"

    @property
    def arena_bytes(self) -> int:
        return int(self.native.arena_bytes)

    @property
    def state_bytes(self) -> int:
        return int(self.native.state_bytes)
