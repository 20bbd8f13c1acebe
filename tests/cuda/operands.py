"""`python -m tests.cuda.operands KERNELS BUNDLE...`: torch's own bookkeeping of devices for models in two stages.

Every tensor of a loaded model becomes one without memory on one of two devices of a made-up backend, and torch refuses
any operation whose operands are on different ones. Prints the name of each model that passed. test_stages.py runs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import ktc
from ktc.bundle import judge
from ktc.cuda import device as devices
from ktc.cuda import experts
from ktc.cuda.build import Places
from ktc.cuda.cache import StaticCache, masks_for
from ktc.cuda.pipeline import Pipeline
from ktc.plan.stages import place

CONTEXT = 64


def spread(model: nn.Module, places: Places) -> None:
    """Parameters and buffers become tensors of their devices."""
    for path, module in model.named_modules():
        device = places.of(path)
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is not None:
                    empty = torch.empty(value.shape, dtype=value.dtype, device=device)
                    table[key] = nn.Parameter(empty, False) if table is module._parameters else empty


@torch.no_grad()
def check(model: Any) -> None:
    """A prefill chunk and a decode step."""
    pipeline, placement = model.ktc_pipeline, place(model.ktc_plan)
    assert isinstance(pipeline, Pipeline) and placement is not None and len(pipeline.stages) == 2
    first, second = pipeline.devices = [torch.device("pair:0"), torch.device("pair:1")]
    crossed: list[int] = []
    plain = pipeline.copy
    pipeline.cross = lambda stage, tensors: (crossed.append(len(tensors)), plain(stage, tensors))[1]
    with FakeTensorMode():
        spread(model, Places(placement, {"cuda:0": first, "cuda:1": second}))
        cache, masks = StaticCache(CONTEXT), masks_for(model.config, CONTEXT, first, torch.bfloat16)
        cache.here = pipeline.here
        for rows in (5, 1):
            positions = torch.zeros(rows, dtype=torch.int64, device=first)
            ids = torch.zeros(1, rows, dtype=torch.int64, device=first)
            cache.positions, mask = positions, masks(positions, None)
            pipeline.carried = (positions, *(mask.values() if isinstance(mask, dict) else (mask,)))
            out = model(input_ids=ids, position_ids=positions[None], attention_mask=mask, cache=cache, use_cache=True)
            assert out.logits.device == second
            assert [keys.device for keys, _ in cache._buffers.values()] == [first, second]
            assert len(pipeline._copies) == crossed[-1], "something crossed that nobody had announced"
        wrong = torch.zeros(1, 1, model.config.hidden_size, dtype=torch.bfloat16, device=first)
        try:
            model.get_submodule("model.layers.1").input_layernorm(wrong)
        except Exception as error:
            assert "pair:0" in str(error) and "pair:1" in str(error), error
        else:
            raise AssertionError("operands on two devices went unnoticed")


def main(library: str, paths: list[str]) -> None:
    _setup_privateuseone_for_python_backend("pair")
    experts.CUDART = os.environ["KTC_TEST_CUDART"]
    devices.open_device = lambda name: torch.device("cpu")  # type: ignore[assignment]
    judge._device = lambda bundle, host: judge.Part("device", "OPTIMAL", "stand-in")  # type: ignore[assignment]
    for path in paths:
        check(ktc.load(path, kernel_library=library, threads=1, dtype="bf16"))
        print(Path(path).name.split("-")[0], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
