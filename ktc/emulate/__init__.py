"""The emulated device lane: real experts against a device whose time a hardware profile says (docs/emulate.md).

Not a simulation: the graph, the queue, the workers and the expert kernels run; only the device's share of a layer is
slept instead of computed. What nothing at all is run for is `ktc.simulate`, whose schedule this one is held to.
"""

from ktc.emulate.lane import EmulatedLane, Replay
from ktc.emulate.script import Script, build_script

__all__ = ["EmulatedLane", "Replay", "Script", "build_script"]
