"""`kv_cache: host`: where it may stand, what the plan and the simulation make of it, and errors with their line."""

from __future__ import annotations

import json

import pytest

from ktc.errors import RecipeError
from ktc.graph.families import head_dim
from ktc.plan import Plan, PlanError, build_plan, render, verify
from ktc.plan.caches import cache_bytes, host_layers
from ktc.recipe import parse_recipe
from ktc.simulate import decode_costs, load_profile
from tests.tiny import TINY, tiny_config

MODEL = '- match: {name: "^$"}\n  replace: {class: default, device: cuda:0}\n'
MOE = "- match: {role: moe}\n  replace: {class: ktc.FusedMoE, kwargs: {data_type: bf16}}\n"
HOST = """- match: {role: attention, name: '%s'}
  replace: {class: default, kwargs: {kv_cache: host}}
  optional: true
- match: {role: mla, name: '%s'}
  replace: {class: ktc.MLAAttention, kwargs: {kv_cache: HOST}}
  optional: true
"""


def host(layers: str) -> str:
    return HOST % (layers, layers)


def plan_of(text: str, family: str = "qwen3_moe", layers: int = 4) -> Plan:
    return build_plan(tiny_config(family, num_hidden_layers=layers), parse_recipe(text, "r.yaml"))


@pytest.mark.parametrize("family", list(TINY))
def test_bytes_of_every_family(family: str) -> None:
    config = tiny_config(family, num_hidden_layers=4)
    if getattr(config, "kv_lora_rank", None):
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = 2 * config.num_key_value_heads * head_dim(config)
    plain, apart = (plan_of(text + MODEL + MOE, family) for text in ("", host(r"\.[23]\.")))
    layer = 2 * width * 100
    before, after = (cache_bytes(plan, 100)["cuda:0"] for plan in (plain, apart))
    assert (before.device, before.host, before.plain, before.host_layers) == (4 * layer, 0, 4 * layer, 0)
    assert (after.device, after.host, after.plain, after.host_layers) == (3 * layer, 2 * layer, 4 * layer, 2)
    assert host_layers(apart) == {2, 3} and not host_layers(plain)
    assert Plan.from_json(json.loads(json.dumps(apart.to_json()))) == apart
    assert "kv_cache" not in json.dumps(plain.to_json())


def test_what_ktc_plan_shows() -> None:
    text = render(plan_of(host(r"\.[123]\.") + MODEL + MOE))
    full = cache_bytes(plan_of(MODEL + MOE))["cuda:0"].plain
    lines = [line for line in text.splitlines() if line.startswith("  KV cache")]
    assert lines[0].startswith(
        f"  KV cache, cuda:0  {full // 2 / 2**20:.2f} MiB  8192 positions of 4 layers in 16 bits"
    )
    assert lines[0].endswith(f"; {full / 2**20:.2f} MiB without kv_cache: host")
    assert lines[1].startswith(f"  KV cache, host    {full * 3 // 4 / 2**20:.2f} MiB  3 of the layers of cuda:0")
    assert "its KV cache is in pinned host memory" in text
    assert "KV cache" not in render(plan_of(MOE))


def test_on_the_cpu_it_is_accepted_and_means_nothing() -> None:
    plan = plan_of(host(r"\.1\.") + MOE)
    text = render(plan)
    assert "kv_cache: host means nothing on the cpu" in text and "KV cache, " not in text
    assert cache_bytes(plan)["cpu"].host == 0


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("- match: {role: attention}\n  replace:\n    class: default\n    kwargs: {kv_cache: hosts}\n",
         r"r\.yaml:4:24: replace\.kwargs\.kv_cache: 'hosts' is not one of device, host"),
        ("- match: {role: norm}\n  replace: {class: default, kwargs: {kv_cache: host}}\n",
         r"rule 1 \(r\.yaml:1\): kv_cache: host also matches model\.layers\.0\.self_attn\.q_norm"),
        ("- match: {role: embedding}\n  replace: {class: ktc.Embedding, kwargs: {kv_cache: host}}\n",
         r"r\.yaml:2:44: replace\.kwargs: unknown key 'kv_cache'"),
        ("- match: {role: linear}\n  replace: {class: ktc.Linear, kwargs: {data_type: int8, kv_cache: host}}\n",
         r"r\.yaml:2:58: replace\.kwargs: unknown key 'kv_cache'"),
    ],
)  # fmt: skip
def test_errors_have_a_line(rule: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        plan_of(rule + MODEL + MOE)


def test_device_is_the_default_spelled_out() -> None:
    rule = "- match: {role: attention}\n  replace: {class: default, kwargs: {kv_cache: device}}\n"
    plan = plan_of(rule + MODEL + MOE)
    assert not host_layers(plan) and cache_bytes(plan) == cache_bytes(plan_of(MODEL + MOE))


def test_only_attention_has_a_cache() -> None:
    data = plan_of(MODEL + MOE).to_json()
    data["modules"][0]["kv_cache"] = "host"
    with pytest.raises(PlanError, match="kv_cache host on a module of role embedding"):
        verify(Plan.from_json(data))


def test_the_simulation_reads_it_over_the_link() -> None:
    hardware = load_profile("paper-2x8452y-a100")
    plain, apart = (plan_of(text + MODEL + MOE) for text in ("", host(r"\.2\.")))
    a, b = (decode_costs(plan, hardware, context=10**6, numa="single").layers for plan in (plain, apart))
    read = cache_bytes(plain, 10**6)["cuda:0"].plain / 4
    assert a[1] == b[1] and a[2].attention < b[2].attention
    assert b[2].attention > read / hardware.link.rate > a[2].attention
