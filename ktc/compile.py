"""`ktc compile`: named passes over one plan, from a checkpoint and a recipe to a bundle.

Each pass takes the compilation and adds to it; whatever is refused is refused in the passes up to
`build`, so before a byte of output, and before kernels are compiled unless it is the compiler that
fails. The work itself is in the packages named in each pass.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ktc
from ktc.bundle import emit, manifest
from ktc.bundle.files import read_manifest
from ktc.bundle.finish import finish_bundle
from ktc.bundle.model_files import TOKENIZER_FILES, licence_of, model_files
from ktc.errors import BuildError, RecipeError, UnsupportedModelError
from ktc.host import git_revision, peak_rss
from ktc.layout import LAYOUT_VERSION, split_note
from ktc.pack import pipeline
from ktc.pack.device import DeviceShard, plan_device
from ktc.pack.experts import ExpertPart, plan_parts
from ktc.pack.journal import Journal
from ktc.plan.ir import Plan
from ktc.progress import Progress, verbosity

if TYPE_CHECKING:
    from ktc.bundle.kernels import KernelSet
    from ktc.checkpoint import Checkpoint
    from ktc.checkpoint.audit import Audit
    from ktc.models.family import Family
    from ktc.recipe import Recipe

SPARE_BYTES = 32 << 20  # manifest, tokenizer, goldens: what the plan does not count


@dataclass
class Compilation:
    """What the passes work on; the fields are filled from top to bottom.

    Attributes:
        say: where lines for the user go (stderr in the command line, nowhere in the API).
    """

    checkpoint_id: str
    recipe_id: str
    out: Path | None
    nodes: int = 1
    variants: Sequence[str] | None = None  # None: every automatic one; empty: no kernels
    jobs: int = 0
    allow_nonfinite: bool = False
    force: bool = False
    logits: bool = True
    say: Callable[[str], None] = lambda _: None

    checkpoint: Checkpoint = field(init=False)
    family: Family = field(init=False)
    recipe: Recipe = field(init=False)
    plan: Plan = field(init=False)
    audit: Audit = field(init=False)
    parts: list[ExpertPart] = field(init=False)
    shards: list[DeviceShard] = field(init=False)
    files: dict[str, tuple[bytes, str]] = field(init=False)  # path in the bundle -> content, role
    tasks: list[pipeline.Task] = field(init=False)
    target: Path = field(init=False)
    kernels: KernelSet | None = None
    journal: Journal = field(init=False)
    packed_bytes: int = 0
    packed_seconds: float = 0.0


@dataclass(frozen=True)
class Compiled:
    """What `compile_checkpoint` made. `source_bytes` is what this run read and packed, in `seconds`; `size` is of all
    files that the manifest lists, as `ktc verify` and `ktc inspect` count."""

    path: Path
    size: int
    plan: Plan
    variants: tuple[str, ...]
    source_bytes: int
    seconds: float
    peak_rss: int
    resumed: bool


def recipe(c: Compilation) -> None:
    """Parse and check the recipe (first: a typing mistake must not wait for a download)."""
    from ktc.recipe import load_recipe

    c.recipe = load_recipe(c.recipe_id)
    if c.out is not None:
        emit.check_output(c.out, c.force)


def read(c: Compilation) -> None:
    """Open the checkpoint: every header checked, every file there, the family known; settle the output's name."""
    from ktc.checkpoint import open_checkpoint
    from ktc.models.registry import family_for

    c.checkpoint = open_checkpoint(c.checkpoint_id)
    c.family = family_for(c.checkpoint.config)
    target = c.out or Path(f"{_model_name(c.checkpoint)}-{_file_name(c.recipe.name)}.ktc")
    c.target = target.parent.resolve() / target.name
    emit.check_output(c.target, c.force)


def plan(c: Compilation) -> None:
    """Decide what every module becomes."""
    from ktc.plan import build_plan

    made = build_plan(c.checkpoint.config, c.recipe, nodes=c.nodes)
    # Rules are cited by the recipe's file name: where it lay on this machine is nobody's business.
    rules = tuple(replace(rule, where=re.sub(r"\([^()]*/", "(", rule.where)) for rule in made.rules)
    c.plan = replace(made, rules=rules)
    if not c.plan.moe_modules():
        raise RecipeError(
            f"recipe {c.recipe.file} turns no MoE block into ktc.FusedMoE, so there is nothing to compile",
            "add a rule with match: {role: moe} and replace: {class: ktc.FusedMoE}",
        )
    for note in dict.fromkeys(split_note(m.moe.splits) for m in c.plan.moe_modules() if m.moe is not None):
        if note:
            c.say(f"note: experts are split {note}")


