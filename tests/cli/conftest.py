"""Bundles for command-line tests: the fixtures of tests/bundle."""

from tests.bundle.conftest import another_machine, bundle_copy, compiled, kernels_copy, with_kernels

__all__ = ["another_machine", "bundle_copy", "compiled", "kernels_copy", "with_kernels"]
