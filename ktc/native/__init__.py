"""Running a bundle on the CPU device without torch and without transformers: `ktc.native.open_native`."""

from ktc.native.engine import NativeModel, open_native

__all__ = ["NativeModel", "open_native"]
