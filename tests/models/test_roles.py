"""Roles that recipes match on, names on disk, and the router hook."""

from __future__ import annotations

import pytest

from ktc.errors import CheckpointError
from ktc.models.names import tree_name, tree_to_disk
from ktc.models.registry import FAMILIES, family_for, meta_model
from ktc.models.roles import ROLES, role_of
from tests.tiny import TINY, tiny_config, tiny_model


def roles(family: str) -> dict[str, str]:
    config = tiny_config(family)
    known = family_for(config)
    return {name: role_of(known, name, module) for name, module in meta_model(config).named_modules()}


@pytest.mark.parametrize("family", TINY)
def test_every_module_has_a_role(family: str) -> None:
    found = roles(family)
    assert set(found.values()) <= set(ROLES)
    block = "block_sparse_moe" if family == "granitemoe" else "mlp"
    layer = "model.layers.1."
    expected = {
        layer[:-1]: "decoder_layer",
        layer + block: "moe",
        f"{layer}{block}.experts": "experts",
        f"{layer}{block}.{FAMILIES[family].router}": "router",
        layer + "self_attn": "mla" if family in ("deepseek_v2", "deepseek_v3") else "attention",
        layer + "self_attn.o_proj": "linear",
        layer + "input_layernorm": "norm",
        layer + "post_attention_layernorm": "norm",
        "model.embed_tokens": "embedding",
        "model.rotary_emb": "rotary",
        "model.norm": "norm",
        "lm_head": "lm_head",
        "model": "other",
    }
    assert {name: found[name] for name in expected} == expected
    # Whatever owns parameters is something that a recipe can name.
    config = tiny_config(family)
    owners = {n.rpartition(".")[0] for n in meta_model(config).state_dict()}
    assert "other" not in {found[name] for name in owners}


def test_linears_that_a_rule_must_leave_alone() -> None:
    assert roles("deepseek_v3")["model.layers.1.self_attn.kv_b_proj"] == "protected_linear"
    assert roles("deepseek_v2")["model.layers.0.self_attn.kv_b_proj"] == "protected_linear"
    assert roles("qwen2_moe")["model.layers.1.mlp.shared_expert_gate"] == "protected_linear"
    glm = roles("glm_moe_dsa")
    assert {n for n, r in glm.items() if r == "protected_linear" and n.startswith("model.layers.0.")} == {
        f"model.layers.0.self_attn.{name}"
        for name in ("kv_b_proj", "indexer.wq_b", "indexer.wk", "indexer.weights_proj")
    }


def test_shared_experts_and_dense_layers() -> None:
    found = roles("deepseek_v3")
    assert found["model.layers.0.mlp"] == "dense_mlp"
    assert found["model.layers.1.mlp.shared_experts"] == "shared_expert"
    assert found["model.layers.1.mlp.shared_experts.up_proj"] == "linear"
    assert roles("qwen2_moe")["model.layers.0.mlp.shared_expert"] == "shared_expert"


def test_a_linear_with_one_output_is_protected_in_any_family() -> None:
    import torch

    assert role_of(FAMILIES["mixtral"], "model.layers.0.score", torch.nn.Linear(4, 1)) == "protected_linear"
    assert role_of(FAMILIES["mixtral"], "model.layers.0.score", torch.nn.Linear(4, 2)) == "linear"


@pytest.mark.parametrize(
    ("family", "disk", "tree"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w1.weight", "model.layers.0.mlp.experts.7.w1.weight"),
        (
            "minimax_m2",
            "model.layers.0.block_sparse_moe.e_score_correction_bias",
            "model.layers.0.mlp.e_score_correction_bias",
        ),
        (
            "granitemoe",
            "model.layers.3.block_sparse_moe.router.layer.weight",
            "model.layers.3.block_sparse_moe.router.weight",
        ),
        (
            "deepseek_v3",
            "language_model.model.layers.0.input_layernorm.weight",
            "model.layers.0.input_layernorm.weight",
        ),
        ("deepseek_v3", "language_model.lm_head.weight", "lm_head.weight"),
        ("deepseek_v3", "model.language_model.norm.weight", "model.norm.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_names(family: str, disk: str, tree: str) -> None:
    assert tree_name(FAMILIES[family], disk) == tree
    assert tree_to_disk(FAMILIES[family], [disk]) == {tree: disk}


def test_two_tensors_with_one_name() -> None:
    names = ["model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"]
    with pytest.raises(CheckpointError, match=r"are both 'model\.layers\.0\.mlp\.gate\.weight'"):
        tree_to_disk(FAMILIES["mixtral"], names)


def test_minimax_route_hook_uses_the_blocks_bias() -> None:
    """The bias decides who is chosen; the hook must give what the block itself would use."""
    import torch

    model = tiny_model("minimax_m2")
    block = model.model.layers[1].mlp
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    route = FAMILIES["minimax_m2"].route
    assert route is not None
    with torch.no_grad():
        block.e_score_correction_bias[3] = 10.0
        weights, ids = route(block, hidden)
        assert torch.equal(block.experts(hidden, ids, weights), block(hidden[None])[0])
    assert weights.shape == ids.shape == (5, 2)
    assert bool((ids == 3).any(dim=1).all())  # expert 3 is chosen by every token, because of its bias alone


def test_other_families_route_through_their_router() -> None:
    assert [f.model_type for f in FAMILIES.values() if f.route is not None] == ["minimax_m2"]
