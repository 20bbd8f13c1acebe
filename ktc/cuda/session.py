"""One sequence on CUDA devices: prefill in chunks, decode a token at a time by replaying a CUDA graph per stage.

The decode step is captured once, with static buffers: token and position are read from pinned memory by the first
graph's first nodes, logits are written to pinned memory by the last one's last, and what lies between includes the
copies and callbacks of every MoE layer. On one device, a token is one graph launch and one wait. Routing, position and
the number of deferred experts change nothing about the graphs. `graph=False` enqueues the same step's operations one by
one: the oracle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktc.cuda.cache import StaticCache, masks_for, windows_of
from ktc.cuda.experts import ExpertLane
from ktc.cuda.graphs import StepGraphs, can_capture
from ktc.cuda.host_cache import HostCaches
from ktc.cuda.paged import PAGE, make_attention
from ktc.cuda.pipeline import Pipeline
from ktc.engine.generate import check_tokens
from ktc.errors import KtcError
from ktc.plan.caches import host_layers

DEFAULT_CONTEXT = 8192
PREFILL_CHUNK = 512
CALIBRATION_STEPS = 12
GOOD_ENOUGH = 1.02
"""`auto` takes the fewest deferred experts whose step takes at most this times the fastest one's."""


class CudaSession:
    """Caches, position and graphs of one sequence.

    Args:
        model: from `ktc.load` of a bundle that is planned for a CUDA device.
        context: positions of the caches; default: the model's, at most 8192.
        graph: replay a captured decode step, or enqueue its operations one by one.
        n_deferred: experts deferred per MoE layer while decoding; None = what the recipe says.
        n_skipped: lowest experts dropped per MoE layer while decoding.
        attention: of decode steps: "flashinfer", "torch", or "auto" for the first of them that can be used.

    Attributes:
        attention: what they use, in words.
        position: tokens in the caches; may be lowered to drop the newest ones.
        n_deferred: per MoE layer, as in use.
    """

    def __init__(
        self,
        model: Any,
        *,
        context: int | None = None,
        graph: bool = True,
        n_deferred: int | None = None,
        n_skipped: int = 0,
        chunk: int = PREFILL_CHUNK,
        attention: str = "auto",
    ) -> None:
        self.model, self.lane, self.pipeline = model, model.ktc_lane, model.ktc_pipeline
        assert isinstance(self.lane, ExpertLane) and isinstance(self.pipeline, Pipeline)
        stages = self.pipeline.stages
        self._first, self._last = (self.lane.sides[stage.device] for stage in (stages[0], stages[-1]))
        self.device, self.dtype = self._first.device, model.ktc_dtype
        self.config, self.generation_config = model.config, model.generation_config
        self.ktc_report, self.ktc_plan = model.ktc_report, model.ktc_plan
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT
        self.context = min(limit, context or DEFAULT_CONTEXT)
        self.vocab, self.chunk = int(self.config.vocab_size), chunk
        self.position = 0
        room = -(-self.context // PAGE) * PAGE
        self.cache = StaticCache(room, self._host_caches())
        self.cache.here = self.pipeline.here
        self.masks = masks_for(self.config, room, self.device, self.dtype)
        with self._first.current():
            self._paged, self.attention = make_attention(attention, model, room, windows_of(self.config))
        pinned = self.device.type == "cuda"
        self._given = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)  # token, position
        self._taken = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._logits = torch.zeros(self.vocab, dtype=torch.float32, pin_memory=pinned)
        self._graphs: StepGraphs | None = None
        self._warm_up()
        if graph and can_capture(self.device):
            self._capture()
        self.n_deferred = self._choose(n_deferred, n_skipped)

    def _host_caches(self) -> dict[int, HostCaches]:
        """Of the layers that a rule gives one, by device."""
        wanted, sides = host_layers(self.ktc_plan), self.lane.sides
        of_device = {stage.device: HostCaches(sides[stage.device]) for stage in self.pipeline.stages}
        return {
            layer: of_device[stage.device]
            for stage in self.pipeline.stages
            for layer in stage.layers
            if layer in wanted
        }

    def native_operators(self) -> list[Any]:
        """To report which kernels ran."""
        return list(self.lane.moes)

    def reset(self) -> None:
        """Forget the sequence."""
        self.position = 0

    # ---- steps ------------------------------------------------------------------------------------------------
    def prefill(self, ids: Sequence[int], rows: int = 1) -> NDArray[np.float32]:
        """Append tokens; logits of the last one, f32 [vocab] (or of the last `rows` of the last chunk, [rows, vocab]).

        Raises:
            KtcError: the context is full, or an id is outside the vocabulary. RuntimeError: a worker failed. The
            position is as before.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.size == 0:
            raise KtcError("no tokens to append")
        self._check(tokens)
        start, logits = self.position, None
        try:
            for begin in range(0, len(tokens), self.chunk):
                part = tokens[begin : begin + self.chunk]
                logits = self._prefill_chunk(part, min(rows, len(part)))
                self.position += len(part)
        except BaseException:
            self.position = start
            self._abandon()
            raise
        assert logits is not None
        return logits[0] if rows == 1 else logits

    @torch.inference_mode()
    def _prefill_chunk(self, tokens: NDArray[np.int64], rows: int) -> NDArray[np.float32]:
        with self._first.current():
            ids = torch.from_numpy(tokens).to(self.device)
            end = self.position + len(tokens)
            positions = torch.arange(self.position, end, device=self.device)
            logits = self._forward(ids, positions, end, rows)  # [rows, V]
            out: NDArray[np.float32] = logits.float().cpu().numpy()
            self.lane.synchronize()
        return out

    def decode(self, token: int) -> NDArray[np.float32]:
        """Append one token in decode mode (deferral and skipping apply); f32 [vocab].

        Raises:
            KtcError: as `prefill`. RuntimeError: a worker failed; it says in which MoE layer.
        """
        self._check(np.array([token]))
        self._given[0], self._given[1] = token, self.position
        try:
            with self._first.current():
                if self._paged is not None:
                    self._paged.plan(self.position + 1)
                if self._graphs is not None:
                    self._graphs.replay()
                else:
                    self._step()
        except BaseException:
            self._abandon()
            raise
        self.lane.synchronize()
        self.position += 1
        return self._logits.numpy().copy()

    def _check(self, tokens: NDArray[np.int64]) -> None:
        check_tokens(tokens, self.position, self.context, self.vocab)

    def _forward(self, ids: Any, positions: Any, seen: int | None, rows: int) -> Any:
        """ids, positions [T] on the device -> logits [rows, V] of the last rows."""
        self.cache.positions, self.cache.seen = positions, seen
        mask = self.masks(positions, seen)
        self.pipeline.carried = (positions, *(mask.values() if isinstance(mask, dict) else (mask,)))
        out = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=rows,
        )
        return out.logits[0]

    @torch.inference_mode()
    def _step(self) -> Any:
        """Enqueue one decode step. Returns the device's logits, which a captured graph keeps."""
        self._first.copy(self._taken, self._given)
        self.lane.decode = True
        try:
            with self._paged.step() if self._paged is not None else nullcontext():
                self.cache.in_place = self._paged is not None
                logits = self._forward(self._taken[:1], self._taken[1:], None, 1)[0].float().contiguous()
        finally:
            self.lane.decode = self.cache.in_place = False
        self._last.copy(self._logits, logits)
        return logits

    def _abandon(self) -> None:
        """After a failure half way: nothing of the step may reach the next one."""
        try:
            self.lane.synchronize()
        except RuntimeError:  # the caller has the first error already
            return

    # ---- the graph --------------------------------------------------------------------------------------------
    def _warm_up(self) -> None:
        """Steps that make every lazily allocated thing (caches, workspaces, scratch of the experts)."""
        if not can_capture(self.device):
            self._step()
            self.lane.synchronize()
            return
        with ExitStack() as streams:  # as torch asks for: not on the default streams
            for side in self.lane.sides.values():
                side.synchronize()
                with side.current():
                    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                streams.enter_context(torch.cuda.stream(stream))
            with self._first.current():
                for _ in range(2):
                    self._step()
            self.lane.synchronize()

    def _capture(self) -> None:
        """
        Raises:
            KtcError: something in the model needs the host in the middle of a step.
        """
        graphs = StepGraphs(self.pipeline)
        try:
            graphs.record(self._step)
        except RuntimeError as error:
            raise KtcError(
                f"the decode step cannot be captured as a CUDA graph: {' '.join(str(error).split())}",
                "run with --graph off",
            ) from error
        self._graphs = graphs

    # ---- deferral ---------------------------------------------------------------------------------------------
    def _choose(self, n_deferred: int | None, n_skipped: int) -> list[int]:
        planned = [m.moe.n_deferred_experts for m in self.ktc_plan.moe_modules()]
        if n_deferred is not None:
            wanted = [n_deferred] * len(planned)
        elif n_skipped:
            wanted = [0] * len(planned)
        elif "auto" in planned:
            best = self._calibrate()
            wanted = [best if n == "auto" else n for n in planned]
        else:
            wanted = planned
        self.split(wanted, n_skipped)
        return wanted

    def split(self, n_deferred: int | Sequence[int], n_skipped: int = 0) -> None:
        """From the next decode step on; the graph stays as it is.

        Raises:
            KtcError: fewer than two experts would stay immediate, or deferring and skipping at once.
        """
        layers = len(self.lane.moes)
        wanted = [n_deferred] * layers if isinstance(n_deferred, int) else list(n_deferred)
        self.lane.split(wanted, n_skipped)
        self.n_deferred = wanted

    def _calibrate(self) -> int:
        """The fewest deferred experts that keep the CPU busy here: measured on decode steps of this very model."""
        times = []
        for deferred in range(max(1, self.lane.top_k - 1)):
            self.split(deferred)
            samples = []
            for _ in range(CALIBRATION_STEPS):
                began = time.perf_counter()
                self.decode(0)
                samples.append(time.perf_counter() - began)
                self.position = 0
            times.append(sorted(samples)[len(samples) // 2])
        return next(k for k, t in enumerate(times) if t <= GOOD_ENOUGH * min(times))
