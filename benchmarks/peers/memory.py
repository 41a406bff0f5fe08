"""Resident memory of this process, from Linux's /proc. Standard library only: every environment runs it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

_SELF = Path("/proc/self")


def resident() -> int:
    """Bytes in memory now, what the allocator keeps for later given back first."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _read("VmRSS")


def start_peak() -> None:
    """Forget the largest size so far; what compiling has left with the allocator is given back."""
    resident()
    (_SELF / "clear_refs").write_text("5")


def peak() -> int:
    """The largest size since `start_peak`, in bytes."""
    return _read("VmHWM")


def _read(name: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
