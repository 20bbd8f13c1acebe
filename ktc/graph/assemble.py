"""The parts that lowering puts together: buffers, caches and nodes so far, and what a norm or a linear becomes.

What a model is made of is lower.py's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktc.errors import UnsupportedModelError
from ktc.graph.inventory import Inventory
from ktc.graph.ir import Buffer, BufferType, Node, Rows, State


class Assembly:
    """A program under construction.

    Attributes:
        eps: of the norms; `residual_scale`: of what a norm adds to the residual stream first.
        callbacks: module that stays Hugging Face's code -> why.
    """

    def __init__(self, inventory: Inventory, eps: float, residual_scale: float, callbacks: dict[str, str]) -> None:
        self.inventory, self.eps, self.residual_scale = inventory, eps, residual_scale
        self.callbacks = callbacks
        self.buffers: list[Buffer] = []
        self.states: list[State] = []
        self.nodes: list[Node] = []

    def buffer(self, name: str, cols: int, rows: Rows = "T", dtype: BufferType = "f32") -> int:
        self.buffers.append(Buffer(len(self.buffers), name, rows, cols, dtype))
        return len(self.buffers) - 1

    def state(self, name: str, floats: int) -> int:
        self.states.append(State(len(self.states), name, floats))
        return len(self.states) - 1

    def cols(self, b: int) -> int:
        return self.buffers[b].cols

    def tensor(self, name: str) -> str:
        found = self.inventory.find(name)
        if found is None:
            raise UnsupportedModelError(f"the decode graph needs {name}, which this model does not have")
        return found

    def norm(
        self, name: str, x: int, out: str, *, deltas: tuple[int, ...] = (), eps: float | None = None, rows: Rows = "T"
    ) -> tuple[int, int]:
        """y = rms_norm(x + scale * sum(deltas)); returns (y, the sum or x)."""
        width = self.cols(x)
        weight = self.tensor(f"{name}.weight")
        cols = self.inventory.shape(weight)[0]
        y = self.buffer(out, width, rows)
        total = self.buffer(f"{out}.sum", width, rows) if deltas else x
        params = {"cols": cols, "groups": width // cols, "eps": self.eps if eps is None else eps}
        if deltas:
            params["scale"] = self.residual_scale
        outputs = (y, total) if deltas else (y,)
        self.nodes.append(Node("rms_norm", name, (x, *deltas), outputs, params=params, weights={"weight": weight}))
        return y, total

    def linear(self, name: str, x: int, out: str, rows: Rows = "T") -> int:
        packed = self.inventory.linears.get(name)
        if packed is not None:
            n, k = packed.n, packed.k
            weights = {"tiles": f"{name}.tiles"}
            weights |= {"scale": f"{name}.scale"} if packed.layout.scale_count else {}
            weights |= {"mult": f"{name}.mult"} if packed.layout.mult_bytes else {}
            weights |= {"bias": f"{name}.bias"} if packed.bias else {}
        else:
            weight = self.tensor(f"{name}.weight")
            n, k = self.inventory.shape(weight)
            weights = {"weight": weight}
            bias = self.inventory.find(f"{name}.bias")
            weights |= {"bias": bias} if bias is not None else {}
        y = self.buffer(out, n, rows)
        self.nodes.append(Node("linear", name, (x,), (y,), params={"n": n, "k": k}, weights=weights))
        return y

    def has(self, name: str) -> bool:
        return self.inventory.find(name) is not None

    def native(self, module: str, x: int, out: str, make: Callable[[], int], **params: float) -> int:
        """What `make` assembles; a callback with `params` if the module is named in `callbacks`, or turns out to have
        no native operator, which is then the reason that `callbacks` gives."""
        if module not in self.callbacks:
            begun: list[tuple[list[Any], int]] = [(part, len(part)) for part in (self.buffers, self.states, self.nodes)]
            try:
                return make()
            except UnsupportedModelError as error:
                for part, length in begun:
                    del part[length:]
                self.callbacks[module] = error.message
        y = self.buffer(out, self.cols(x))
        self.nodes.append(Node("callback", module, (x,), (y,), params={"cols": self.cols(x), **params}, module=module))
        return y
