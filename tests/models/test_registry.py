"""Real configs give a family, its shapes and a model on the meta device; everything unsupported is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ktc.errors import UnsupportedModelError
from ktc.models.family import ExpertShape
from ktc.models.registry import FAMILIES, family_for, hf_config, meta_model, rewrite_config, supported
from tests.tiny import TINY, tiny_config

CONFIGS = Path(__file__).parent.parent / "configs"
REAL = {
    "DeepSeek-V3": ("deepseek_v3", ExpertShape(256, 8, 7168, 2048), 671_026_404_352, 58),
    "Kimi-K2-Instruct": ("deepseek_v3", ExpertShape(384, 8, 7168, 2048), 1_026_408_209_408, 60),
    "GLM-5": ("glm_moe_dsa", ExpertShape(256, 8, 6144, 2048), 743_911_199_232, 75),
    "MiniMax-M2.5": ("minimax_m2", ExpertShape(256, 8, 3072, 1536), 228_689_748_992, 62),
    "Mixtral-8x7B-v0.1": ("mixtral", ExpertShape(8, 2, 4096, 14336), 46_702_792_704, 32),
    "Qwen3-235B-A22B-FP8": ("qwen3_moe", ExpertShape(128, 8, 4096, 1536), 235_093_634_560, 94),
    "Qwen3-30B-A3B": ("qwen3_moe", ExpertShape(128, 8, 2048, 768), 30_532_122_624, 48),
    "gpt-oss-20b": (
        "gpt_oss",
        ExpertShape(32, 4, 2880, 2880, "swiglu_oai", 1.702, 7.0, bias=True),
        20_914_757_184,
        24,
    ),
}


def raw(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}


def test_there_is_a_case_for_every_config() -> None:
    assert {p.stem for p in CONFIGS.glob("*.json")} == set(REAL)


@pytest.mark.parametrize("name", REAL)
def test_real_configs(name: str) -> None:
    model_type, shape, parameters, blocks = REAL[name]
    config = hf_config(raw(name))
    family = family_for(config)
    assert family is FAMILIES[model_type] is family_for(raw(name))
    assert family.shape(config) == shape
    model = meta_model(config)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(t.device.type == "meta" for t in tensors)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(type(m).__name__ == family.moe_class for m in model.modules()) == blocks


def test_a_trillion_parameters_in_seconds_and_little_memory() -> None:
    code = (
        "import json, sys\n"
        "from ktc.host import peak_rss\n"
        "from ktc.models.registry import hf_config, meta_model\n"
        "meta_model(hf_config(json.load(open(sys.argv[1]))))\n"
        "print(peak_rss())"
    )
    file = str(CONFIGS / "Kimi-K2-Instruct.json")
    out = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True, timeout=120)
    assert int(out.stdout) < 2e9


def test_kimi_is_rewritten_in_memory() -> None:
    config = raw("Kimi-K2-Instruct")
    before = json.dumps(config)
    assert rewrite_config(config)["model_type"] == "deepseek_v3"
    assert json.dumps(config) == before
    wrapped = {"model_type": "kimi_k25", "vision_config": {}, "text_config": config}
    assert rewrite_config(wrapped) == rewrite_config(config)
    assert family_for(wrapped).model_type == "deepseek_v3"


def test_no_remote_code_and_no_quantiser_reach_transformers() -> None:
    config = hf_config(raw("DeepSeek-V3"))
    assert not getattr(config, "auto_map", None)
    assert getattr(config, "quantization_config", None) is None


def test_config_spellings_of_released_and_saved_files(tmp_path: Path) -> None:
    """Files saved by transformers say num_local_experts where released ones say num_experts."""
    config = tiny_config("qwen3_moe")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "num_local_experts" in saved and "num_experts" not in saved
    assert family_for(saved).shape(hf_config(saved)) == ExpertShape(8, 2, 64, 32)


@pytest.mark.parametrize("family", TINY)
def test_every_family_has_a_tiny_model(family: str) -> None:
    config = tiny_config(family)
    shape = family_for(config).shape(config)
    model = meta_model(config)
    block = next(m for m in model.modules() if type(m).__name__ == FAMILIES[family].moe_class)
    experts = block.experts
    down = (shape.intermediate, shape.hidden) if experts.is_transposed else (shape.hidden, shape.intermediate)
    assert tuple(experts.down_proj.shape) == (shape.experts, *down)
    assert hasattr(block, FAMILIES[family].router)
    for attribute in (FAMILIES[family].shared, FAMILIES[family].shared_gate):
        assert attribute is None or hasattr(block, attribute)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, "'llama' is a dense model"),
        ({"model_type": "new_moe", "num_experts": 8}, "'new_moe' is a mixture of experts that ktc does not know"),
        ({"model_type": "vlm", "text_config": {"n_routed_experts": 4}}, "'vlm' is a mixture of experts"),
        ({}, "has no model_type"),
        ({"model_type": ["mixtral"]}, "has no model_type"),
    ],
)
def test_c7_dense_or_unknown_models_are_refused(config: dict[str, Any], message: str) -> None:
    # failure C7: an unknown MoE config silently built as dense
    for call in (family_for, hf_config):
        with pytest.raises(UnsupportedModelError, match=message) as caught:
            call(config)
        assert all(name in (caught.value.hint or "") for name in supported())


def test_c7_a_config_without_a_moe_layer_is_refused() -> None:
    # failure C7: a MoE config that builds a dense model
    config = tiny_config("deepseek_v3", first_k_dense_replace=2)
    with pytest.raises(UnsupportedModelError, match="without a single DeepseekV3MoE"):
        meta_model(config)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("DeepSeek-V3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("DeepSeek-V3", {"n_group": 7}, "256 experts in n_group = 7"),
        ("DeepSeek-V3", {"topk_group": 9}, "topk_group = 9"),
        ("DeepSeek-V3", {"topk_group": 0}, "topk_group = 0"),
        ("DeepSeek-V3", {"topk_group": None}, "topk_group = None"),
        ("DeepSeek-V3", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ("gpt-oss-20b", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ("DeepSeek-V3", {"max_position_embeddings": -1}, "max_position_embeddings = -1"),
        ("DeepSeek-V3", {"n_routed_experts": 0}, "0 routed experts"),
        ("DeepSeek-V3", {"num_experts_per_tok": 300}, "to 300 of 256 experts"),
        ("DeepSeek-V3", {"hidden_size": "big"}, "not a valid deepseek_v3 config"),
        ("GLM-5", {"scoring_func": "softmax"}, "scoring_func"),
        ("MiniMax-M2.5", {"use_routing_bias": False}, "use_routing_bias = False"),
        ("MiniMax-M2.5", {"shared_intermediate_size": 1024}, "shared_intermediate_size"),
        ("Mixtral-8x7B-v0.1", {"hidden_act": "relu"}, "hidden_act"),
        ("gpt-oss-20b", {"num_local_experts": 2}, "to 4 of 2 experts"),
    ],
)
def test_values_that_matter_are_refused(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        hf_config(raw(name, **changes))


@pytest.mark.parametrize(
    "changes", [{"topk_method": "noaux_tc"}, {"norm_topk_prob": True}, {"scoring_func": "sigmoid"}]
)
def test_deepseek_v2_values_that_matter(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        family_for(tiny_config("deepseek_v2", **changes))


def test_deepseek_v2_greedy_without_groups() -> None:
    """V2-Lite: topk_method greedy, one group, no q_lora."""
    config = tiny_config("deepseek_v2", topk_method="greedy", n_group=1, topk_group=1, scoring_func="softmax")
    assert family_for(config).shape(config).experts == 8


def test_registry_is_light() -> None:
    code = "import sys, ktc.models.registry; print('torch' in sys.modules or 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
