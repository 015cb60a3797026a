"""Host memory for large blocks that come and go: in pages of its own, so that it goes back to the system at once.

Left to the heap, the blocks that many threads write and free stay resident between what lives longer.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8

LEAST = 64 << 10  # bytes: less than this is left to the heap


def empty(shape: Sequence[int], dtype: Any) -> Shaped[np.ndarray, "..."]:
    """An array to be filled."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST:
        return np.empty(tuple(shape), dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # else each 4 KiB is asked for by itself, which costs more than to fill it
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8).view(dtype).reshape(tuple(shape))


def copy(values: Shaped[np.ndarray, "..."], dtype: Any = None) -> Shaped[np.ndarray, "..."]:
    """The same values, cast to `dtype` where one is given."""
    made = empty(values.shape, values.dtype if dtype is None else dtype)
    made[...] = values
    return made


class Room:
    """Memory that is filled again and again: the system clears every fresh page before it is filled."""

    def __init__(self):
        self._held = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> UInt8[np.ndarray, " nbytes"]:
        """So many bytes, whatever was in them; the same ones at each call."""
        if self._held.size < nbytes:
            self._held = empty([nbytes], np.uint8)
        return self._held[:nbytes]
