"""A bundle's weights for the native executor: packed bytes and large matrices once, in huge pages; no torch.

What callback nodes call has its weights elsewhere (modules.py).

Matrices keep their stored data type (bf16 stays bf16, read by the operators); vectors are widened to fp32.
Everything is read file by file, in order, by threads of the node that uses it (failures M1, M5). Only a table whose
rows are looked up stays in its file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ktc.engine.kernels import Kernels
from ktc.engine.memory import huge_bytes, open_table, read_weights, weight_buffer
from ktc.engine.packed import expert_pointers, native_linear, native_moe
from ktc.engine.placement import NodePlacement, check
from ktc.errors import BundleError, KtcError
from ktc.graph.build import MATRIX_ROLES, Callback, WeightRef
from ktc.graph.ir import Node, Program
from ktc.layout import round_up
from ktc.plan.ir import MoePlan
from ktc.progress import Progress

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle, TensorRef
    from ktc.native.modules import BundleModules

ALIGN = 64
PAGE = 4096
"""Spans keep their place within a page, so that they can be read past the page cache."""
PACKED_PARTS = ("tiles", "scale", "mult", "bias")
DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
Key = tuple[int | None, str]


def widen(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """fp32 values of a stored tensor (bf16 as uint16), exactly."""
    if dtype == "BF16":
        return (np.asarray(array).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array).astype(np.float32)


def find_tensor(bundle: Bundle, key: Key) -> TensorRef:
    """
    Raises:
        BundleError: it is missing.
    """
    ref = bundle.tensors.get(key)
    if ref is None:
        where = "on the device" if key[0] is None else f"on node {key[0]}"
        raise BundleError(f"{bundle.path}: tensor {key[1]} is missing {where}", "compile the checkpoint again")
    return ref


def row_tables(program: Program) -> set[str]:
    """Tensors that stay in their file: `embed` looks up rows of them, and no other node (a tied head) uses them."""
    users: dict[str, set[str]] = {}
    for node in program.nodes:
        for name in node.weights.values():
            users.setdefault(name, set()).add(node.op)
    return {name for name, ops in users.items() if ops == {"embed"} and name not in program.constants}


def wanted_tensors(bundle: Bundle, program: Program) -> dict[Key, TensorRef]:
    """What `BundleWeights` will read into its buffers: packed tensors and matrices, neither the small vectors nor the
    tables of `row_tables`.

    Raises:
        BundleError: a tensor is missing.
    """
    wanted: dict[Key, TensorRef] = {}
    tables = row_tables(program)
    for node in program.nodes:
        for role, name in node.weights.items():
            if name in tables:
                continue
            if "tiles" in node.weights or role in MATRIX_ROLES.get(node.op, ()):
                wanted[None, name] = find_tensor(bundle, (None, name))
        if node.op == "moe_submit" and not node.weights:
            prefix = f"{node.module}.experts."
            wanted |= {key: ref for key, ref in bundle.tensors.items() if key[1].startswith(prefix)}
    return wanted


class BundleWeights:
    """Implements `ktc.graph.build.Weights` and `FileTables`. Reads on construction; holds buffers and open files."""

    def __init__(
        self,
        bundle: Bundle,
        program: Program,
        kernels: Kernels,
        progress: Progress | None = None,
        bind: bool = True,
        modules: BundleModules | None = None,
    ) -> None:
        """
        Args:
            kernels: for experts and packed linears; wishes of the recipe that they cannot meet are noted there.
            modules: what the program's callback nodes call.
            bind: place a node's experts on that NUMA node (not where nodes are emulated).
        Raises:
            KtcError: no memory; BundleError: a file cannot be read or a tensor is missing.
        """
        self.bundle, self._kernels = bundle, kernels
        self.moes = {m.name: m.moe for m in bundle.plan.modules if m.moe is not None}
        self.linears = {m.name: m.linear for m in bundle.plan.modules if m.linear is not None}
        self.buffers: list[Any] = []
        self._address: dict[Key, int] = {}
        self._tables: dict[str, Any] = {}
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._native: list[Any] = []
        self._modules = modules
        self._progress = progress
        self._bind = bind and bundle.nodes > 1  # of one node: its threads may be anywhere
        for name in row_tables(program):
            self._tables[name] = self._open_table(name)
        self._read_all(program)

    @property
    def nbytes(self) -> int:
        return sum(int(b.nbytes) for b in self.buffers) + (self._modules.nbytes if self._modules is not None else 0)

    def huge_bytes(self) -> int:
        return huge_bytes(self.buffers)

    def placement(self) -> list[NodePlacement]:
        """Where each node's experts really lie; empty where there is one node, or none is bound."""
        return check(self.buffers)

    # ---- what the executor asks for -----------------------------------------------------------
    def matrix(self, name: str) -> WeightRef:
        return self._address[None, name], *self._shape(name, find_tensor(self.bundle, (None, name)))

    def table(self, name: str) -> Any:
        return self._tables.get(name)

    def vector(self, name: str) -> WeightRef:
        if name not in self._vectors:
            ref = find_tensor(self.bundle, (None, name))
            if ref.dtype not in DTYPES:
                raise BundleError(f"{ref.file}: {name} is {ref.dtype}, not a float vector")
            self._vectors[name] = np.ascontiguousarray(widen(ref.array(), ref.dtype).reshape(-1))
        vector = self._vectors[name]
        return vector.ctypes.data, "fp32", 1, vector.size

    def linear(self, node: Node) -> Any:
        module = node.weights["tiles"].removesuffix(".tiles")
        p = self.linears.get(module)
        if p is None:
            raise BundleError(f"{self.bundle.path}: the graph runs {module} on packed tiles, the plan does not")
        at = {r: self._address[None, node.weights[r]] for r in PACKED_PARTS if r in node.weights}
        made = native_linear(self._kernels.lib, self._kernels.pool, p, at, **self._kernels.options())
        self._native.append(made)
        return made

    def experts(self, module: str) -> Any:
        p = self.moes[module]
        weights = [self._expert_addresses(module, p, node) for node in range(len(p.splits))]
        choice = self._kernels.options(p.backend, str(p.scheme))
        made = native_moe(self._kernels.lib, self._kernels.pool, p, weights, **choice)
        self._native.append(made)
        return made

    def callback(self, node: Node) -> Callback:
        if self._modules is None:
            raise KtcError(f"{node.module} needs Hugging Face's own code", "run with --graph off")
        return self._modules.callbacks.make(node)

    def native_operators(self) -> list[Any]:
        """Every Linear and Moe that was made, those inside called modules included."""
        return [*self._native, *(self._modules.native_operators() if self._modules is not None else [])]

    # ---- reading ------------------------------------------------------------------------------
    def _shape(self, name: str, ref: TensorRef) -> tuple[str, int, int]:
        """Data type, rows and columns of a matrix."""
        if ref.dtype not in DTYPES:
            raise BundleError(f"{ref.file}: {name} is {ref.dtype}, not a float matrix")
        rows = ref.shape[0] if len(ref.shape) > 1 else 1
        return DTYPES[ref.dtype], rows, int(np.prod(ref.shape)) // rows

    def _open_table(self, name: str) -> Any:
        ref = find_tensor(self.bundle, (None, name))
        return open_table(ref.file, name, ref.offset, *self._shape(name, ref))

    def _read_all(self, program: Program) -> None:
        wanted = wanted_tensors(self.bundle, program)
        files: dict[tuple[int | None, Path], list[tuple[Key, TensorRef]]] = {}
        for key, ref in wanted.items():
            files.setdefault((key[0], ref.file), []).append((key, ref))
        for (node_id, file), items in files.items():
            node = node_id if node_id is not None and self._bind else -1
            self._read_file(file, node, sorted(items, key=lambda item: item[1].offset))

    def _read_file(self, file: Path, node: int, items: list[tuple[Key, TensorRef]]) -> None:
        """One buffer a file; neighbouring tensors are one read."""
        spans: list[list[int]] = []  # [offset in the file, size, offset in the buffer]
        total = 0
        for key, ref in items:
            if ref.offset % ALIGN:
                raise BundleError(f"{file}: {key[1]} is not aligned to {ALIGN} bytes")
            if spans and ref.offset == round_up(spans[-1][0] + spans[-1][1], ALIGN):
                spans[-1][1] = ref.offset + ref.nbytes - spans[-1][0]
            else:
                spans.append([ref.offset, ref.nbytes, round_up(total, PAGE) + ref.offset % PAGE])
            total = spans[-1][2] + round_up(spans[-1][1], ALIGN)
        buffer = weight_buffer(total, node, file)
        self.buffers.append(buffer)
        for offset, size, at in spans:
            read_weights(buffer, file, offset, size, at, self._kernels.pool)
            if self._progress is not None:
                self._progress.update(size, file.name)
        index = 0
        for key, ref in items:
            while ref.offset >= spans[index][0] + spans[index][1] and index + 1 < len(spans):
                index += 1
            offset, _, at = spans[index]
            self._address[key] = int(buffer.ptr) + at + ref.offset - offset

    def _expert_addresses(self, module: str, p: MoePlan, node: int) -> list[dict[str, int]]:
        """Per expert the addresses that `_runtime.Moe` takes (0 = none); spans of experts may be split over files."""
        prefix = f"{module}.experts."
        parts = [
            (name[len(prefix) :], self.bundle.tensors[at, name], address)
            for (at, name), address in self._address.items()
            if at == node and name.startswith(prefix)
        ]
        return expert_pointers(parts, p.experts, f"{self.bundle.path}: {module} on node {node}")
