"""The recipe grammar: what is read, and that every mistake is one error at its own line and column."""

from __future__ import annotations

import textwrap

import pytest

from ktc.errors import RecipeError
from ktc.models.roles import ROLES
from ktc.recipe import SchemeChoice, parse_recipe
from ktc.recipe.parse import _validator

FULL = """\
version: 1
name: full
description: every key once
rules:
  - match:
      name: ^model\\.layers\\.\\d+\\.mlp$
      class: modeling_deepseek_v3.DeepseekV3MoE
      role: moe
    replace:
      class: ktc.FusedMoE
      device: cuda:1
      kwargs:
        backend: Hybrid_amx_avx512
        data_type: Int4
        group: 64
        scale: float
        group_fallback: [32, pad]
        n_deferred_experts: 3
    optional: true
    recursive: false
  - match: {class: torch.nn.Linear}
    replace: {class: ktc.Linear, kwargs: {data_type: BF16}}
"""


def moe(**kwargs: object) -> str:
    lines = "".join(f"      {key}: {value}\n" for key, value in kwargs.items())
    return f"- match: {{role: moe}}\n  replace:\n    class: ktc.FusedMoE\n    kwargs:\n{lines}"


def test_every_key() -> None:
    recipe = parse_recipe(FULL, "full.yaml")
    first, second = recipe.rules
    assert (recipe.name, recipe.description, len(recipe.sha256)) == ("full", "every key once", 64)
    assert (first.operator, first.device, first.optional, first.recursive) == ("moe", "cuda:1", True, False)
    assert (first.backend, first.n_deferred_experts) == ("hybrid_AMX_AVX512", 3)
    assert first.scheme == SchemeChoice("int4", 64, "float", fallback=(32, "pad"))
    assert (first.index, first.line, second.index, second.line) == (0, 5, 1, 21)
    assert second.scheme == SchemeChoice("bf16")
    assert (second.device, second.optional, second.recursive) == (None, False, True)
    assert recipe.where(second) == "rule 2 (full.yaml:21)"


def test_bare_list_has_the_same_lines() -> None:
    rules = textwrap.dedent(FULL.split("rules:\n")[1])
    recipe = parse_recipe(rules, "list.yaml", default_name="list")
    assert [r.line for r in recipe.rules] == [1, 17]
    assert recipe.name == "list"
    with pytest.raises(RecipeError, match=r"^list\.yaml:3:14: "):
        parse_recipe("- match: {role: moe}\n  replace:\n      class: ktc.Lunar\n", "list.yaml")


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"data_type": "fp32"}, SchemeChoice("fp32")),
        ({"data_type": "FP32", "backend": "Portable"}, SchemeChoice("fp32")),
        ({"data_type": "bfloat16"}, SchemeChoice("bf16")),
        ({"data_type": "int8"}, SchemeChoice("int8", 0)),
        ({"data_type": "Int8", "group": "Channel"}, SchemeChoice("int8", 0)),
        ({"data_type": "int8", "group": 128}, SchemeChoice("int8", 128)),
        ({"data_type": "int4"}, SchemeChoice("int4", 16, "codebook")),
        ({"data_type": "INT4", "group": 16, "scale": "integer"}, SchemeChoice("int4", 16, "integer")),
        ({"data_type": "int4", "scale": "Float"}, SchemeChoice("int4", 32)),
        ({"data_type": "int4", "scale": "integer"}, SchemeChoice("int4", 32, "integer")),
        ({"data_type": "int4", "scale": "Codebook"}, SchemeChoice("int4", 16, "codebook")),
        ({"data_type": "int4", "scale": "codebook", "group": 64}, SchemeChoice("int4", 64, "codebook")),
        ({"data_type": "int4", "group": 64, "group_fallback": "refuse"}, SchemeChoice("int4", 64, "codebook")),
        ({"data_type": "int4", "group_fallback": "pad"}, SchemeChoice("int4", 16, "codebook", fallback=("pad",))),
    ],
)
def test_data_types(kwargs: dict[str, object], expected: SchemeChoice) -> None:
    assert parse_recipe(moe(**kwargs)).rules[0].scheme == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("hybrid", "hybrid_AMX_AVX512"), ("amx", "AMX"), ("AVX-512", "AVX512"), ("avx2", "AVX2"), ("AUTO", "auto")],
)
def test_backend_spellings(given: str, expected: str) -> None:
    assert parse_recipe(moe(data_type="int4", backend=given)).rules[0].backend == expected


def test_fp32_has_one_backend() -> None:
    assert parse_recipe(moe(data_type="fp32")).rules[0].backend == "portable"


