"""Quantisers, one file each, written naively in numpy, and a registry of them.

These are the definition and the oracle. Packing runs the native ones (runtime/src/quantize.cpp), which give
the same bytes; `tests/quant` compares them. Nothing here knows tiles (see ktc/pack/tiles.py).
"""
