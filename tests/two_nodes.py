"""A machine of two NUMA nodes, made for one child process.

The nodes are a bind mount over /sys/devices/system/node in a mount namespace of the child's own: the kernel still has
one node, so binding to the second one really fails and its pages really lie on the first.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

SYS_NODES = Path("/sys/devices/system/node")


def pretend_two_nodes(folder: Path) -> list[str]:
    """What to put before a command so that it sees two nodes; skips the test where mounts are not allowed."""
    usable = sorted(os.sched_getaffinity(0))
    half = max(1, len(usable) // 2)
    for node, cpus in enumerate((usable[:half], usable[half:] or usable)):
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}" / "cpulist").write_text(",".join(map(str, cpus)) + "\n")
    (folder / "online").write_text("0-1\n")
    mount = f'mount --bind {shlex.quote(str(folder))} {SYS_NODES} && exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no private mounts here")
    return prefix
