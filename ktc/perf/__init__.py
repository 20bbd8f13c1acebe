"""Measuring: the machine's limits, kernels against them and against peers, and the crossover of kernels.

Nothing here is needed to compile or run a bundle except `tuning.py`, which reads what `ktc tune` stored.
"""
