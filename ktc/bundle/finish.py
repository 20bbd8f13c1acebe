"""The last steps of making a bundle: goldens over shards that are in place, then the manifest.

The layers' goldens come from the packed bytes alone. The logits of a short prompt need a whole engine
in memory, so they are recorded only for models small enough not to break the compile's memory bound.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktc.bundle.emit import Emitter
from ktc.bundle.goldens import GOLDENS, MoeGolden, make_moe_golden, write_goldens
from ktc.bundle.reader import TensorRef, TensorTable
from ktc.plan.ir import Plan
from ktc.progress import Progress

LOGITS_MAX_BYTES = 512 << 20  # weights of a model that may be run while compiling
PROMPT_TOKENS = 8

Logits = tuple[NDArray[np.int64], NDArray[np.float32]]


def finish_bundle(
    out: Emitter,
    plan: Plan,
    tensors: list[dict[str, Any]],
    fields: dict[str, Any],
    *,
    logits: Logits | None = None,
    run_with: str | None = None,
) -> None:
    """Write goldens.safetensors and the manifest.

    Args:
        tensors: the manifest's table of the shards, all of which are in place.
        fields: every other manifest field.
        logits: what another bundle of the same weights recorded.
        run_with: kernel variant to run the bundle with to get them, if it is small enough; None = do not.
    Raises:
        KtcError: the bundle does not run.
    """
    refs = TensorTable()
    for t in tensors:
        path = out.root / t["file"]
        refs[t["node"], t["name"]] = TensorRef(path, t["offset"], t["nbytes"], t["dtype"], tuple(t["shape"]))
    cases: list[MoeGolden] = []
    modules = plan.moe_modules()
    with Progress("goldens", len(modules), "layers") as progress:
        for module in modules:
            assert module.moe is not None
            cases.append(make_moe_golden(refs, module.name, module.moe))
            progress.update()
    _write(out, cases, tensors, fields, logits)
    if run_with and sum(t["nbytes"] for t in tensors) <= LOGITS_MAX_BYTES:
        made = engine_logits(out.root, prompt(out.root), variant=run_with)
        _write(out, cases, tensors, fields, made)


def _write(
    out: Emitter,
    cases: list[MoeGolden],
    tensors: list[dict[str, Any]],
    fields: dict[str, Any],
    logits: Logits | None,
) -> None:
    digest, goldens, table = write_goldens(out.root / GOLDENS, cases, logits)
    out.list(GOLDENS, digest, "goldens")
    out.write_manifest({**fields, "tensors": [*tensors, *table], "goldens": goldens})


def prompt(bundle: Path) -> NDArray[np.int64]:
    """Token ids [T] that exist in every vocabulary of this model."""
    config = json.loads((bundle / "model/config.json").read_bytes())
    vocabulary = int(config.get("vocab_size") or 2)
    return (np.arange(PROMPT_TOKENS, dtype=np.int64) * 7919 + 11) % vocabulary


def engine_logits(
    bundle: Path,
    ids: NDArray[np.int64],
    *,
    variant: str | None = None,
    trust_sha256: Sequence[str] = (),
    library: str | None = None,
) -> Logits:
    """(ids [T], logits f32 [T, V]) of the bundle, run on this machine. Options as `ktc.load`."""
    import torch

    import ktc

    options = {"kernel_library": library} if library else {}
    model = ktc.load(bundle, emulate_nodes=True, variant=variant, trust_sha256=trust_sha256, **options)
    with torch.inference_mode():
        out = model(torch.from_numpy(ids)[None]).logits[0]
    return ids, out.float().numpy()
