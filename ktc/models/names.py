"""Disk names of tensors <-> names in the Hugging Face module tree. Strings only; knows nothing of files.

A family declares regex renames; wrappers that put a text model under `language_model` are undone for
every family. Routed experts keep their disk spelling after the MoE block's prefix
(`model.layers.1.mlp.experts.0.w1.weight`): `ktc.checkpoint.experts` looks them up by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ktc.errors import CheckpointError
from ktc.models.family import Family

_WRAPPERS: tuple[tuple[str, str], ...] = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model."),
    (r"^model\.language_model\.lm_head\.", "lm_head."),
    (r"^model\.language_model\.", "model."),
)


def tree_name(family: Family, disk_name: str) -> str:
    """Module-tree name of a tensor on disk."""
    for pattern, replacement in (*_WRAPPERS, *family.renames):
        disk_name = re.sub(pattern, replacement, disk_name)
    return disk_name


def tree_to_disk(family: Family, disk_names: Iterable[str]) -> dict[str, str]:
    """Module-tree name -> disk name of every tensor.

    Raises:
        CheckpointError: two tensors on disk have the same name in the tree.
    """
    out: dict[str, str] = {}
    for disk in disk_names:
        tree = tree_name(family, disk)
        if tree in out:
            raise CheckpointError(
                f"tensors {out[tree]!r} and {disk!r} are both {tree!r} in the model",
                hint="the checkpoint holds this parameter twice under different names; remove one",
            )
        out[tree] = disk
    return out
