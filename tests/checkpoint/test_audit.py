"""Every tensor is consumed, known to be unneeded, or an error; every parameter is there in its shape."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktc.checkpoint import open_checkpoint
from ktc.checkpoint.audit import Audit, audit, audit_plan, expected_of, moe_blocks_of
from ktc.errors import CheckpointError
from ktc.models.registry import family_for, hf_config, meta_model
from ktc.plan import build_plan
from ktc.recipe import load_recipe
from tests.checkpoint.test_experts import formats
from tests.tiny import INDEX, TINY


def run(path: Path, recipe: str = "int4") -> Audit:
    """The audit of a checkpoint by a plan made from its own config."""
    checkpoint = open_checkpoint(path)
    config = hf_config(checkpoint.config)
    family = family_for(config)
    return audit_plan(checkpoint, family, build_plan(config, load_recipe(recipe)), family.shape(config))


def changed(
    source: Path, target: Path, edit: Callable[[dict[str, Any]], None], config: dict[str, Any] | None = None
) -> Path:
    """A copy of a tiny single-file checkpoint with its tensors (and config) edited."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    if config:
        old = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**old, **config}))
    return target


@pytest.mark.parametrize(("family", "fmt"), [(f, fmt) for f in TINY for fmt in formats(f)])
def test_every_family_and_format_is_fully_consumed(tiny_checkpoint: Callable[..., Path], family: str, fmt: str) -> None:
    path = tiny_checkpoint(family, fmt=fmt)
    result = run(path)
    assert result.ignored == {} and result.lines() == []
    assert len(result.readers) == (1 if "first_k_dense_replace" in TINY[family] else 2)
    checkpoint = open_checkpoint(path)
    assert result.nbytes == sum(checkpoint.info(n).nbytes for n in checkpoint.names())


def test_expected_names_are_those_of_the_module_tree(tiny_checkpoint: Callable[..., Path]) -> None:
    config = hf_config(open_checkpoint(tiny_checkpoint("deepseek_v3")).config)
    plan = build_plan(config, load_recipe("int8"))
    tree = {n: tuple(t.shape) for n, t in meta_model(config).state_dict().items() if ".mlp.experts." not in n}
    assert expected_of(plan) == tree
    assert moe_blocks_of(plan) == ["model.layers.1.mlp"]


