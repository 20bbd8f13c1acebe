"""Bundles: written (emit, finish), opened (reader), judged (judge), trusted (trust), checked (verify), repacked.

The names below are all that other packages need. Importing them loads no kernel and no torch.
"""

from ktc.bundle.judge import Part, Verdict, verdict
from ktc.bundle.reader import Bundle, TensorRef, open_bundle
from ktc.bundle.trust import kernel_for_host

__all__ = ["Bundle", "Part", "TensorRef", "Verdict", "kernel_for_host", "open_bundle", "verdict"]