def audit(c: Compilation) -> None:
    """Every tensor of the checkpoint is used or known to be unneeded; every one the plan needs is there."""
    from ktc.checkpoint.audit import audit_plan
    from ktc.pack.source import expert_shape

    moe = c.plan.moe_modules()[0].moe
    assert moe is not None
    c.audit = audit_plan(c.checkpoint, c.family, c.plan, expert_shape(moe))
    for line in c.audit.lines():
        c.say(line)


def layout(c: Compilation) -> None:
    """Lay out every shard to the byte: a pure function of the plan and of the checkpoint's headers."""
    from ktc.pack.source import CheckpointSource, device_task, expert_task

    c.parts = plan_parts(c.plan)
    source = CheckpointSource(c.checkpoint, c.family, c.audit.readers)
    c.shards = plan_device(c.plan, source)
    c.tasks = [device_task(shard, source, c.plan.tied, c.allow_nonfinite) for shard in c.shards]
    c.tasks += [expert_task(p, c.audit.readers[p.module], source, c.allow_nonfinite) for p in c.parts]


def side_files(c: Compilation) -> None:
    """Make everything that needs no weights: recipe, plan, decode graph, config, tokenizer, licences."""
    c.files = {
        "recipe.yaml": (c.recipe.text.encode(), "recipe"),
        "plan.json": (manifest.canonical(c.plan.to_json()), "plan"),
    }
    _add_graph(c)
    for path, data in model_files(c.checkpoint.config, c.checkpoint.side_files).items():
        c.files[path] = (data, "licence" if path.startswith("LICENSES/") else "model")
    if not any(f"model/{name}" in c.files for name in TOKENIZER_FILES):
        c.say(
            "note: the checkpoint has no tokenizer (tokenizer.json): ktc run, eval and profile will refuse the bundle"
        )


def claim(c: Compilation) -> None:
    """Take the work directory (before the kernels: another compile of this output must not cost minutes)."""
    c.journal = Journal(c.target, _key(c), restart=c.force, say=c.say)
    with _giving_up(c):
        emit.check_output(c.target, c.force)  # another compile may have made it just before the lock was free
        _check_space(c, pipeline.unfinished(c.journal, c.tasks))


def build(c: Compilation) -> None:
    """Generate and compile the kernel libraries (before packing: a broken compiler must not cost an hour)."""
    if c.variants is not None and not c.variants:
        return
    from ktc.bundle.kernels import build_kernels

    with _giving_up(c):
        try:
            c.kernels = build_kernels(c.plan, c.variants, c.say)
        except BuildError as error:
            elsewhere = "or --no-kernels: they are then built where the bundle runs"
            raise BuildError(error.message, f"{error.hint}; {elsewhere}" if error.hint else elsewhere) from error


def pack(c: Compilation) -> None:
    """Quantise, pack and write every shard that an earlier, interrupted run did not finish."""
    tasks, left = c.tasks, pipeline.unfinished(c.journal, c.tasks)
    if c.journal.resumed:
        c.say(f"continuing {c.journal.root}: {len(tasks) - len(left)} of {len(tasks)} shard sets are done")
    total, todo = sum(t.nbytes for t in tasks), sum(t.nbytes for t in left)
    started = time.monotonic()
    with _giving_up(c):
        _check_space(c, left)
        with Progress("pack", total, "B", done=total - todo) as progress:
            pipeline.run_tasks(c.journal, left, progress, c.jobs or pipeline.default_jobs())
    c.packed_bytes, c.packed_seconds = todo, time.monotonic() - started


def emit_bundle(c: Compilation) -> None:
    """Side files, kernels, goldens and the manifest, last; then the one rename that makes it a bundle."""
    with _giving_up(c):
        _write_rest(c)
        emit.publish(c.journal, c.target, c.force)


@contextmanager
def _giving_up(c: Compilation) -> Iterator[None]:
    """Whatever fails, the work directory is left fit for the next run, or removed."""
    try:
        yield
    except BaseException:
        c.journal.give_up()
        raise


PASSES: tuple[Callable[[Compilation], None], ...] = (
    recipe,
    read,
    plan,
    audit,
    layout,
    side_files,
    claim,
    build,
    pack,
    emit_bundle,
)


