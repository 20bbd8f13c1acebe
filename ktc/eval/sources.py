"""Where teacher-forced logits come from: a native model, or a Hugging Face checkpoint computed in fp32.

A window is a list of token ids; a source gives the logits that predict its second to last token. torch and
transformers are imported only for a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ktc.errors import UsageError
from ktc.eval.metrics import Floats

if TYPE_CHECKING:
    from ktc.native import NativeModel


class Source(Protocol):
    """Anything with logits."""

    label: str
    vocab: int

    def logits(self, window: list[int]) -> Floats:
        """f32 [len(window) - 1, V]; row i predicts window[i + 1]."""


class NativeSource:
    """A native model in prefill: a whole window at once, nothing deferred."""

    def __init__(self, model: NativeModel, label: str) -> None:
        self.model, self.label, self.vocab = model, label, model.vocab

    def logits(self, window: list[int]) -> Floats:
        self.model.reset()
        chunk = self.model.graph.chunk
        ids = window[:-1]
        parts = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
        return np.concatenate([self.model.prefill(part, rows=len(part)).reshape(len(part), -1) for part in parts])

    def decoded(self, window: list[int]) -> Floats:
        """The same tokens one at a time, as they are generated: all but the first are decode steps."""
        self.model.reset()
        out = np.empty((len(window) - 1, self.model.vocab), np.float32)
        out[0] = self.model.prefill(window[:1])
        for i, token in enumerate(window[1:-1], 1):
            out[i] = self.model.decode(token)
        return out


class CheckpointSource:
    """A checkpoint in Hugging Face's own code: weights as stored, arithmetic in fp32."""

    def __init__(self, checkpoint: Path) -> None:
        """
        Raises:
            CheckpointError: none there. UsageError: its weights are quantised.
        """
        from ktc.checkpoint import open_checkpoint
        from ktc.engine.lane import quiet_openmp

        opened = open_checkpoint(checkpoint)
        if opened.config.get("quantization_config"):
            raise UsageError(
                f"{opened.path}: Hugging Face's code does not compute these quantised weights in fp32 exactly",
                "compile the checkpoint with --recipe bf16 and give that bundle as the reference",
            )
        quiet_openmp()  # before torch is imported
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.label = f"{opened.path.name} in Hugging Face, fp32"
        self._torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(opened.path), dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()
        self.vocab = int(self.model.config.get_text_config().vocab_size)

    def logits(self, window: list[int]) -> Floats:
        with self._torch.inference_mode():
            out: Floats = self.model(self._torch.tensor([window[:-1]]), use_cache=False).logits[0].float().numpy()
        return out


def is_bundle(path: Path) -> bool:
    return (path / "manifest.json").is_file()
