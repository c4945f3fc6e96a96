"""The launcher's system calls: memory policy and die-with-parent, by number, without libnuma.

The native core is not used here: `numarun` must start where the core cannot be loaded. libnuma is not
used because slim images lack it and its constructor changes the policy by itself.
"""

import ctypes
import os
import platform
from functools import cache

# linux/mempolicy.h
MPOL_DEFAULT = 0
MPOL_PREFERRED = 1
MPOL_BIND = 2
MPOL_INTERLEAVE = 3
MPOL_LOCAL = 4
MPOL_PREFERRED_MANY = 5
POLICY_NAMES = {
    MPOL_DEFAULT: "default",
    MPOL_PREFERRED: "preferred",
    MPOL_BIND: "bind",
    MPOL_INTERLEAVE: "interleave",
    MPOL_LOCAL: "local",
    MPOL_PREFERRED_MANY: "preferred-many",
}
_MODE_MASK = 0xFF  # flags such as MPOL_F_STATIC_NODES stand above it

_PR_SET_PDEATHSIG = 1

_NUMBERS = {
    "x86_64": {"set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": {"set_mempolicy": 237, "get_mempolicy": 236},
    "riscv64": {"set_mempolicy": 237, "get_mempolicy": 236},
}

# The kernel's largest MAX_NUMNODES; a longer mask is accepted as long as the bits above are zero.
_MASK_BITS = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_MASK_BITS // _WORD_BITS)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, name: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _syscall(name: str, *args) -> None:
    """One call by number. Raises: OSError, ENOSYS also for a machine whose numbers we do not have."""
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(38, f"{name}: no system call number known for {platform.machine()}")
    _check(_libc().syscall(ctypes.c_long(number), *args), name)


def set_mempolicy(mode: int, nodes: tuple[int, ...] = ()) -> None:
    """Memory policy of the calling thread, inherited through fork and exec. Raises: OSError."""
    mask = _Mask()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << (node % _WORD_BITS)
    # The kernel reads maxnode - 1 bits.
    size = ctypes.c_ulong(_MASK_BITS + 1 if nodes else 0)
    _syscall("set_mempolicy", ctypes.c_int(mode), ctypes.byref(mask) if nodes else None, size)


def get_mempolicy() -> tuple[int, tuple[int, ...]]:
    """(mode, nodes) the kernel keeps for the calling thread. Raises: OSError."""
    mode, mask = ctypes.c_int(), _Mask()
    size = ctypes.c_ulong(_MASK_BITS)
    _syscall("get_mempolicy", ctypes.byref(mode), ctypes.byref(mask), size, None, ctypes.c_ulong(0))
    return mode.value & _MODE_MASK, _bits(mask)


def set_parent_death_signal(signal_number: int) -> None:
    """Ask for a signal when the parent thread ends; survives exec. Raises: OSError."""
    _check(
        _libc().prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)"
    )


def _bits(mask) -> tuple[int, ...]:
    return tuple(i for i in range(_MASK_BITS) if mask[i // _WORD_BITS] >> (i % _WORD_BITS) & 1)
