"""docs/adding-a-model.md is a recipe that works: its example is run as a family."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ktc.checkpoint import open_checkpoint
from ktc.checkpoint.audit import audit
from ktc.errors import UnsupportedModelError
from ktc.graph import families
from ktc.models.registry import FAMILIES, family_for, hf_config, meta_model
from tests import tiny

DOC = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


def test_the_documented_example_is_a_working_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, graph, entry = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    scope: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(DOC), "exec"), scope)
    family = scope["FAMILY"]
    monkeypatch.setattr(families, "SKELETONS", dict(families.SKELETONS))
    monkeypatch.setattr(tiny, "TINY", dict(tiny.TINY))
    exec(compile(graph, str(DOC), "exec"), vars(families).copy())
    exec(compile(entry, str(DOC), "exec"), vars(tiny).copy())
    with pytest.raises(UnsupportedModelError, match="'dots1' is a mixture of experts that ktc does not know"):
        family_for({"model_type": "dots1", "n_routed_experts": 8})
    monkeypatch.setitem(FAMILIES, "dots1", family)
    checkpoint = open_checkpoint(tiny.make_tiny("dots1", tmp_path / "dots1", fmt="fp8"))
    config = hf_config(checkpoint.config)
    model = meta_model(config)
    blocks = [n for n, m in model.named_modules() if type(m).__name__ == family.moe_class]
    expected = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    result = audit(checkpoint, family_for(config), expected, blocks, family.shape(config), config.num_hidden_layers)
    assert not result.ignored and result.readers["model.layers.1.mlp"].read(7).down.shape == (64, 32)
    windows = families.skeleton_for(config).window
    assert [windows(layer) for layer in range(config.num_hidden_layers)] == [0, 8]
