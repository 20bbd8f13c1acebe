"""What a plan would do on a machine that is described by a file: a discrete-event model of decode and prefill.

Knows times, not numbers: no weights, no tokens, no torch. The plan itself comes from `ktc.plan`.
"""

from ktc.simulate.costs import Costs, LayerCost, decode_costs, prefill_costs
from ktc.simulate.hardware import Hardware, ProfileError
from ktc.simulate.profile import load_profile, shipped_profiles
from ktc.simulate.sweep import Row, Simulation, simulate

__all__ = [
    "Costs",
    "Hardware",
    "LayerCost",
    "ProfileError",
    "Row",
    "Simulation",
    "decode_costs",
    "load_profile",
    "prefill_costs",
    "shipped_profiles",
    "simulate",
]