def test_c3_unknown_tensors_are_an_error_that_names_them(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    # failure C3: tensors nobody knows (tid2eid and others) must not be dropped without a word
    import torch

    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.gate.tid2eid"] = torch.zeros(3)
        for i in range(6):
            tensors[f"model.zzz.{i}"] = torch.zeros(1)

    path = changed(tiny_checkpoint("deepseek_v3"), tmp_path / "m", edit)
    with pytest.raises(CheckpointError, match="7 tensors that no module of deepseek_v3 reads") as caught:
        run(path)
    assert "tid2eid" in caught.value.message and "and 3 more" in caught.value.message


def test_c3_known_tensors_are_ignored_and_said(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    # failure C3: input_scale, k_scale and rotary tables are known to be unneeded
    import torch

    def edit(tensors: dict[str, Any]) -> None:
        for name in ("q_proj.input_scale", "k_scale", "v_scale", "rotary_emb.inv_freq"):
            tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(1)

    result = run(changed(tiny_checkpoint("qwen3_moe"), tmp_path / "m", edit))
    assert sum(map(len, result.ignored.values())) == 4 and result.ignored_bytes == 16
    assert any("inv_freq" in line for line in result.lines()) and any("3 tensors" in line for line in result.lines())


def test_c3_a_stray_scale_is_not_ignorable(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    import torch

    path = changed(
        tiny_checkpoint("qwen3_moe"),
        tmp_path / "m",
        lambda t: t.update({"model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1)}),
    )
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        run(path)


def test_c5_mtp_layers_are_skipped_and_said_once(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    # failure C5: layers >= num_hidden_layers are multi-token prediction layers
    import torch

    def edit(tensors: dict[str, Any]) -> None:
        layer = {n: t for n, t in tensors.items() if n.startswith("model.layers.1.")}
        tensors.update({n.replace(".1.", ".2.", 1): t.clone() for n, t in layer.items()})
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128)
        tensors["model.layers.2.embed_tokens.weight"] = torch.zeros(128, 64)

    source = tiny_checkpoint("deepseek_v3")
    result = run(changed(source, tmp_path / "m", edit, {"num_nextn_predict_layers": 1}))
    assert len(result.lines()) == 1
    assert "multi-token prediction layer 2: the model has 2 layers" in result.lines()[0]
    assert result.nbytes == run(source).nbytes
    # Declared in the config but absent from the files: nothing to skip, no error.
    absent = changed(source, tmp_path / "absent", lambda t: None, {"num_nextn_predict_layers": 1})
    assert run(absent).lines() == []


def test_missing_parameter_is_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = changed(tiny_checkpoint("glm4_moe"), tmp_path / "m", lambda t: t.pop("model.layers.1.self_attn.q_proj.bias"))
    with pytest.raises(CheckpointError, match=r"1 parameters .* model\.layers\.1\.self_attn\.q_proj\.bias"):
        run(path)


def test_missing_router_bias_is_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A buffer, not a parameter: as needed as any weight (MiniMax keeps it on the block)."""
    name = "block_sparse_moe.e_score_correction_bias"
    path = changed(tiny_checkpoint("minimax_m2"), tmp_path / "m", lambda t: t.pop(f"model.layers.0.{name}"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.e_score_correction_bias"):
        run(path)


def test_wrong_shape_is_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:100]

    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is \[100, 64\]; the config asks for \[128, 64\]"):
        run(changed(tiny_checkpoint("olmoe"), tmp_path / "m", edit))


def test_weight_of_another_type_is_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()

    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has data type F64"):
        run(changed(tiny_checkpoint("olmoe"), tmp_path / "m", edit))


def test_more_experts_than_the_config_says(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Fewer experts than on disk would silently be another model."""
    config = {"num_local_experts": 6, "num_experts": 6}

    def edit(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith("mlp.gate.weight")]:
            tensors[name] = tensors[name][:6]

    with pytest.raises(CheckpointError, match=r"12 tensors that no module .*experts\.6\."):
        run(changed(tiny_checkpoint("qwen3_moe"), tmp_path / "m", edit, config))


def test_tied_copy_is_dropped_only_if_equal(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_checkpoint("granitemoe")
    embed = "model.embed_tokens.weight"
    equal = changed(source, tmp_path / "1", lambda t: t.update({"lm_head.weight": t[embed].clone()}))
    assert "tied to model.embed_tokens.weight" in run(equal).lines()[0]
    other = changed(source, tmp_path / "2", lambda t: t.update({"lm_head.weight": t[embed] * 2}))
    with pytest.raises(CheckpointError, match=r"ties 'lm_head\.weight' .* stores another value"):
        run(other)


def test_two_spellings_of_one_parameter(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    path = changed(
        tiny_checkpoint("mixtral"),
        tmp_path / "m",
        lambda t: t.update({"model.layers.0.mlp.gate.weight": t[gate].clone()}),
    )
    with pytest.raises(CheckpointError, match=r"are both 'model\.layers\.0\.mlp\.gate\.weight'"):
        run(path)


def test_language_model_wrapper(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Kimi-K2.5's layout: the text model under language_model, with a vision tower beside it."""
    import torch

    def edit(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = torch.zeros(2)
        tensors["mm_projector.proj.weight"] = torch.zeros(2)

    path = changed(tiny_checkpoint("deepseek_v3"), tmp_path / "m", edit)
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": {**text, "model_type": "kimi_k2"}})
    )
    result = run(path)
    assert len(result.readers) == 1 and "not part of the text model" in result.lines()[0]


def test_audit_takes_a_whole_state_dict(tiny_checkpoint: Callable[..., Path]) -> None:
    """Experts' containers and tied names may be among the expected ones."""
    checkpoint = open_checkpoint(tiny_checkpoint("granitemoe"))
    config = hf_config(checkpoint.config)
    model = meta_model(config)
    expected = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    blocks = [n for n, m in model.named_modules() if type(m).__name__ == "GraniteMoeMoE"]
    tied = dict(model.all_tied_weights_keys)
    result = audit(checkpoint, family_for(config), expected, blocks, family_for(config).shape(config), 2, tied)
    assert sorted(result.readers) == blocks


def test_shards_change_nothing(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("mixtral", shards=4)
    assert (path / INDEX).exists()
    assert run(path).nbytes == run(tiny_checkpoint("mixtral")).nbytes
