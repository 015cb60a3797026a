"""What keeps the resident memory of long conversions at what they hold."""

import ctypes
import resource
import sys

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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
