"""Loading a bundle that is planned for a CUDA device, for the commands that run one. Parsing only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktc.cli.engine_options import load_model


def load_session(
    bundle: Path,
    verbose: int,
    *,
    graph: str = "auto",
    context: int | None = None,
    n_deferred: int | None = None,
    n_skipped: int = 0,
    **options: Any,
) -> Any:
    """A `CudaSession`: the decode step captured as one CUDA graph, or (graph "off") enqueued operation by operation."""
    model = load_model(bundle, verbose, **options)
    from ktc.cuda.session import CudaSession

    return CudaSession(model, context=context, graph=graph != "off", n_deferred=n_deferred, n_skipped=n_skipped)
