"""`ktc repack`: a bundle for another number of NUMA nodes. Blocks move; nothing is quantised again.

A matrix was quantised whole and cut into whole blocks, so joining the slices and cutting them again
gives the bytes that a fresh compile for the new number of nodes would give. Same work directory, same
resuming and same atomic end as `ktc compile`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ktc.bundle import emit, manifest
from ktc.bundle.finish import Logits, finish_bundle
from ktc.bundle.goldens import read_expert
from ktc.bundle.reader import Bundle, TensorRef
from ktc.errors import UsageError
from ktc.layout import split_intermediate, split_unit
from ktc.pack import pipeline
from ktc.pack.experts import METADATA, ExpertPart, plan_parts, write_expert
from ktc.pack.journal import Journal
from ktc.pack.pipeline import Step, Task, Writers
from ktc.pack.writer import ShardLayout, TensorSpec
from ktc.plan.ir import Plan
from ktc.progress import Progress

_CHUNK = 16 << 20


def replan(plan: Plan, nodes: int) -> Plan:
    """The same plan split over another number of nodes.

    Raises:
        UsageError: a layer cannot be split so far; names the node counts that work.
    """
    modules = []
    for module in plan.modules:
        if module.moe is not None:
            try:
                splits = split_intermediate(module.moe.intermediate, nodes, split_unit(module.moe.scheme))
            except ValueError as error:
                raise UsageError(f"{module.name}: {error}", "choose another --nodes") from error
            module = replace(module, moe=replace(module.moe, splits=tuple(splits)))
        modules.append(module)
    return replace(plan, nodes=nodes, modules=tuple(modules))


def repack(
    bundle: Bundle,
    nodes: int,
    out: Path,
    *,
    variants: Sequence[str] | None = None,
    jobs: int = 0,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write `bundle`, split over `nodes` nodes, to `out`.

    Args:
        variants: kernel variants to build (the shapes per node change, so the kernels do); None = those the
            bundle has, () = none.
    Raises:
        UsageError: impossible node count, `out` exists; DiskError; BuildError.
    """
    if nodes < 1:
        raise UsageError(f"{nodes} nodes: at least 1 is needed")
    out = out.parent.resolve() / out.name
    emit.check_output(out, force)
    plan = replan(bundle.plan, nodes)
    parts = plan_parts(plan)
    if variants is None:
        variants = [k["variant"] for k in bundle.manifest["kernels"]]
    layouts = _device_layouts(bundle)
    tasks = [_device_task(bundle, file, layout) for file, layout in layouts.items()]
    tasks += [_expert_task(bundle, part) for part in parts]
    key = {"bundle": hashlib.sha256(manifest.canonical(bundle.manifest)).hexdigest(), "nodes": nodes}
    with Journal(out, key, restart=force, say=say) as journal:
        try:
            kernels = None
            if variants:
                from ktc.bundle.kernels import build_kernels

                kernels = build_kernels(plan, variants, say)
            left = pipeline.unfinished(journal, tasks)
            pipeline.check_space(out, sum(task.size for task in left))
            total, todo = sum(task.nbytes for task in tasks), sum(task.nbytes for task in left)
            with Progress("repack", total, "B", done=total - todo) as progress:
                pipeline.run_tasks(journal, left, progress, jobs or pipeline.default_jobs())
            _finish(bundle, plan, parts, layouts, journal, kernels)
            emit.publish(journal, out, force)
        except BaseException:
            journal.give_up()
            raise
    return out


def _device_layouts(bundle: Bundle) -> dict[str, ShardLayout]:
    """Layout of every device shard, from the tensors it holds."""
    specs: dict[str, list[tuple[int, TensorSpec]]] = {}
    for (node, name), ref in bundle.tensors.items():
        file = ref.file.relative_to(bundle.path).as_posix()
        if node is None and bundle.files[file]["role"] == "device":
            specs.setdefault(file, []).append((ref.offset, TensorSpec(name, ref.dtype, ref.shape)))
    return {
        file: ShardLayout([spec for _, spec in sorted(found, key=lambda pair: pair[0])], METADATA)
        for file, found in sorted(specs.items())
    }


def _device_task(bundle: Bundle, file: str, layout: ShardLayout) -> Task:
    def copy(name: str, ref: TensorRef) -> Callable[[Writers], None]:
        def run(writers: Writers) -> None:
            with ref.file.open("rb") as source:
                for done in range(0, ref.nbytes, _CHUNK):
                    source.seek(ref.offset + done)
                    writers[0].write_at(name, source.read(min(_CHUNK, ref.nbytes - done)), done)

        return run

    refs = {name: bundle.tensors[None, name] for name in layout.tensors}
    return Task((file,), (layout,), [Step(copy(name, ref), ref.nbytes, name) for name, ref in refs.items()])


def _expert_task(bundle: Bundle, part: ExpertPart) -> Task:
    planned = next(m for m in bundle.plan.moe_modules() if m.name == part.module)
    assert planned.moe is not None
    old = planned.moe
    nbytes = sum(old.node_bytes(node) for node in range(bundle.nodes)) // old.experts

    def step(expert: int) -> Callable[[Writers], None]:
        def run(writers: Writers) -> None:
            write_expert(part, writers, expert, read_expert(bundle.tensors, part.module, old, expert))

        return run

    steps = [Step(step(e), nbytes, f"{part.module} expert {e}") for e in range(part.first, part.last + 1)]
    return Task(part.files, part.layouts, steps)


def _finish(
    bundle: Bundle,
    plan: Plan,
    parts: list[ExpertPart],
    layouts: dict[str, ShardLayout],
    journal: Journal,
    kernels: Any,
) -> None:
    out = emit.Emitter(journal.bundle)
    for file, digest in journal.finished.items():
        out.list(file, digest, "experts" if file.startswith("weights/experts/") else "device")
    for file, entry in bundle.files.items():
        if entry["role"] in ("recipe", "model", "licence", "graph"):
            out.add(file, bundle.read(file), entry["role"])
    out.add("plan.json", manifest.canonical(plan.to_json()), "plan")
    old = bundle.manifest
    device = [
        {**tensor, "offset": layouts[tensor["file"]].offsets[tensor["name"]]}
        for tensor in old["tensors"]
        if tensor["file"] in layouts
    ]
    fields = {
        **emit.plan_fields(plan),
        **{name: old[name] for name in ("created_by", "source", "recipe_sha256")},
        "kernels": kernels.emit(out) if kernels else [],
    }
    finish_bundle(out, plan, [*emit.tensor_fields(parts, []), *device], fields, logits=_logits(bundle))


def _logits(bundle: Bundle) -> Logits | None:
    """What the bundle recorded; another split sums in another order, well within the tolerance."""
    ids, logits = (bundle.tensors.get((None, f"golden.{name}")) for name in ("input_ids", "logits"))
    return None if ids is None or logits is None else (np.array(ids.array()), np.array(logits.array()))
