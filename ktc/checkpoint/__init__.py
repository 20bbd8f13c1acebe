"""Reading checkpoints: sources, safetensors files, encodings, experts, the audit. Needs no torch."""

from ktc.checkpoint.checkpoint import Checkpoint, open_checkpoint, read_config
from ktc.checkpoint.tensors import TensorData, TensorInfo

__all__ = ["Checkpoint", "TensorData", "TensorInfo", "open_checkpoint", "read_config"]
