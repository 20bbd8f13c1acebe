"""The released models' own config.json under every shipped recipe: plans in seconds, of the right sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktc.plan import Plan, build_plan, render
from ktc.recipe import load_recipe
from tests.tiny import tiny_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "tests" / "configs").glob("*.json"))
GOLDEN = Path(__file__).parent / "golden" / "DeepSeek-V3-int4-2-nodes.txt"

# layers with experts, experts, top-k, H, I: from the models' published descriptions
EXPERTS = {
    "DeepSeek-V3": (58, 256, 8, 7168, 2048),
    "GLM-5": (75, 256, 8, 6144, 2048),
    "Kimi-K2-Instruct": (60, 384, 8, 7168, 2048),
    "MiniMax-M2.5": (62, 256, 8, 3072, 1536),
    "Mixtral-8x7B-v0.1": (32, 8, 2, 4096, 14336),
    "Qwen3-235B-A22B-FP8": (94, 128, 8, 4096, 1536),
    "Qwen3-30B-A3B": (48, 128, 8, 2048, 768),
    "gpt-oss-20b": (24, 32, 4, 2880, 2880),
}
BITS = {"int4": 4.25, "int8": 8.0, "bf16": 16.0, "fp32": 32.0}


def plan_of(path: Path, recipe: str, nodes: int = 1) -> Plan:
    return build_plan(json.loads(path.read_text()), load_recipe(recipe), nodes)


@pytest.mark.parametrize("recipe", sorted(BITS))
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_recipe_on_every_model(path: Path, recipe: str) -> None:
    plan = plan_of(path, recipe, nodes=2)
    blocks = [m.moe for m in plan.modules if m.moe is not None]
    first = blocks[0]
    assert (len(blocks), first.experts, first.top_k, first.hidden, first.intermediate) == EXPERTS[path.stem]
    weights = 3 * sum(b.experts * b.hidden * b.intermediate for b in blocks)
    bits = 8 * sum(plan.expert_bytes(n) for n in range(2)) / weights
    assert BITS[recipe] <= bits < BITS[recipe] * 1.01  # scales and biases on top; no silent wider type (failure S3)
    assert not any("fallback" in m.note or "padded" in m.note for m in plan.modules)
    assert render(plan).startswith(f"{plan.model_type} (")


def test_every_config_is_expected() -> None:
    assert {p.stem for p in CONFIGS} == set(EXPERTS)


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_gpt_oss_splits(nodes: int) -> None:
    """Failures S2 and S4: 2880 = 45 tiles of 64; no even halves, but whole tiles on every node."""
    plan = plan_of(ROOT / "tests/configs/gpt-oss-20b.json", "int4", nodes)
    moe = plan.moe_modules()[0].moe
    assert moe is not None and moe.splits[-1][1] == 2880
    widths = {end - begin for begin, end in moe.splits}
    assert all(w % 64 == 0 for w in widths) and max(widths) - min(widths) <= 64
    assert (moe.activation, moe.alpha, moe.limit, moe.bias) == ("swiglu_oai", 1.702, 7.0, True)


def test_paper_recipes() -> None:
    plan = plan_of(ROOT / "tests/configs/DeepSeek-V3.json", "paper-deepseek-v3")
    assert [(r.modules, r.protected) for r in plan.rules] == [(58, 0), (61, 0), (427, 61)]
    moe = plan.moe_modules()[0].moe
    assert moe is not None and (moe.backend, moe.data_type, moe.n_deferred_experts) == ("hybrid_AMX_AVX512", "int4", 3)
    head = next(m for m in plan.modules if m.name == "lm_head")
    assert (head.operator, head.params) == ("hf", {"weight": ((129280, 7168), "bf16")})
    v2 = tiny_config("deepseek_v2", num_experts_per_tok=6, topk_group=4)
    ported = build_plan(v2, load_recipe("paper-deepseek-v2"))
    assert [r.modules for r in ported.rules] == [1, 2, 12]


def test_golden_deepseek_v3() -> None:
    """The table that a user sees; KTC_UPDATE_GOLDEN=1 rewrites it."""
    text = render(plan_of(ROOT / "tests/configs/DeepSeek-V3.json", "int4", nodes=2)) + "\n"
    if os.environ.get("KTC_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("name", ["Kimi-K2-Instruct"])
def test_a_trillion_parameters_in_seconds_and_under_2_gb(name: str) -> None:
    """As a user runs it: a fresh process, everything imported. CPU time, because tests share the machine."""
    code = (
        "import resource, sys\n"
        "from ktc.cli.main import main\n"
        "from ktc.host import peak_rss\n"
        "try:\n"
        f"    main(['plan', {str(ROOT / 'tests/configs' / (name + '.json'))!r}, '--recipe', 'int4', '--json'])\n"
        "finally:\n"
        "    use = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print(peak_rss() >> 20, use.ru_utime + use.ru_stime, file=sys.stderr)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(json.loads(done.stdout))
    assert plan.layers == 61 and len(plan.moe_modules()) == 60
    megabytes, seconds = done.stderr.split()[-2:]
    assert int(megabytes) < 2000
    assert float(seconds) < 30
