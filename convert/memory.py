"""What keeps the resident memory of long conversions at what they hold."""

import ctypes
import resource
import sys
from pathlib import Path

_ARENA_MAX = -8  # glibc: M_ARENA_MAX
_ARENAS = 2


def few_arenas() -> None:
    """Tells glibc to share two heaps among all threads started from here on.

    By default each of many threads keeps the large blocks that it freed for itself, so that resident memory grows with
    the number of threads that have ever written a block. Other C libraries are left alone.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_ARENA_MAX, _ARENAS)


def peak_memory() -> int:
    """The most bytes that this process has had resident."""
    try:  # what the system counts by process holds the memory of the one that started it, from before its program ran
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