def compile_checkpoint(
    checkpoint: str | Path,
    recipe: str | Path,
    out: str | Path | None = None,
    *,
    nodes: int = 1,
    variants: Sequence[str] | None = None,
    jobs: int = 0,
    allow_nonfinite: bool = False,
    force: bool = False,
    logits: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Compiled:
    """Compile a checkpoint into a bundle; interrupted, the same call continues.

    Args:
        checkpoint: directory, hub id or short name.
        recipe: file, or the name of a shipped recipe.
        out: the bundle's directory; default `<model>-<recipe>.ktc` in the working directory.
        nodes: NUMA nodes to split every expert over.
        variants: kernel variants to build; None = all that a host may choose, () = none.
        jobs: worker threads; 0 = the cores of this process.
        allow_nonfinite: pack NaN and infinite weights instead of refusing them.
        force: replace an existing bundle, or an unfinished compile of other inputs.
        logits: also record the logits of a short prompt, where the whole model is small enough to run.
        say: receives single lines about choices.
    Raises:
        KtcError: see the passes; nothing is left at `out`.
    """
    c = Compilation(
        str(checkpoint),
        str(recipe),
        Path(out) if out else None,
        nodes,
        variants,
        jobs,
        allow_nonfinite,
        force,
        logits,
        say,
    )
    for step in PASSES:
        started = time.monotonic()
        step(c)
        if verbosity() > 0:
            say(f"{step.__name__}: {time.monotonic() - started:.2f} s")
    return Compiled(
        path=c.target,
        size=sum(entry["size"] for entry in read_manifest(c.target)[1]["files"]),
        plan=c.plan,
        variants=tuple(c.kernels.variants) if c.kernels else (),
        source_bytes=c.packed_bytes,
        seconds=c.packed_seconds,
        peak_rss=peak_rss() or 0,
        resumed=c.journal.resumed,
    )


def _model_name(checkpoint: Checkpoint) -> str:
    name = (checkpoint.source.repo or checkpoint.path.resolve().name).rpartition("/")[2]
    return _file_name(name) or "model"


def _file_name(text: str) -> str:
    """With `-` for whatever a shell or a path takes for something else."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)


def plan_digest(plan: Plan) -> str:
    """Hash of what a plan makes of the weights; how the recipe worded it is left out."""
    decided = {k: v for k, v in plan.to_json().items() if k not in ("rules", "recipe")}
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


def _key(c: Compilation) -> dict[str, Any]:
    files = []
    for file in c.checkpoint.files:
        stat = file.stat()
        files.append([file.name, stat.st_size, stat.st_mtime_ns])
    return {
        "checkpoint": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "recipe": c.recipe.sha256,
        "plan": plan_digest(c.plan),
        "layout version": LAYOUT_VERSION,
        "quantiser version": manifest.ALGORITHM_VERSION,
    }


def _check_space(c: Compilation, left: list[pipeline.Task]) -> None:
    kernels = c.kernels.nbytes if c.kernels else 0
    pipeline.check_space(c.target, sum(t.size for t in left) + kernels + SPARE_BYTES)


def _add_graph(c: Compilation) -> None:
    """The decode graph; a family or config without one runs on Hugging Face's modules, and that is said."""
    from ktc.native.engine import PROGRAM_FILE, lower_bundle, outlook

    if c.plan.uses_cuda():  # its decode step is captured as a CUDA graph when the bundle is loaded
        return

    try:
        program = lower_bundle(c.checkpoint.config, c.plan)
    except UnsupportedModelError:
        c.say(outlook(c.checkpoint.config, c.plan))
        return
    if program.callbacks():
        c.say(outlook(c.checkpoint.config, c.plan))
    c.files[PROGRAM_FILE] = (manifest.canonical(program.to_json()), "graph")


@cache
def _git() -> str | None:
    """Asked once: a checkout that is edited meanwhile must not tell two bundles of one process apart."""
    return git_revision()


def _write_rest(c: Compilation) -> None:
    out = emit.Emitter(c.journal.bundle)
    for file, digest in c.journal.finished.items():
        out.list(file, digest, "experts" if file.startswith("weights/experts/") else "device")
    for path, (data, role) in c.files.items():
        out.add(path, data, role)
    fields = {
        **emit.plan_fields(c.plan),
        "created_by": {"ktc": ktc.__version__, "git": _git()},
        "source": {
            "name": _model_name(c.checkpoint),
            "repo": c.checkpoint.source.repo,
            "revision": c.checkpoint.source.revision,
            "licence": licence_of(c.checkpoint.path),
            "files": [{"path": f.name, "size": f.stat().st_size} for f in c.checkpoint.files],
        },
        "recipe_sha256": c.recipe.sha256,
        "kernels": c.kernels.emit(out) if c.kernels else [],
    }
    tensors = emit.tensor_fields(c.parts, c.shards)
    runs_here = c.logits and not c.plan.uses_cuda()  # cross-compiling is the rule for those
    variant = c.kernels.best_here() if c.kernels and runs_here else None
    finish_bundle(out, c.plan, tensors, fields, run_with=variant)
