"""The decode graph as a program of data: IR, lowering, verification, arena, rendering, native replay.

`lower` needs transformers' config objects; everything else runs without torch and transformers.
"""
