"""Forbid system calls in this process and its children by a seccomp filter, the mechanism that containers use."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys

EPERM = 1
MEMORY_POLICY = (237, 238)
"""mbind, set_mempolicy (x86-64)."""
ASYNCHRONOUS_READS = (206,)
"""io_setup (x86-64)."""
COLLECTING_READS = (208,)
"""io_getevents (x86-64)."""


def forbid(*calls: int) -> None:
    """From here on these calls fail with EPERM.

    Raises:
        OSError: the kernel takes no filter.
    """
    load, jump_equal, ret = 0x20, 0x15, 0x06
    allow, refuse, x86_64 = 0x7FFF0000, 0x00050000 | EPERM, 0xC000003E
    program = [
        (load, 0, 0, 4),  # the architecture
        (jump_equal, 0, len(calls) + 1, x86_64),
        (load, 0, 0, 0),  # the call's number
        *((jump_equal, len(calls) - i, 0, call) for i, call in enumerate(calls)),
        (ret, 0, 0, allow),
        (ret, 0, 0, refuse),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, filter_mode, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def works() -> bool:
    """Whether a child process can forbid itself calls here."""
    if os.uname().machine != "x86_64":
        return False
    code = "from tests.forbidden import MEMORY_POLICY, forbid; forbid(*MEMORY_POLICY)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
