"""ktc: an ahead-of-time compiler and packager for huge Mixture-of-Experts language models.

`ktc.load(bundle)` is the one call of the Python API; everything else is the command line
(`ktc --help`). Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(bundle: str | Path, **options: Any) -> Any:
    """Open a bundle as a Hugging Face `PreTrainedModel`; see `ktc.engine.load` for the options."""
    from ktc.engine import load as engine_load  # torch and transformers are imported here, not before

    return engine_load(bundle, **options)