def test_class_is_a_dotted_suffix_of_whole_components() -> None:
    rule = parse_recipe("- match: {class: a_model.Block}\n  replace: {class: default}").rules[0]
    assert rule.match("x", "pkg.a_model.Block", "other")
    assert rule.match("x", "a_model.Block", "other")
    assert not rule.match("x", "pkg.not_a_model.Block", "other")
    assert not rule.match("x", "pkg.a_model.BlockList", "other")
    linear = parse_recipe("- match: {class: torch.nn.Linear}\n  replace: {class: default}").rules[0]
    assert linear.match("x", "torch.nn.modules.linear.Linear", "linear")
    assert not linear.match("x", "my.torch.nn.LinearX", "linear")


def test_all_keys_of_a_match_must_hold_and_names_are_searched() -> None:
    rule = parse_recipe("- match: {name: 'mlp$', class: Block, role: moe}\n  replace: {class: default}").rules[0]
    assert rule.match("model.layers.3.mlp", "m.Block", "moe")
    assert not rule.match("model.layers.3.mlp.gate", "m.Block", "moe")
    assert not rule.match("model.layers.3.mlp", "m.Other", "moe")
    assert not rule.match("model.layers.3.mlp", "m.Block", "other")


def test_roles_in_the_schema_are_those_of_the_families() -> None:
    assert _validator().schema["$defs"]["match"]["properties"]["role"]["enum"] == list(ROLES)


# Each: recipe, where the error is, what it says, what the hint says.
MISTAKES = [
    ("", "r.yaml:", "is empty", "match -> replace"),
    ("- match: [", "r.yaml:1:11:", "not valid YAML", None),
    ("- match: {role: moe}\n\treplace: x\n", "r.yaml:2:1:", "not valid YAML", None),
    ("just text", "r.yaml:1:1:", "'just text' where a mapping belongs", None),
    ("[]", "r.yaml:1:1:", "rules: is empty", None),
    ("version: 2\nrules: [{match: {role: moe}, replace: {class: default}}]", "r.yaml:1:10:", "version: '2'", None),
    ("ruls:\n- match: {role: moe}\n", "r.yaml:1:1:", "unknown key 'ruls'", "did you mean rules?"),
    ("- replace: {class: default}\n", "r.yaml:1:3:", "'match' is missing", "match: {...}"),
    ("- match: {role: moe}\n  replase: {class: default}\n", "r.yaml:1:3:", "'replace' is missing", "'replase'"),
    ("- match:\n  replace: {class: default}\n", "r.yaml:1:9:", "match: nothing where a mapping belongs", None),
    ("- match: {}\n  replace: {class: default}\n", "r.yaml:1:10:", "match: is empty", "name, class, role"),
    ("- match: {rol: moe}\n  replace: {class: default}\n", "r.yaml:1:11:", "match: unknown key 'rol'", "role?"),
    ("- match: {regex: x}\n  replace: {class: default}\n", "r.yaml:1:11:", "unknown key 'regex'", "mean name?"),
    ("- match: {role: mlp}\n  replace: {class: default}\n", "r.yaml:1:17:", "match.role: 'mlp'", "mla?"),
    ("- match: {class: 'a.*'}\n  replace: {class: default}\n", "r.yaml:1:18:", "dotted class", "belong in name"),
    ("- match:\n    name: 'a(b'\n  replace: {class: default}\n", "r.yaml:2:11:", "bad regular expression 'a(b'", None),
    ("- match: {name: '*.mlp'}\n  replace: {class: default}\n", "r.yaml:1:17:", "bad regular", "shell pattern"),
    ("- match: {role: moe}\n  replace: {class: FusedMoE}\n", "r.yaml:2:20:", "'FusedMoE'", "mean ktc.FusedMoE?"),
    ("- match: {role: moe}\n  replace: {class: operators.experts.FusedMoE}\n", "r.yaml:2:20:", "", "ktc.FusedMoE?"),
    ("- match: {role: moe}\n  replace: {class: ktc.FusedMoE}\n", "r.yaml:2:12:", "'kwargs' is missing", "data_type"),
    ("- match: {role: moe}\n  replace: {class: default, device: gpu}\n", "r.yaml:2:37:", "neither cpu nor", None),
    ("- match: {role: mla}\n  replace: {class: ktc.MLAAttention, kwargs: {x: 1}}\n", "r.yaml:2:47:", "'x'", "kv_cache"),
    ("- match: {name: e}\n  replace: {class: ktc.Embedding, kwargs: {x: 1}}\n", "r.yaml:2:44:", "'x'", "nothing"),
    ("- match: {role: moe}\n  replace: {class: default}\n  optional: yep\n", "r.yaml:3:13:", "true or false", None),
    ("- match: {role: moe}\n  match: {role: mla}\n", "r.yaml:2:3:", "key 'match' appears twice", None),
    ("- match: {role: moe}\n  replace: {1: x}\n", "r.yaml:2:13:", "key 1 is not a plain name", None),
    ("- &a {match: {<<: {role: moe}}}\n", "r.yaml:1:15:", "key << is not", None),
    ("- match: {role: !!python/name:os.system ''}\n", "r.yaml:1:17:", "not valid YAML: could not determine", None),
    (moe(data_type="int5"), "r.yaml:5:18:", "data_type: 'int5' is not one of fp32, bf16, int8, int4", "mean int"),
    (moe(data_type="int3"), "r.yaml:5:18:", "data_type: 'int3' is not one of", "did you mean int4?"),
    (moe(data_type="int7"), "r.yaml:5:18:", "data_type: 'int7' is not one of", "did you mean int8?"),
    (moe(dtype="int4", data_type="int4"), "r.yaml:5:7:", "unknown key 'dtype'", "mean data_type?"),
    (moe(data_type="int4", backnd="AMX"), "r.yaml:6:7:", "unknown key 'backnd'", "mean backend?"),
    (moe(data_type="int4", backend="AVX10"), "r.yaml:6:16:", "'AVX10'", "AVX"),
    (moe(data_type="int4", group='"32"'), "r.yaml:6:14:", "'32' is a string where a number", "32 without quotes"),
    (moe(data_type="int4", group=48), "r.yaml:6:14:", "group: '48' is not one of 16, 32, 64, 128", None),
    (moe(data_type="int4", group="channel"), "r.yaml:6:7:", "int4 needs a group", "32, 64 or 128"),
    (moe(data_type="int8", group=16), "r.yaml:6:7:", "16 exists for int4", None),
    (moe(data_type="int8", scale="integer"), "r.yaml:6:7:", "integer group scales exist for int4 only", None),
    (moe(data_type="int8", scale="codebook"), "r.yaml:6:7:", "codebook group scales exist for int4 only", None),
    (moe(data_type="int4", scale="lut"), "r.yaml:6:14:", "'lut' is not one of codebook, integer, float", None),
    (moe(data_type="int4", scale="codebook", group="channel"), "r.yaml:7:7:", "int4 needs a group", None),
    (moe(data_type="bf16", group=32), "r.yaml:6:7:", "bf16 has no scales", "remove group"),
    (moe(data_type="fp32", backend="AMX"), "r.yaml:6:16:", "fp32 takes portable only", "portable"),
    (moe(data_type="int4", group_fallback="maybe"), "r.yaml:6:23:", "'maybe' is not refuse, pad, or a list", None),
    (moe(data_type="int4", group=64, group_fallback="[64]"), "r.yaml:7:24:", "64 is not smaller than group 64", None),
    (moe(data_type="int4", group=64, group_fallback="[pad, 32]"), "r.yaml:7:24:", "nothing after it", None),
    (moe(data_type="int8", group_fallback="pad"), "r.yaml:6:7:", "group: channel always fits", None),
    (moe(data_type="int4", n_deferred_experts=-1), "r.yaml:6:27:", "-1 is not a number of experts", None),
    (moe(data_type="int4", n_deferred_experts="all"), "r.yaml:6:27:", "'all' is not a number of experts", None),
    # failure S10: gate and up of one expert can not even be asked to differ
    (moe(gate_data_type="int4", data_type="int8"), "r.yaml:5:7:", "unknown key 'gate_data_type'", "data_type?"),
]


