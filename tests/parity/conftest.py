"""Compiled tiny bundles of every family, one kernel library per variant, Hugging Face models in fp32.

To keep the matrix affordable, kernels are not generated per bundle: one library per variant, of kernels for
any K, serves them all (`kernel_library=` of `ktc.load`). tests/parity/test_own_kernels.py takes the way of
a user: the bundle's own kernels.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import TINY, make_tiny

RECIPES = ("fp32", "bf16", "int8", "int4")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.707}  # fmt: skip
# name -> (family, config overrides, model_type that is written into config.json or None)
MODELS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    **{family: (family, {}, None) for family in TINY},
    "deepseek_v2_q_lora": ("deepseek_v2", {"q_lora_rank": 24, "rope_parameters": YARN}, None),
    "deepseek_v3_yarn": ("deepseek_v3", {"rope_parameters": YARN, "num_hidden_layers": 3}, None),
    "kimi_k2": ("deepseek_v3", {"n_group": 1, "topk_group": 1}, "kimi_k2"),
    "mixtral_window": ("mixtral", {"sliding_window": 16}, None),
}
SCHEMES = (("fp32", "none", 0), ("bf16", "none", 0), ("int8", "channel", 0), ("int4", "codebook", 16))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="session")
def checkpoint(folder: Path) -> Callable[[str], Path]:
    """name of MODELS -> checkpoint in bf16 with a byte-level tokenizer and a chat template."""

    def get(name: str) -> Path:
        path = folder / name
        if not path.exists():
            family, overrides, alias = MODELS[name]
            make_tiny(family, path, dtype="bf16", tokenizer="chat", **overrides)
            if alias is not None:
                config = path / "config.json"
                config.write_text(config.read_text().replace(f'"model_type": "{family}"', f'"model_type": "{alias}"'))
        return path

    return get


@pytest.fixture(scope="session")
def hf(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """name -> the checkpoint in Hugging Face's own code, fp32."""
    from transformers import AutoModelForCausalLM

    loaded: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in loaded:
            path = checkpoint(name)
            if MODELS[name][2] is not None:  # transformers does not know the alias: the other name, the same bytes
                import shutil

                twin = path.with_name(path.name + "-hf")
                shutil.copytree(path, twin)
                config = twin / "config.json"
                config.write_text(config.read_text().replace(str(MODELS[name][2]), MODELS[name][0]))
                path = twin
            loaded[name] = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, experts_implementation="eager"
            ).eval()
        return loaded[name]

    return get


@pytest.fixture(scope="session")
def bundle(folder: Path, checkpoint: Callable[[str], Path]) -> Callable[..., Path]:
    """(name, recipe, nodes=1) -> compiled bundle without kernels."""
    from ktc.compile import compile_checkpoint

    def get(name: str, recipe: str, nodes: int = 1) -> Path:
        path = folder / f"{name}-{recipe}-{nodes}.ktc"
        if not path.exists():
            compile_checkpoint(checkpoint(name), recipe, path, nodes=nodes, variants=(), jobs=1)
        return path

    return get


@pytest.fixture(scope="session")
def library() -> Callable[[str], Path]:
    """variant -> kernel library for all of SCHEMES, any K. Skips where the host cannot run it."""
    from ktc import _runtime
    from ktc.codegen.build import build_variants
    from ktc.codegen.spec import KernelSpec, KernelSpecs
    from ktc.codegen.variants import runnable

    specs = KernelSpecs(
        tuple(
            KernelSpec(*scheme, epilogue)  # type: ignore[arg-type]
            for scheme in SCHEMES
            for epilogue in ("store", "scatter_add", "silu_mul", "swiglu_oai")
        )
    )
    here = runnable(frozenset(_runtime.cpu_features()), automatic=False)

    def get(variant: str) -> Path:
        if variant not in here:
            pytest.skip(f"this machine cannot run {variant}")
        return Path(build_variants(specs, [variant])[variant].path)

    return get


@pytest.fixture(scope="session")
def best_variant() -> str:
    """The first automatic variant of this host; KTC_TEST_VARIANT picks another for the whole run."""
    from ktc import _runtime
    from ktc.codegen.variants import runnable

    return os.environ.get("KTC_TEST_VARIANT") or runnable(frozenset(_runtime.cpu_features()))[0]


@pytest.fixture(scope="session")
def loaded(bundle: Callable[..., Path], library: Callable[[str], Path], best_variant: str) -> Callable[..., Any]:
    """(name, recipe) -> the bundle loaded on the best variant; shared, so leave it as it is."""
    import ktc

    models: dict[tuple[str, str], Any] = {}

    def get(name: str, recipe: str) -> Any:
        if (name, recipe) not in models:
            models[name, recipe] = ktc.load(bundle(name, recipe), kernel_library=library(best_variant), threads=2)
        return models[name, recipe]

    return get


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |a - e| / max |e|; infinite if anything is not finite."""
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max())


def cache_of(model: Any, kind: str, length: int = 256) -> Any:
    from transformers import DynamicCache, StaticCache

    if kind == "static":
        return StaticCache(config=copy.deepcopy(model.config), max_cache_len=length)
    return DynamicCache(config=model.config)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, shape, generator=generator)
