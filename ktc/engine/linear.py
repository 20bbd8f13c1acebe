"""`KtcLinear`: a dense linear on packed tiles, in place of `torch.nn.Linear`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ktc.engine import ops
from ktc.plan.ir import LinearPlan


class KtcLinear(nn.Module):
    """y f32 [..., n] = x [..., k] W^T + b through `_runtime.Linear`.

    Built without weights; `attach` gives it the native operator once its bytes are in memory.
    """

    def __init__(self, plan: LinearPlan) -> None:
        super().__init__()
        self.plan = plan
        self.in_features, self.out_features = plan.k, plan.n
        self.native: Any = None
        self._handle = 0

    def attach(self, native: Any) -> None:
        """`native`: a `_runtime.Linear` of this shape (it points into memory that the engine keeps)."""
        self.native = native
        self._handle = ops.register(native)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self._handle, self.out_features)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.plan.scheme}"
