"""From a bundle to a running Hugging Face model, and from it to text.

`load` is the way in. Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load"]


def load(bundle: str | Path, **options: Any) -> Any:
    """Open a bundle as a `PreTrainedModel`; options as `ktc.engine.loader.load`."""
    from ktc.engine.loader import load as load_bundle

    return load_bundle(bundle, **options)
