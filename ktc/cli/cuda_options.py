"""Loading a bundle that is planned for a CUDA device, for the commands that run one. Parsing only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ktc.cli.engine_options import load_model

F = TypeVar("F", bound=Callable[..., Any])


def attention_option(function: F) -> F:
    """--attention."""
    return click.option(
        "--attention",
        type=click.Choice(["auto", "flashinfer", "torch"]),
        default="auto",
        help="Attention of decode steps on a GPU; auto: FlashInfer where it can be used.",
    )(function)


def refuse_attention(attention: str) -> None:
    """Of a bundle that does not run on a GPU.

    Raises:
        click.UsageError: one was asked for.
    """
    if attention != "auto":
        raise click.UsageError(f"--attention {attention} is for bundles that run on a GPU")


def load_session(
    bundle: Path,
    verbose: int,
    *,
    graph: str = "auto",
    context: int | None = None,
    n_deferred: int | None = None,
    n_skipped: int = 0,
    attention: str = "auto",
    **options: Any,
) -> Any:
    """A `CudaSession`: the decode step captured as one CUDA graph, or (graph "off") enqueued operation by operation."""
    model = load_model(bundle, verbose, **options)
    from ktc.cuda.session import CudaSession
    from ktc.progress import format_bytes, verbosity

    session = CudaSession(
        model, context=context, graph=graph != "off", n_deferred=n_deferred, n_skipped=n_skipped, attention=attention
    )
    if verbosity():
        print(f"  attention of decode steps: {session.attention}", file=sys.stderr)
        if session.cache.host:
            sizes = f"{format_bytes(session.cache.host_nbytes)} in host memory, {format_bytes(session.cache.nbytes)}"
            print(f"  KV cache: {sizes} on the device", file=sys.stderr)
    return session
