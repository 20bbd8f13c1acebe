"""Can this machine run this bundle, and how well? Worked out from the manifest, before anything is loaded.

One part per thing that can be wrong (layout, device, topology, kernels); the worst one counts. CPU
features are compared as sets: no instruction set is "above" another. Nothing is built or opened here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ktc.bundle.reader import Bundle
from ktc.host import Host, this_host
from ktc.layout import ABI_VERSION, LAYOUT_VERSION

Level = Literal["OPTIMAL", "RUNS_SLOWER", "NEEDS_REPACK", "NEEDS_REBUILD", "UNSUPPORTED"]
LEVELS: tuple[Level, ...] = ("OPTIMAL", "RUNS_SLOWER", "NEEDS_REPACK", "NEEDS_REBUILD", "UNSUPPORTED")


@dataclass(frozen=True)
class Part:
    """The verdict on one component: why, and the command or act that mends it ("" if nothing is to be mended)."""

    name: str
    level: Level
    reason: str
    fix: str = ""


@dataclass(frozen=True)
class Verdict:
    """All parts; `level` is the worst of theirs."""

    parts: tuple[Part, ...]

    @property
    def level(self) -> Level:
        return max((part.level for part in self.parts), key=LEVELS.index)

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level, "parts": [vars(part) for part in self.parts]}


def verdict(
    bundle: Bundle, *, emulate_nodes: bool = False, trust_sha256: Sequence[str] = (), host: Host | None = None
) -> Verdict:
    """Judge a bundle.

    Args:
        emulate_nodes: the user asked to run it on another number of nodes than it is made for.
        trust_sha256: kernel libraries the user vouches for.
        host: another machine than this one (tests).
    """
    host = host or this_host()
    sound = (_layout(bundle), _device(bundle, host))
    mendable = [_topology(bundle, host, emulate_nodes), _kernels(bundle, host, trust_sha256)]
    if any(part.level == "UNSUPPORTED" for part in sound):  # whatever else were mended, it would not run here
        mendable = [replace(part, fix="") for part in mendable]
    return Verdict((*sound, *mendable))


def _layout(bundle: Bundle) -> Part:
    for layout in bundle.manifest["layouts"]:
        if layout["id"].startswith("ktc.tile.") and layout["version"] != LAYOUT_VERSION:
            return Part(
                "layout",
                "UNSUPPORTED",
                f"tiles of layout version {layout['version']}; this ktc reads version {LAYOUT_VERSION}",
                "compile the checkpoint again with this ktc",
            )
    return Part("layout", "OPTIMAL", f"tile layout version {LAYOUT_VERSION}")


def _device(bundle: Bundle, host: Host) -> Part:
    if bundle.manifest["device"]["kind"] == "cuda" and not host.cuda:
        return Part(
            "device",
            "UNSUPPORTED",
            "the recipe puts modules on a CUDA device and this machine shows none",
            "run it on a machine with one, or compile the checkpoint again with device: cpu in the recipe",
        )
    return Part("device", "OPTIMAL", f"device lane on {bundle.manifest['device']['kind']}")


def _topology(bundle: Bundle, host: Host, emulate_nodes: bool) -> Part:
    made, here = bundle.nodes, max(1, len(host.nodes))
    if made == here:
        return Part("topology", "OPTIMAL", f"packed for {made} NUMA node{'s' * (made > 1)}, as this machine has")
    reason = f"packed for {made} NUMA node{'s' * (made > 1)}, this machine has {here}"
    fix = f"ktc repack {bundle.path} --nodes {here} -o OUT"
    if emulate_nodes:
        how = f"its CPUs play {made}" if made > 1 else "its CPUs play one"
        return Part("topology", "RUNS_SLOWER", f"{reason}: {how} (--emulate-nodes), and memory is bound to none", fix)
    return Part("topology", "NEEDS_REPACK", reason, f"{fix}, or run it with --emulate-nodes")


def _kernels(bundle: Bundle, host: Host, trust_sha256: Sequence[str]) -> Part:
    from ktc.bundle.trust import cached_build, trusted
    from ktc.codegen.variants import runnable

    usable = runnable(host.features)
    best = usable[0]
    shipped = {k["variant"]: k for k in bundle.manifest["kernels"] if k["abi"] == ABI_VERSION}
    ready = [v for v in usable if (v in shipped and trusted(shipped[v], trust_sha256)) or cached_build(bundle, v)]
    if best in ready:
        return Part("kernels", "OPTIMAL", f"{best} kernels, the best for this CPU")
    if host.compiler:
        why = f"its {best} library was not built here" if best in shipped else f"it has no {best} library"
        return Part(
            "kernels",
            "NEEDS_REBUILD",
            f"{why}; it is built from ktc's own templates at first use",
            f"ktc run {bundle.path} builds it once",
        )
    better = usable[: usable.index(ready[0])] if ready else usable
    foreign = next((shipped[v] for v in better if v in shipped), None)
    trust = ""
    if foreign:
        trust = f", or vouch for the {foreign['variant']} one in the bundle: --trust-kernel {foreign['sha256']}"
    fix = f"install g++{trust}"
    if ready:
        return Part("kernels", "RUNS_SLOWER", f"{ready[0]} kernels; {best} needs a compiler, and none is here", fix)
    return Part("kernels", "UNSUPPORTED", "no trusted kernel library and no C++ compiler to build one", fix)
