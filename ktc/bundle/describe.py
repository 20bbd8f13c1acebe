"""What `ktc inspect` shows: a bundle's contents, sizes, layers, scratch and verdict, as plain data.

Opens no weights and builds nothing. A kernel library is opened only if it may be (trust.py), to say
which kernels a layer gets and how much scratch it takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from ktc.bundle.judge import verdict
from ktc.bundle.reader import Bundle
from ktc.bundle.trust import ready_library
from ktc.engine.report import by_words
from ktc.host import this_host
from ktc.native.engine import PROGRAM_FILE, load_program
from ktc.native.report import native_groups
from ktc.plan.ir import ModulePlan
from ktc.plan.names import group_name
from ktc.progress import counted

PREFILL_TOKENS = 512  # tokens of one prefill step; scratch never has to hold more


def describe(bundle: Bundle, trust_sha256: Sequence[str] = ()) -> dict[str, Any]:
    """Everything `ktc inspect` prints."""
    host, manifest = this_host(), bundle.manifest
    library = ready_library(bundle, trust_sha256, host)
    lib = _open(library[1]) if library else None
    return {
        "bundle": str(bundle.path),
        "format": f"{manifest['format']['major']}.{manifest['format']['minor']}",
        "created_by": _maker(manifest["created_by"]),
        "source": {k: manifest["source"].get(k) for k in ("name", "repo", "revision", "licence")},
        "model": manifest["model"],
        "recipe": {"name": bundle.plan.recipe, "sha256": manifest["recipe_sha256"]},
        "schemes": [scheme["scheme"] for scheme in manifest["quant"]["schemes"]],
        "nodes": bundle.nodes,
        "sizes": sizes(bundle),
        "files": len(bundle.files),
        "kernels": [
            {k: kernel[k] for k in ("variant", "required_features", "glibc_max", "compiler", "sha256")}
            | {"runs_here": set(kernel["required_features"]) <= host.features}
            for kernel in manifest["kernels"]
        ],
        "variant": library[0] if library else None,
        "layers": layers(bundle, lib),
        "scratch": _scratch(bundle, lib) if lib else None,
        "goldens": _goldens(manifest),
        "verdict": verdict(bundle, trust_sha256=trust_sha256, host=host).to_json(),
    }


def _maker(created_by: dict[str, Any]) -> str:
    commit = created_by.get("git")
    return f"ktc {created_by['ktc']}" + (f" ({commit[:12]}{commit[40:]})" if commit else "")


def sizes(bundle: Bundle) -> dict[str, int]:
    """Bytes per place: experts of each node, the device, and the rest."""
    out = {
        f"experts, node {node}": sum(
            e["size"] for p, e in bundle.files.items() if p.startswith(f"weights/experts/node{node}/")
        )
        for node in range(bundle.nodes)
    }
    out["device"] = bundle.nbytes("device")
    out["kernels"] = bundle.nbytes("kernel")
    out["other"] = bundle.nbytes() - sum(out.values())
    return out


def layers(bundle: Bundle, lib: Any) -> list[dict[str, Any]]:
    """One row per kind of module, in the words of `ktc run -v`: equal modules of different layers share a row.

    Args:
        lib: the kernel library that would run here, or None.
    """
    rows = []
    for what, group in _groups(bundle, lib):
        first = group[0]
        stored = first.moe.scheme if first.moe else first.linear.scheme if first.linear else None
        experts = [m.moe for m in group if m.moe is not None]
        rows.append(
            {
                "modules": group_name([m.name for m in group]),
                "operator": first.operator,
                "runs_on": what,
                "stored": str(stored) if stored else "as in the checkpoint",
                "device": first.device,
                "note": first.note,
                "count": len(group),
                "bytes": sum(m.nbytes for m in group)
                + sum(moe.node_bytes(node) for moe in experts for node in range(len(moe.splits))),
            }
        )
    return rows


def _groups(bundle: Bundle, lib: Any) -> list[tuple[str, list[ModulePlan]]]:
    """(what it runs on, modules) as `ktc run` would choose for this bundle, in the words of its report."""
    if bundle.plan.uses_cuda():  # in which type it computes is settled when it is loaded
        return [(_on_the_device(what), group) for what, group in by_words(bundle.plan, lib)]
    if PROGRAM_FILE in bundle.files:
        return native_groups(bundle.plan, lib, load_program(bundle))
    return by_words(bundle.plan, lib)


def _on_the_device(what: str) -> str:
    what = re.sub(r"^linear (\S+) on [^\[]+", r"linear \1 on the device ", what)
    return re.sub(r", (torch )?fp32", "", what)


def _open(path: str) -> Any:
    from ktc import _runtime

    return _runtime.KernelLib(os.fsencode(path))


def _scratch(bundle: Bundle, lib: Any) -> dict[str, int]:
    """Bytes of the largest MoE layer's working memory: the budget is static, whatever the prompt's length."""
    from ktc import _runtime
    from ktc.bundle.verify import native_layer

    pool = _runtime.Pool([[cpu for node in _runtime.numa_nodes() for cpu in node]] * bundle.nodes, False)
    kinds = {m.moe: m for m in bundle.plan.moe_modules()}
    most = {1: 0, PREFILL_TOKENS: 0}
    for moe, module in kinds.items():
        assert moe is not None
        layer, held = native_layer(bundle, lib, pool, module.name, moe, range(moe.experts), moe.top_k)
        for tokens in most:
            most[tokens] = max(most[tokens], int(layer.scratch_bytes(tokens)))
        del layer, held
    return {"decode": most[1], f"prefill of {PREFILL_TOKENS} tokens": most[PREFILL_TOKENS]}


def _goldens(manifest: dict[str, Any]) -> str:
    goldens = manifest["goldens"]
    if goldens is None:
        return "none"
    return counted(len(goldens["moe"]), "MoE layer") + (" and logits" if goldens["logits"] else "")
