"""Run a command with system calls refused (EPERM), as docker and containerd refuse NUMA policies by default.

python seccomp_eperm.py set_mempolicy,mbind,get_mempolicy COMMAND...
"""

import ctypes
import os
import platform
import struct
import sys

NR = {
    "x86_64": {
        "mbind": 237,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "migrate_pages": 256,
        "move_pages": 279,
        "set_mempolicy_home_node": 450,
    },
    "aarch64": {
        "mbind": 235,
        "get_mempolicy": 236,
        "set_mempolicy": 237,
        "migrate_pages": 238,
        "move_pages": 239,
        "set_mempolicy_home_node": 450,
    },
}[platform.machine()]

# linux/filter.h and linux/seccomp.h
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def instructions(names: list[str], errno: int) -> list[tuple[int, int, int, int]]:
    """Load the call's number; one of `names` jumps to the last line, which refuses, others reach the one before."""
    tests = [(JUMP_IF_EQUAL, len(names) - i, 0, NR[name]) for i, name in enumerate(names)]
    return [(LOAD_WORD, 0, 0, 0), *tests, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE | errno)]


def install(names: list[str], errno: int = 1) -> None:
    """Refuse the named calls to this process and all it starts, for good."""
    code = b"".join(struct.pack("HBBI", *line) for line in instructions(names, errno))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    refused = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    assert refused == 0, os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    install(sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
