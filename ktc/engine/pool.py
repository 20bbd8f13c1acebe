"""The process's thread pool: how many threads, on which CPUs, for which node. What runs on it: lane.py, runtime/src."""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path
from typing import Any

from ktc.errors import BundleError, KtcError, UsageError

_pools: weakref.WeakValueDictionary[tuple[bool, tuple[tuple[int, ...], ...]], Any] = weakref.WeakValueDictionary()

# The threads of a pool stay with the parent: what a child loads gets a pool of its own.
os.register_at_fork(after_in_child=_pools.clear)


def cpu_quota() -> float | None:
    """CPUs that the control group grants (cgroup v2 `cpu.max`), or None. More threads than that only get throttled."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def usable_threads(nodes: list[list[int]]) -> int:
    """The default number of threads: the CPUs of `nodes`, within the control group's quota."""
    cpus = sum(len(n) for n in nodes)
    quota = cpu_quota()
    return max(1, min(cpus, math.ceil(quota)) if quota else cpus)


def place(host: list[list[int]], nodes: int, threads: int | None, emulate: bool = False) -> list[list[int]]:
    """CPU ids for each of the bundle's `nodes`.

    Args:
        host: usable CPUs per NUMA node of this machine.
        nodes: nodes that the bundle is split over.
        threads: in all; None = usable CPUs. Fewer threads than nodes still give each node one.
        emulate: allow more nodes than the machine has: its CPUs are dealt out to them in turn.
    Raises:
        BundleError: nodes that the machine does not have, without `emulate`.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, not {threads}")
    if not emulate and nodes not in (1, len(host)):
        raise BundleError(
            f"the bundle is split over {nodes} NUMA nodes and this machine has {len(host)}",
            f"`ktc repack` moves it to {len(host)}; --emulate-nodes runs it as it is, slower",
        )
    everything = [cpu for node in host for cpu in node]
    count = usable_threads(host) if threads is None else threads
    if nodes == len(host) and not emulate:
        groups = host
    elif nodes == 1:
        groups = [everything]
    else:
        groups = [everything[i::nodes] or [everything[i % len(everything)]] for i in range(nodes)]
    shares = [max(1, count // nodes + (i < count % nodes)) for i in range(nodes)]
    return [[group[i % len(group)] for i in range(share)] for group, share in zip(groups, shares, strict=True)]


def crowded(host: list[list[int]], threads: int | None) -> list[str]:
    """A note if more threads are asked for than there are CPUs: they take turns, and each waits for the others."""
    usable = usable_threads(host)
    if threads is None or threads <= usable:
        return []
    return [f"{threads} threads share {usable} usable CPU{'s' * (usable > 1)}: slower than {usable}"]


def get_pool(nodes: list[list[int]], caller_works: bool = True) -> Any:
    """The native pool for this placement; models with the same placement share it. Never two that both work.

    Args:
        caller_works: off for a thread that stands for a device: every CPU then has a worker of its own.
    Raises:
        KtcError: the system does not let us have so many threads.
    """
    from ktc import _runtime

    key = (caller_works, tuple(tuple(n) for n in nodes))
    pool = _pools.get(key)
    if pool is None:
        cpus = [cpu for node in nodes for cpu in node]
        # Several workers on one CPU (emulated nodes, more threads than CPUs) must not be pinned on top of each other.
        try:
            pool = _runtime.Pool(nodes, pin=len(set(cpus)) == len(cpus), caller_works=caller_works)
        except RuntimeError as error:  # the limit of processes, or of memory for their stacks
            raise KtcError(f"cannot start {len(cpus)} threads: {error}", "give --threads a smaller number") from error
        _pools[key] = pool
    return pool
