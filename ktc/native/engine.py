"""A bundle as a native model: open, judge, read the weights, build the executor.

No torch and no transformers, unless the program calls modules of Hugging Face's (modules.py).

`NativeModel` keeps the position and the caches of one sequence: `prefill` any number of tokens (in chunks
of bounded scratch), `decode` one. Sampling and text are elsewhere (generate.py in this folder).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ktc.engine.generate import check_tokens
from ktc.engine.kernels import Kernels
from ktc.engine.opening import no_kernel, open_judged, open_kernels
from ktc.engine.placement import misplaced
from ktc.errors import BundleError, KtcError, UsageError
from ktc.graph.build import PREFILL_CHUNK, GraphExecutor
from ktc.graph.ir import Program
from ktc.native.modules import BundleModules, import_torch, module_bytes
from ktc.native.report import NativeReport
from ktc.native.weights import BundleWeights, wanted_tensors
from ktc.progress import Progress

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle
    from ktc.plan.ir import Plan

PROGRAM_FILE = "graph/program.json"
DEFAULT_CONTEXT = 8192
"""Positions of the caches unless asked otherwise (the model's own limit may be larger, and so would its caches)."""


class NativeModel:
    """One sequence on the native executor.

    Attributes:
        position: tokens in the caches; may be lowered to drop the newest ones.
        context: positions that the caches have.
        config, generation_config: plain attributes of the bundle's JSON files, as generation needs them.
    """

    def __init__(self, graph: GraphExecutor, config: dict[str, Any], generation: dict[str, Any] | None) -> None:
        self.graph = graph
        self.position = 0
        self.context = graph.context
        self.vocab = graph.program.vocab
        self.raw_config = config
        self.config = SimpleNamespace(**config)
        self.config.max_position_embeddings = self.context
        self.config.get_text_config = lambda: self.config
        self.generation_config = SimpleNamespace(**generation) if generation is not None else None
        self.ktc_report: NativeReport | None = None
        self.ktc_plan: Plan | None = None

    def native_operators(self) -> list[Any]:
        """Every packed operator, to report which kernels ran."""
        found: list[Any] = getattr(self.graph.weights, "native_operators", list)()
        return found

    def reset(self) -> None:
        """Forget the sequence."""
        self.position = 0

    def set_deferral(self, n_deferred: int | None, n_skipped: int = 0) -> None:
        """Experts of each MoE layer deferred or skipped from the next `decode` on; None = what the recipe says.

        Raises:
            KtcError: fewer than 2 experts would stay immediate, or both at once; nothing has changed.
        """
        self.graph.set_deferral(n_deferred, n_skipped)

    def prefill(self, ids: Sequence[int], rows: int = 1) -> NDArray[np.float32]:
        """Append tokens; logits of the last one, f32 [vocab] (or of the last `rows` of the last chunk, [rows, vocab]).

        Raises:
            KtcError: the context is full, an id is outside the vocabulary, or a kernel failed; nothing was
                appended.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.size == 0:
            raise KtcError("no tokens to append")
        self._check(tokens)
        start, logits = self.position, None
        try:
            for begin in range(0, len(tokens), self.graph.chunk):
                part = tokens[begin : begin + self.graph.chunk]
                logits = self._step(part, rows=min(rows, len(part)))
                self.position += len(part)
        except BaseException:
            self.position = start
            raise
        assert logits is not None
        return logits[0] if rows == 1 else logits

    def decode(self, token: int) -> NDArray[np.float32]:
        """Append one token in decode mode (Expert Deferral applies); f32 [vocab].

        Raises:
            KtcError: as `prefill`.
        """
        tokens = np.array([token], dtype=np.int64)
        self._check(tokens)
        logits = self._step(tokens, decode=True)
        self.position += 1
        row: NDArray[np.float32] = logits[0]
        return row

    def _step(self, tokens: NDArray[np.int64], **options: Any) -> NDArray[np.float32]:
        try:
            return self.graph.step(tokens, self.position, **options)
        except RuntimeError as error:  # a kernel or a worker failed; nothing of the step remains
            raise KtcError(f"the model failed: {error}", "run `ktc verify` on the bundle") from error

    def _check(self, tokens: NDArray[np.int64]) -> None:
        check_tokens(tokens, self.position, self.context, self.vocab)


def load_program(bundle: Bundle) -> Program:
    """The bundle's decode graph; a bundle without one is lowered now, which needs transformers.

    Raises:
        UnsupportedModelError: the family has no decode graph. BundleError: the stored one is of another format.
    """
    if PROGRAM_FILE in bundle.files:
        try:
            return Program.from_json(bundle.read_object(PROGRAM_FILE))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BundleError(f"{bundle.path / PROGRAM_FILE}: {error}", "compile the checkpoint again") from error
    return lower_bundle(bundle.read_object("model/config.json"), bundle.plan)


def lower_bundle(config: dict[str, Any], plan: Any) -> Program:
    """Raw config.json + plan -> Program. Imports transformers."""
    from ktc.graph.inventory import Inventory
    from ktc.graph.lower import lower
    from ktc.models.registry import hf_config

    return lower(hf_config(config), Inventory.from_plan(plan))


def outlook(config: dict[str, Any], plan: Plan) -> str:
    """How a bundle of this plan will run: on the decode graph, or on modules in torch, and why. A line, and one for
    each kind of module that the graph calls in torch."""
    from ktc.errors import UnsupportedModelError

    if plan.uses_cuda():
        return "decode graph: captured on the GPU when the bundle is loaded"
    try:
        program = lower_bundle(config, plan)
    except UnsupportedModelError as error:
        return f"no decode graph: {error.message}; this bundle runs on Hugging Face's modules, which is slower"
    kinds = {"bf16" if n.params["bf16"] else "fp32" for n in program.nodes if n.op in ("gqa", "mla")}
    kinds |= {"in torch" for n in program.nodes if n.op == "callback" and n.params.get("attention")}
    called = len(program.callbacks())
    native = (
        f"{called} of them callbacks into torch, so it is loaded and slower; the others native"
        if called
        else "all native"
    )
    lines = [
        f"decode graph: {len(program.nodes)} nodes, {native} (what no rule matched, on the weights as stored);"
        f" prefill attention {_attention(kinds)}"
    ]
    return "\n".join([*lines, *(f"  {note}" for note in program.notes)])


def _attention(allowed: set[str]) -> str:
    """What prefill attention computes in on this machine, in the words of `ktc run -v`, and what was allowed if that is
    another."""
    try:
        from ktc import _runtime

        lacking = "bf16" in allowed and not _runtime.bf16_attention()
    except ImportError:  # planning needs no runtime
        lacking = False
    here = {"fp32" if lacking and kind == "bf16" else kind for kind in allowed}
    also = "; the recipe allows bf16, which this CPU lacks" if lacking else ""
    return f"{'/'.join(sorted(here))}{also}"


def _check_operators(forced: str) -> None:
    """
    Raises:
        UsageError: the named instruction set of the native operators is unknown, or this machine lacks it.
    """
    from ktc import _runtime

    if forced and forced not in (here := _runtime.ops.available()):
        raise UsageError(
            f"KTC_OPS_ISA={forced}: this machine has no such operators", f"possible here: {', '.join(here)}"
        )


def open_native(
    path: str | Path,
    *,
    threads: int | None = None,
    variant: str | None = None,
    force_kernel: str = "",
    emulate_nodes: bool = False,
    strict: bool = False,
    trust_sha256: Sequence[str] = (),
    kernel_library: str | Path | None = None,
    context: int | None = None,
    chunk: int = PREFILL_CHUNK,
    n_deferred: int | None = None,
    n_skipped: int = 0,
    isa: str = "",
    check_memory: bool = True,
    caller_works: bool = True,
    fp32_attention: bool = False,
) -> NativeModel:
    """Open a bundle for native replay.

    Args:
        path: the bundle; the options up to `kernel_library` are those of `ktc.load`.
        context: positions of the caches; default: the model's, at most 8192.
        chunk: tokens of one prefill step.
        n_deferred: experts deferred per MoE layer while decoding; None = what the recipe says.
        n_skipped: lowest experts dropped while decoding (for comparison).
        isa: force the operators' instruction set.
        caller_works: see `ktc.engine.pool.get_pool`.
        check_memory: refuse up front what does not fit in memory.
        fp32_attention: prefill attends in fp32 whatever the recipe says: for a reference.
    Raises:
        BundleError, BuildError, UnsupportedModelError, KtcError: see the parts.
    """
    from ktc import _runtime
    from ktc.engine import pool as pools
    from ktc.engine.memory import check_memory as refuse_too_large
    from ktc.perf.tuning import load as load_tuning

    bundle, degraded = open_judged(path, emulate_nodes, trust_sha256, own_kernels=kernel_library is not None)
    program = load_program(bundle)
    if fp32_attention:
        program = program.with_fp32_attention()
    _check_operators(isa or os.environ.get("KTC_OPS_ISA", ""))
    lib, slower = open_kernels(bundle, variant, trust_sha256, kernel_library)
    started = time.perf_counter()  # kernels may have been built: that is no reading of weights
    cpus = pools.place(_runtime.numa_nodes(), bundle.plan.nodes, threads, emulate_nodes)
    degraded += pools.crowded(_runtime.numa_nodes(), threads)
    pool = pools.get_pool(cpus, caller_works)
    if context is not None and context > program.context:
        degraded.append(f"a context of {context} positions was asked for; the model has {program.context}")
    context = min(context or DEFAULT_CONTEXT, program.context)
    total = sum(ref.nbytes for ref in wanted_tensors(bundle, program).values())
    called_bytes, called_memory = module_bytes(bundle, program)
    if check_memory:
        refuse_too_large(
            total + called_memory + program.state_bytes(context),
            f"the weights and the caches of {context} positions need",
            "close other programs, give --context a smaller number, or compile with fewer bits per weight",
        )
    if program.callbacks():
        import_torch()  # seconds that are no reading of weights
    tuning = load_tuning()
    try:
        with Progress("load weights", total + called_bytes, "B") as progress:
            kernels, bind = Kernels(lib, pool, force_kernel, tuning.min_rows), not emulate_nodes
            modules = None
            if program.callbacks():
                modules = BundleModules(bundle, program, kernels, context=context, progress=progress, bind=bind)
            weights = BundleWeights(bundle, program, kernels, progress, bind, modules)
        graph = GraphExecutor(
            program,
            weights,
            pool,
            context=context,
            chunk=chunk,
            n_deferred=n_deferred,
            n_skipped=n_skipped,
            isa=isa,
        )
    except (RuntimeError, ValueError) as error:  # a kernel that the plan needs is not in the library
        raise no_kernel(bundle, lib, force_kernel, error) from error
    placement = weights.placement()
    degraded += slower + kernels.notes + pool.warnings() + misplaced(placement)
    config = bundle.read_object("model/config.json")
    name = "model/generation_config.json"
    generation = bundle.read_object(name) if name in bundle.files else None
    model = NativeModel(graph, config, generation)
    model.ktc_plan = bundle.plan
    model.ktc_report = NativeReport(
        str(bundle.path),
        lib.variant,
        graph.native.isa,
        graph.prefill_type,
        [len(n) for n in cpus],
        weights.nbytes,
        weights,
        graph.arena_bytes,
        program.state_bytes(graph.context),
        graph.context,
        n_deferred,
        n_skipped,
        time.perf_counter() - started,
        placement,
        degraded,
        bundle.plan,
        lib,
        program,
        str(tuning),
    )
    if strict and degraded:
        raise KtcError("strict: " + "; ".join(degraded), "leave out --strict to run all the same")
    return model
