"""Kernels by code generation: specs -> C++ -> one cached library per ISA variant."""

from ktc.codegen.variants import VARIANTS

__all__ = ["VARIANTS"]
