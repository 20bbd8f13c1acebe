"""A stand-in for libcudart, so that the lane runs here; and bundles that are planned for a CUDA device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.conftest import best_variant, checkpoint, folder  # noqa: F401 - fixtures
from tests.runtime.conftest import reference_lib, reference_path  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[2]
# Experts and linears per data type; everything else follows the model to cuda:0.
RECIPE = """version: 1
name: test-{experts}-{linears}
rules:
{stages}{caches}  - match: {{name: "^$"}}
    replace: {{class: default, device: {device}}}
  - match: {{role: moe}}
    replace:
      class: ktc.FusedMoE
      kwargs: {{data_type: {experts}{scheme}, n_deferred_experts: {deferred}{hot}}}
  - match: {{role: mla}}
    replace: {{class: ktc.MLAAttention}}
    optional: true
{linear_rule}"""
LINEAR = """  - match: {{role: linear}}
    replace:
      class: ktc.Linear
      kwargs: {{data_type: {linears}{scheme}}}
"""
HOST_CACHES = r"""  - match: {{role: mla, name: '\.({layers})\.'}}
    replace: {{class: ktc.MLAAttention, kwargs: {{kv_cache: host}}}}
    optional: true
  - match: {{role: attention, name: '\.({layers})\.'}}
    replace: {{class: default, kwargs: {{kv_cache: host}}}}
    optional: true
"""
SCHEME = {"int4": ", group: 32, scale: integer, group_fallback: pad", "int8": ", group: channel"}


SCHEMES = (("fp32", "none", 0), ("bf16", "none", 0), ("int8", "channel", 0), ("int4", "integer", 32),
           ("int4", "codebook", 16))  # fmt: skip


@pytest.fixture(scope="session")
def library() -> Callable[[str], Path]:
    """variant -> kernel library for all of SCHEMES, any K: one for every bundle of these tests."""
    from ktc.codegen.build import build_variants
    from ktc.codegen.spec import KernelSpec, KernelSpecs

    epilogues = ("store", "scatter_add", "silu_mul", "swiglu_oai")
    specs = KernelSpecs(tuple(KernelSpec(*scheme, e) for scheme in SCHEMES for e in epilogues))  # type: ignore[arg-type]
    return lambda variant: Path(build_variants(specs, [variant])[variant].path)


def cuda_here() -> bool:
    import torch

    return bool(torch.version.cuda is not None and torch.cuda.is_available())


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stand-in."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    out = tmp_path_factory.mktemp("cudart") / "libfake_cudart.so"
    source = Path(__file__).with_name("fake_cudart.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(out)], check=True)
    return out


class FakeCuda:
    """The stand-in's own controls: streams, graphs, failures."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._lib = ctypes.CDLL(self.path)
        for name in ("fake_stream", "fake_end_capture"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._streams: list[int] = []
        self._graphs: list[int] = []

    def stream(self) -> int:
        handle: int = self._lib.fake_stream()
        self._streams.append(handle)
        return handle

    def begin_capture(self, stream: int) -> None:
        self._lib.fake_begin_capture(ctypes.c_void_p(stream))

    def end_capture(self, stream: int) -> int:
        graph: int = self._lib.fake_end_capture(ctypes.c_void_p(stream))
        self._graphs.append(graph)
        return graph

    def launch(self, graph: int, stream: int) -> None:
        self._lib.fake_launch(ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def nodes(self, graph: int) -> int:
        count: int = self._lib.fake_nodes(ctypes.c_void_p(graph))
        return count

    def fail_next(self, error: int) -> None:
        self._lib.fake_fail_next(error)

    def close(self) -> None:
        for stream in self._streams:
            self._lib.fake_stream_destroy(ctypes.c_void_p(stream))
        for graph in self._graphs:
            self._lib.fake_graph_destroy(ctypes.c_void_p(graph))


@pytest.fixture
def fake(fake_path: Path) -> Iterator[FakeCuda]:
    controls = FakeCuda(fake_path)
    yield controls
    controls.close()


@pytest.fixture
def cpu_as_device(fake_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda:0` is the CPU: the whole lane, its callbacks on another thread, everything but CUDA itself."""
    import torch

    from ktc.bundle import judge
    from ktc.cuda import device, experts

    monkeypatch.setattr(experts, "CUDART", str(fake_path))
    monkeypatch.setattr(device, "open_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(judge, "_device", lambda bundle, host: judge.Part("device", "OPTIMAL", "stand-in"))


def _hot(model: Path, hot: int, path: Path) -> str:
    """The rule's options for so many hot experts, with a made-up profile of the model at `path`."""
    if not hot:
        return ""
    use_of(model).write(path)
    return f", hot_experts: {hot}, hot_profile: {path.name}"


def _stages(stages: str) -> str:
    """The rules of a second stage on cuda:1."""
    if not stages:
        return ""
    first, _, last = stages.partition("-")
    layers = "|".join(map(str, range(int(first), int(last or 9) + 1)))
    names = rf"^model\.layers\.({layers})$" if last else rf"^(model\.layers\.({layers})|model\.norm|lm_head)$"
    return f"  - match: {{name: '{names}'}}\n    replace: {{class: default, device: cuda:1}}\n"


def use_of(model: Path, seed: int = 0) -> Any:
    """An `ExpertUse` with random counts for every layer of a model."""
    from ktc.checkpoint import read_config
    from ktc.models.registry import family_for, hf_config
    from ktc.plan.expert_use import ExpertUse, ModelShape

    config = hf_config(read_config(str(model)))
    family = family_for(config)
    s = family.shape(config)
    layers = int(config.num_hidden_layers)
    shape = ModelShape(family.model_type, layers, s.experts, s.top_k, s.hidden, s.intermediate)
    rng = np.random.default_rng(seed)
    return ExpertUse(shape, "random", 100, {i: tuple(rng.integers(0, 99, s.experts).tolist()) for i in range(layers)})


@pytest.fixture(scope="session")
def lane_bundle(folder: Path, checkpoint: Callable[[str], Path]) -> Callable[..., Path]:  # noqa: F811
    """(model, experts, linears or "", device="cuda:0", deferred=0, hot=0, stages="") -> bundle without kernels.

    `host`: regular expression of the numbers of layers whose cache is in host memory.
    `stages`: "1" puts layer 1 and what follows it on cuda:1; "2-3", layers 2 and 3 only.
    """
    from ktc.compile import compile_checkpoint

    def get(
        name: str, experts: str, linears: str = "", device: str = "cuda:0", deferred: Any = 0, hot: int = 0,
        stages: str = "", host: str = "",
    ) -> Path:  # fmt: skip
        stem = f"{name}-{experts}-{linears or 'hf'}-{device.replace(':', '')}-{deferred}-{hot}-{stages}-{host}"
        path = folder / f"{stem}.ktc"
        if not path.exists():
            rule = LINEAR.format(linears=linears, scheme=SCHEME.get(linears, "")) if linears else ""
            text = RECIPE.format(
                experts=experts, linears=linears or "hf", scheme=SCHEME.get(experts, ""), device=device,
                deferred=deferred, linear_rule=rule, hot=_hot(checkpoint(name), hot, folder / f"{stem}.json"),
                stages=_stages(stages), caches=HOST_CACHES.format(layers=host) if host else "",
            )  # fmt: skip
            recipe = folder / f"{stem}.yaml"
            recipe.write_text(text)
            compile_checkpoint(checkpoint(name), recipe, path, variants=(), jobs=1)
        return path

    return get