@pytest.mark.parametrize(("text", "where", "message", "hint"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_mistakes_are_reported_where_they_are(text: str, where: str, message: str, hint: str | None) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml")
    assert caught.value.message.startswith(where), caught.value.message
    assert message in caught.value.message
    if hint is not None:
        assert hint in (caught.value.hint or ""), caught.value.hint


def test_the_first_mistake_of_the_file_is_reported() -> None:
    text = moe(data_type="int4", backnd="AMX") + "- match: {rol: moe}\n  replace: {clas: default}\n"
    with pytest.raises(RecipeError, match=r"^r\.yaml:6:7: .*backnd"):
        parse_recipe(text, "r.yaml")


def test_too_large() -> None:
    with pytest.raises(RecipeError, match="larger than 1 MB"):
        parse_recipe("#" * (1 << 20) + "\n[]", "r.yaml")


def test_aliases_may_share_but_not_explode() -> None:
    shared = (
        "- match: {role: moe}\n  replace: &r {class: ktc.FusedMoE, kwargs: {data_type: int4}}\n"
        "- match: {class: Block}\n  replace: *r\n"
    )
    assert [r.operator for r in parse_recipe(shared).rules] == ["moe", "moe"]
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for name, before in zip("bcdefgh", "abcdefg", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    with pytest.raises(RecipeError, match=r"^r\.yaml:\d+:\d+: the document expands to more than 20000 values"):
        parse_recipe(bomb, "r.yaml")
    with pytest.raises(RecipeError, match="the document expands"):
        parse_recipe("a: &a [*a]", "r.yaml")
    with pytest.raises(RecipeError, match="nested too deeply"):
        parse_recipe("[" * 100_000, "r.yaml")
