"""`ktc profile` over tiny bundles: counts are Hugging Face's routing, however the bundle runs; recipes with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktc.compile import compile_checkpoint
from ktc.errors import KtcError
from ktc.plan.expert_use import ExpertUse, ModelShape, layer_number, read_expert_use
from tests.cli.runner import ktc
from tests.tiny import make_tiny

TEXT = "The quick brown fox jumps over the lazy dog, and naïve cafés are déjà vu. " * 2
EXPERTS, TOP_K = 8, 4
HOT = """rules:
  - match: {{name: "^$"}}
    replace: {{class: default, device: {device}}}
  - match: {{role: moe}}
    replace:
      class: ktc.FusedMoE
      kwargs: {{data_type: int8, {options}}}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "qwen3_moe", tmp_path_factory.mktemp("use") / "m", tokenizer="byte", num_experts_per_tok=TOP_K,
        num_experts=EXPERTS, num_hidden_layers=3, mlp_only_layers=[1],
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    compile_checkpoint(checkpoint, "fp32", checkpoint.parent / "fp32.ktc", variants=(), jobs=1)
    return checkpoint.parent / "fp32.ktc"


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> Path:
    path = checkpoint.parent / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def counted(checkpoint: Path) -> dict[int, list[int]]:
    """Hugging Face's own routing over windows of 32 tokens, each after BOS."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(checkpoint)(TEXT, add_special_tokens=False)["input_ids"]
    counts = {layer: torch.zeros(EXPERTS, dtype=torch.int64) for layer in (0, 2)}

    def watch(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            counts[layer].add_(torch.bincount(out[2].reshape(-1), minlength=EXPERTS))

        return hook

    for layer in counts:
        model.model.layers[layer].mlp.gate.register_forward_hook(watch(layer))
    with torch.no_grad():
        for begin in range(0, len(ids), 32):
            model(torch.tensor([[256, *ids[begin : begin + 32]]]))
    return {layer: c.tolist() for layer, c in counts.items()}


def test_counts_are_hugging_faces(
    bundle: Path, text: Path, counted: dict[int, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "use.json"
    assert ktc("profile", bundle, "--text", text, "--window", 32, "-o", out, "--json") == 0
    said, err = capsys.readouterr()
    printed = json.loads(said)
    assert f"ktc: wrote {out}\n" in err
    use = read_expert_use(out)
    assert printed == use.to_json() == json.loads(out.read_text()) and len(use.sha256) == 64
    assert {layer: list(c) for layer, c in use.layers.items()} == counted
    assert use.tokens * TOP_K == sum(counted[0]) == sum(counted[2])
    assert use.model.experts == EXPERTS and use.model.layers == 3 and use.text == "text.txt"


def test_eager_modules_count_the_same(bundle: Path, text: Path, counted: dict[int, list[int]]) -> None:
    import ktc as package
    from ktc.eval.routing import expert_use
    from ktc.eval.run import text_ids, windows_of
    from ktc.native.tokenizer import load_tokenizer

    model = package.load(bundle, threads=1)
    tokenizer = load_tokenizer(bundle / "model")
    windows = windows_of(text_ids(tokenizer, TEXT), 32, tokenizer.bos_token_id)
    use = expert_use(model, windows, "")
    assert {layer: list(c) for layer, c in use.layers.items()} == counted
    again = expert_use(model, windows, "")
    assert again == use, "the model is as it was"


def test_table_and_plot(
    bundle: Path, text: Path, counted: dict[int, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "use.png"
    assert ktc("profile", bundle, "--text", text, "--window", 32, "--plot", picture) == 0
    out = capsys.readouterr().out
    total = sum(counted[2])
    row = next(line for line in out.splitlines() if line.startswith("| 2 |"))
    assert f"| {max(counted[2]) / total:.1%} |" in row and f"{counted[2].index(max(counted[2]))}: " in row
    assert "evenly used: 12.5%, 25.0%, 50.0%" in out and picture.read_bytes().startswith(b"\x89PNG")
    assert ktc("profile", bundle, "--text", text, "--limit", 50, "--plot", tmp_path / "use.xyz") == 2
    assert ".png, .svg or .pdf" in capsys.readouterr().err


def test_bad_input_of_the_command(bundle: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ktc("profile", bundle, "--text", tmp_path / "no.txt") == 2
    assert "cannot read the text" in capsys.readouterr().err
    assert ktc("profile", tmp_path / "no.ktc", "--text", text) == 6
    assert "no.ktc" in capsys.readouterr().err
    assert ktc("profile", bundle, "--text", text, "--window", 100000) == 2
    assert "does not fit the context" in capsys.readouterr().err
    assert ktc("profile", tmp_path / "no.ktc", "--text", text, "-o", tmp_path / "no" / "a" / "use.json") == 8
    assert f"there is no folder {tmp_path / 'no' / 'a'}" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


SHAPE = ModelShape("qwen3_moe", 3, EXPERTS, TOP_K, 64, 32)


def test_the_hottest_are_the_most_used() -> None:
    use = ExpertUse(SHAPE, "", 1, {0: (5, 9, 5, 0, 0, 1, 0, 0)})
    assert use.hottest(0, 1) == (1,) and use.hottest(0, 2) == (0, 1) and use.hottest(0, 3) == (0, 1, 2)
    assert use.share(0, (0, 1)) == pytest.approx(14 / 20) and use.share(0, ()) == 0
    assert ExpertUse(SHAPE, "", 0, {0: (0,) * 8}).share(0, (1,)) == 0
    assert layer_number("model.layers.17.mlp") == 17


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": "ktc-expert-use/1"}', '{"schema": "another"}', "null", "\x00\xff",
     '{"schema": "ktc-expert-use/1", "model": {"layers": 1}, "text": "", "tokens": 1, "layers": {}}'],
)  # fmt: skip
def test_a_file_that_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "use.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(KtcError, match=f"{path}: not a profile of expert use") as caught:
        read_expert_use(path)
    assert "ktc profile BUNDLE" in str(caught.value.hint)


@pytest.mark.parametrize("counts", [[1] * 7, [1] * 7 + [-1], [1] * 7 + [True], [1] * 7 + [1.5]])
def test_counts_that_make_no_sense(counts: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "use.json"
    ExpertUse(SHAPE, "", 1, {0: tuple(counts)}).write(path)
    with pytest.raises(KtcError, match="layer 0 has"):
        read_expert_use(path)


# ---- in a recipe ----------------------------------------------------------------------------------------------------
def recipe(folder: Path, options: str, device: str = "cuda:0") -> Path:
    path = folder / "hot.yaml"
    path.write_text(HOT.format(device=device, options=options))
    return path


def test_a_recipe_takes_the_most_used(
    checkpoint: Path, bundle: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ktc("profile", bundle, "--text", text, "-o", tmp_path / "use.json") == 0
    use = read_expert_use(tmp_path / "use.json")
    given = recipe(tmp_path, "hot_experts: 3, hot_profile: use.json")
    capsys.readouterr()
    assert ktc("plan", checkpoint, "--recipe", given, "--json") == 0
    modules = json.loads(capsys.readouterr().out)["modules"]
    blocks = {layer_number(m["name"]): m["moe"] for m in modules if m["moe"]}
    assert {layer: tuple(m["hot"]) for layer, m in blocks.items()} == {i: use.hottest(i, 3) for i in (0, 2)}
    assert blocks[2]["hot_share"] == pytest.approx(use.share(2, use.hottest(2, 3)), abs=1e-6)
    assert ktc("plan", checkpoint, "--recipe", given) == 0
    out = capsys.readouterr().out
    size = 2 * 3 * (3 * 64 * 32) * 2
    assert f"hot experts {size / 1024:.1f} KiB (bf16)" in out or f"hot experts {size / 1024:.0f} KiB (bf16)" in out
    assert (
        "3 hot on the device (" in out and "the 3 most used experts of each layer (use.json) are on cuda:0 too" in out
    )
    assert "model.layers.{0,2}.mlp " in out, "layers with other hot experts are still one row"


@pytest.mark.parametrize(
    ("options", "says", "hint"),
    [
        ("hot_experts: 2", r"hot.yaml:7:33: hot_experts needs hot_profile beside it", "ktc profile"),
        ("hot_profile: u.json", r"hot.yaml:7:33: hot_profile needs hot_experts beside it", "ktc profile"),
        ("hot_experts: 0, hot_profile: u.json", r"hot_experts: 0 is not a number of experts \(1 or more\)", None),
        ("hot_experts: 9, hot_profile: u.json", "hot_experts: 9 of 8 experts", "at most 8"),
        ("hot_experts: 2, hot_profile: none.json", "none.json: cannot be read", "the recipe's folder"),
        ("hot_experts: 2, hot_profile: torn.json", "torn.json: not a profile of expert use", "ktc profile"),
        ("hot_experts: 2, hot_profile: other.json",
         "other.json is of another model: model_type mixtral instead of qwen3_moe, experts 4 instead of 8", "of this"),
        ("hot_experts: 2, hot_profile: part.json", "part.json has no counts of layer 2", "ktc.FusedMoE"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be(options: str, says: str, hint: str | None, checkpoint: Path, tmp_path: Path) -> None:
    from ktc.checkpoint import read_config
    from ktc.errors import RecipeError
    from ktc.plan import build_plan
    from ktc.recipe import load_recipe

    (tmp_path / "torn.json").write_text("{")
    other = ModelShape("mixtral", 3, 4, TOP_K, 64, 32)
    ExpertUse(other, "", 1, {0: (1,) * 4}).write(tmp_path / "other.json")
    ExpertUse(SHAPE, "", 1, {0: (1,) * 8}).write(tmp_path / "part.json")
    ExpertUse(SHAPE, "", 1, {0: (1,) * 8, 2: (1,) * 8}).write(tmp_path / "u.json")
    with pytest.raises(RecipeError, match=says) as caught:
        build_plan(read_config(str(checkpoint)), load_recipe(recipe(tmp_path, options)))
    assert hint is None or hint in str(caught.value.hint)


def test_no_device_for_them(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ExpertUse(SHAPE, "", 1, {0: (1,) * 8, 2: (1,) * 8}).write(tmp_path / "u.json")
    given = recipe(tmp_path, "hot_experts: 2, hot_profile: u.json", device="cpu")
    assert ktc("plan", checkpoint, "--recipe", given) == 4
    err = capsys.readouterr().err
    assert "rule 2" in err and "model.layers.0.mlp: hot_experts: the block is on the cpu" in err


def test_simulate_moves_their_work(checkpoint: Path, tmp_path: Path) -> None:
    """In decode: less for the CPU by their share, more for the device; prefill is as before."""
    from ktc.checkpoint import read_config
    from ktc.plan import build_plan
    from ktc.recipe import load_recipe
    from ktc.simulate import decode_costs, load_profile, prefill_costs

    ExpertUse(SHAPE, "", 1, {0: (30, 10) + (1,) * 6, 2: (1,) * 8}).write(tmp_path / "u.json")
    config, hardware = read_config(str(checkpoint)), load_profile("h200-spr")
    with_hot = build_plan(config, load_recipe(recipe(tmp_path, "hot_experts: 2, hot_profile: u.json")), 1)
    (tmp_path / "plain").mkdir()
    plain = build_plan(config, load_recipe(recipe(tmp_path / "plain", "group: channel")), 1)
    hot, cold = (decode_costs(p, hardware, numa="single").layers for p in (with_hot, plain))
    assert hot[0].routed[0] == pytest.approx(cold[0].routed[0] * 6 / 46) and hot[0].shared > cold[0].shared
    assert hot[2].routed[0] == pytest.approx(cold[2].routed[0] * 0.75) and hot[0].attention == cold[0].attention
    assert [c.routed for c in prefill_costs(with_hot, hardware, tokens=64, numa="single").layers] == [
        c.routed for c in prefill_costs(plain, hardware, tokens=64, numa="single").layers
    ]
