"""A machine of two NUMA nodes, and a container that forbids memory binding, both made for one child process.

The nodes are a bind mount over /sys/devices/system/node in a mount namespace of the child's own: the kernel still has
one node, so binding to the second one really fails and its pages really lie on the first. The prohibition is a
seccomp filter, the mechanism that containers use.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SYS_NODES = Path("/sys/devices/system/node")
EPERM = 1


def forbid_memory_policy() -> None:
    """From here on mbind and set_mempolicy fail with EPERM, in this process and its children.

    Raises:
        OSError: the kernel takes no filter.
    """
    load, jump_equal, ret = 0x20, 0x15, 0x06
    allow, refuse, x86_64 = 0x7FFF0000, 0x00050000 | EPERM, 0xC000003E
    program = [
        (load, 0, 0, 4),  # the architecture
        (jump_equal, 0, 3, x86_64),
        (load, 0, 0, 0),  # the call's number
        (jump_equal, 2, 0, 237),  # mbind
        (jump_equal, 1, 0, 238),  # set_mempolicy
        (ret, 0, 0, allow),
        (ret, 0, 0, refuse),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, filter_mode, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def seccomp_works() -> bool:
    if os.uname().machine != "x86_64":
        return False
    code = "from tests.two_nodes import forbid_memory_policy as f; f()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


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
