"""The runtime's operators as torch custom operators: `ktc::linear`, `ktc::moe_submit`, `ktc::moe_collect`.

An object that brings its own `submit_rows` and `collect_rows` (the CUDA lane's) is called instead of being handed
pointers. The runtime links no torch: these functions hand it data pointers. Each has a fake (shape-only) version, so
that tracing and capture see the same operators that eager modules call. A native operator is named by an integer
handle; the handle lives as long as the object that `register` was given.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next = itertools.count(1)


def register(native: Any) -> int:
    """A handle for a `_runtime.Linear` or `_runtime.Moe`; the caller keeps `native` alive."""
    handle = next(_next)
    _objects[handle] = native
    return handle


def native(handle: int) -> Any:
    try:
        return _objects[handle]
    except KeyError:
        raise RuntimeError(f"ktc operator {handle} is gone: its model was deleted") from None


_library: Any = torch.library.Library("ktc", "DEF")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, int handle, int n) -> Tensor")
_library.define("moe_submit(Tensor x, Tensor ids, Tensor weights, int handle) -> Tensor")
_library.define("moe_collect(Tensor ticket, Tensor x, int handle) -> Tensor")


def _rows(x: Tensor) -> Tensor:
    """x as f32 rows whose elements are adjacent (a row stride is fine)."""
    if x.dtype != torch.float32:
        x = x.float()
    x = x.reshape(-1, x.shape[-1])
    return x if x.shape[-1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _linear(x: Tensor, handle: int, n: int) -> Tensor:
    rows = _rows(x)
    out = torch.empty(rows.shape[0], n)
    if rows.shape[0]:
        native(handle).forward(rows.data_ptr(), rows.stride(0), rows.shape[0], out.data_ptr(), n)
    return out.view(*x.shape[:-1], n)


def _linear_fake(x: Tensor, handle: int, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=torch.float32)


def _moe_submit(x: Tensor, ids: Tensor, weights: Tensor, handle: int) -> Tensor:
    operator = native(handle)
    if hasattr(operator, "submit_rows"):
        submitted: Tensor = operator.submit_rows(x, ids, weights)
        return submitted
    rows = _rows(x)
    ids = ids.to(torch.int64).contiguous()
    weights = weights.to(torch.float32).contiguous()
    if ids.shape != weights.shape or ids.shape[0] != rows.shape[0]:
        raise RuntimeError(
            f"router gave ids {tuple(ids.shape)}, weights {tuple(weights.shape)} for {rows.shape[0]} rows"
        )
    ticket = operator.submit(
        rows.data_ptr(), rows.stride(0), rows.shape[0], ids.data_ptr(), weights.data_ptr()
    )  # copies its input before it returns
    return torch.tensor(ticket, dtype=torch.int64)


def _moe_submit_fake(x: Tensor, ids: Tensor, weights: Tensor, handle: int) -> Tensor:
    return ids.new_empty((), dtype=torch.int64)


def _moe_collect(ticket: Tensor, x: Tensor, handle: int) -> Tensor:
    operator = native(handle)
    if hasattr(operator, "collect_rows"):
        collected: Tensor = operator.collect_rows(x)
        return collected
    out = torch.empty(x.shape)
    operator.collect(int(ticket), out.data_ptr(), x.shape[-1])
    return out


def _moe_collect_fake(ticket: Tensor, x: Tensor, handle: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


for _name, _function, _fake in (
    ("linear", _linear, _linear_fake),
    ("moe_submit", _moe_submit, _moe_submit_fake),
    ("moe_collect", _moe_collect, _moe_collect_fake),
):
    _library.impl(_name, _function, "CPU")
    if _name != "linear":  # on a device only what brings its own rows' functions works
        _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"ktc::{_name}", _fake, lib=_library)

linear = torch.ops.ktc.linear.default
"""x [..., k] -> f32 [..., n]."""
moe_submit = torch.ops.ktc.moe_submit.default
"""x [T, H], ids [T, top_k], weights [T, top_k] -> ticket i64 []; returns at once."""
moe_collect = torch.ops.ktc.moe_collect.default
"""ticket, x (for its shape [T, H]) -> f32 [T, H]; waits. A fault in a worker is raised here."""
