"""Plan -> kernel specs, and specs as untrusted data."""

from __future__ import annotations

import pytest

from ktc.codegen.spec import KernelSpec, KernelSpecs, specs_for
from ktc.codegen.variants import VARIANTS, runnable
from ktc.errors import BuildError
from ktc.plan.ir import LinearPlan, ModulePlan, MoePlan, Plan


def moe(**changes: object) -> MoePlan:
    values: dict[str, object] = {
        "experts": 16, "top_k": 4, "hidden": 200, "intermediate": 704, "activation": "silu_mul", "alpha": 0.0,
        "limit": 0.0, "bias": False, "data_type": "int4", "scale": "integer", "group": 64, "backend": "auto",
        "n_deferred_experts": 0, "splits": ((0, 704),),
    }  # fmt: skip
    return MoePlan(**{**values, **changes})  # type: ignore[arg-type]


def plan_of(*parts: MoePlan | LinearPlan) -> Plan:
    modules = tuple(
        ModulePlan(
            f"m{i}", "X", "moe", "moe" if isinstance(p, MoePlan) else "linear", "cpu", None, 0,
            moe=p if isinstance(p, MoePlan) else None, linear=p if isinstance(p, LinearPlan) else None,
        )
        for i, p in enumerate(parts)
    )  # fmt: skip
    return Plan("t", "T", len(parts), 1, modules)


def test_equal_layers_share_their_kernels() -> None:
    specs = specs_for(plan_of(moe(), moe(experts=64), moe()))
    assert list(specs) == sorted(
        [
            KernelSpec("int4", "integer", 64, "silu_mul", 256),  # H = 200, padded
            KernelSpec("int4", "integer", 64, "store", 704),
            KernelSpec("int4", "integer", 64, "scatter_add", 704),
        ]
    )


def test_s4_uneven_slices_get_a_kernel_each() -> None:
    # failure S4: 704 over 4 nodes does not divide evenly; every distinct slice width has its own down kernel.
    specs = specs_for(plan_of(moe(splits=((0, 128), (128, 320), (320, 512), (512, 704)))))
    assert {s.k for s in specs if s.epilogue == "store"} == {128, 192}
    assert {s.k for s in specs if s.epilogue == "silu_mul"} == {256}


def test_linears_take_any_k_and_formats_are_kept_apart() -> None:
    specs = specs_for(
        plan_of(
            moe(data_type="bf16", scale="none", group=0, activation="swiglu_oai"),
            LinearPlan(100, 64, False, "int8", "channel", 0),
            LinearPlan(100, 640, True, "int8", "channel", 0),
        )
    )
    assert KernelSpec("int8", "channel", 0, "store") in specs.specs
    assert len(specs) == 4
    assert KernelSpec("bf16", "none", 0, "swiglu_oai", 256) in specs.specs


def test_json_round_trip() -> None:
    specs = specs_for(plan_of(moe(), LinearPlan(8, 64, False, "int4", "group", 32)))
    assert KernelSpecs.from_json(specs.to_json()) == specs
    with pytest.raises(BuildError, match="not what this version"):
        KernelSpecs.from_json([{"data_type": "int4", "colour": 3}])


@pytest.mark.parametrize(
    "values,why",
    [
        (("int5", "channel", 0, "store", 0), "unknown data type"),
        (("int8", "channel", 0, "store; }", 0), "unknown data type or epilogue"),
        (("int8", "integer", 64, "store", 0), "int8 takes scale channel or group"),
        (("int4", "channel", 0, "store", 0), "int4 takes scale integer or codebook or group"),
        (("int4", "integer", 0, "store", 0), "a group belongs to"),
        (("int8", "channel", 64, "store", 0), "a group belongs to"),
        (("int4", "integer", 48, "store", 0), "16, 32 or a multiple of 64"),
        (("int4", "codebook", 256, "store", 0), "at most 128"),
        (("int4", "codebook", 0, "store", 0), "a group belongs to"),
        (("int4", "integer", 64, "store", 100), "multiple of 64"),
        (("int4", "integer", 64, "store", -64), "multiple of 64"),
        (("int4", "integer", "64", "store", 0), "must be integers"),
        (("int4", "integer", True, "store", 0), "must be integers"),
    ],
)
def test_values_from_outside_never_reach_a_template(values: tuple[object, ...], why: str) -> None:
    with pytest.raises(BuildError, match=why):
        KernelSpec(*values)  # type: ignore[arg-type]


def test_s14_features_are_sets() -> None:
    # failure S14: a variant runs if the host has all it needs; AMX without AVX-512 VNNI is not "at least AVX-512".
    assert runnable(set()) == ["portable"]
    assert runnable(set(), automatic=False) == ["portable", "emulated"]
    everything = {f for v in VARIANTS.values() for f in v.required_features}
    assert runnable(everything) == ["amx", "zen4", "avx512vbmi", "avx512", "avxvnni", "avx2", "portable"]
    assert runnable(everything - {"avx512_vnni"}) == ["avxvnni", "avx2", "portable"]
    assert runnable(everything - {"amx_int8"})[0] == "zen4"
    assert runnable(everything - {"amx_int8", "sse4a"})[0] == "avx512vbmi"  # Intel's avx512_bf16 is not AMD's
    assert runnable(everything - {"amx_int8", "avx512vbmi"})[0] == "avx512"


def test_flags_name_explicit_targets() -> None:
    for v in VARIANTS.values():
        assert "-march=native" not in v.flags and "-ffast-math" not in v.flags
        assert "-march=x86-64" in v.flags and "-ffp-contract=off" in v.flags
