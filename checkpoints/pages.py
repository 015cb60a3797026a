"""Host memory for large blocks that come and go: in pages of its own, so that it goes back to the system at once.

Left to the heap, the blocks that many threads write and free stay resident between what lives longer.
"""

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8

LEAST = 64 << 10  # bytes: less than this is left to the heap
POPULATE_READ, POPULATE_WRITE = 22, 23  # Linux 5.14: MADV_POPULATE_..., which the mmap module does not name
SLOW = 0.5e-9  # seconds of the processor for a byte of a huge page: 0.06e-9 is usual, small pages take 0.3e-9
SMALL = 256 << 20  # bytes that come in small pages after a huge one was slow


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """The system's `madvise`, None where it has none; that of the mmap module holds up all other threads."""
    call = None if sys.platform == "win32" else getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if call is not None:
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


def advise(start: int, stop: int, advice: int) -> None:
    """Tells the system about these addresses, from the page on in which the first one lies, where it can be told so.

    Raises:
        OSError: it knows what was asked for, and failed at it.
    """
    call = _madvise()
    if call is None or stop <= start:
        return
    start -= start % mmap.PAGESIZE
    while call(start, stop - start, advice):
        number = ctypes.get_errno()
        if number == errno.EINVAL:  # an older kernel, or one without huge pages
            return
        if number not in (errno.EAGAIN, errno.EINTR):
            raise OSError(number, os.strerror(number))


@functools.cache
def _huge_page() -> int:
    """Bytes of a huge page; 0 where memory is not given in such."""
    settings = Path("/sys/kernel/mm/transparent_hugepage")
    try:
        given = "[never]" not in (settings / "enabled").read_text()
        return int((settings / "hpage_pmd_size").read_text()) if given else 0
    except (OSError, ValueError):
        return 0


class _Supply:
    """Whether huge pages are at hand. Safe to call from several threads."""

    def __init__(self) -> None:
        self._small = 0
        self._lock = threading.Lock()

    def has(self, nbytes: int) -> bool:
        """Whether to ask for these bytes as huge pages."""
        with self._lock:
            self._small = max(0, self._small - nbytes)
            return self._small == 0

    def tell(self, size: int, seconds: float) -> None:
        """What a huge page of `size` bytes took."""
        if seconds > SLOW * size:
            with self._lock:
                self._small = SMALL


_supply = _Supply()


def populate(block: Shaped[np.ndarray, "..."]) -> None:
    """Asks for the memory of a block that is about to be filled: in huge pages as long as these are at hand.

    Small pages are cleared one by one, which costs more than to fill them. But the host of a virtual machine takes back
    free memory in the size of huge pages, and where memory is in pieces the system moves others to make room for one:
    it then takes up to forty times as long, and small pages are at hand all the while.
    """
    start, stop = np.lib.array_utils.byte_bounds(block)
    size = _huge_page()
    if stop - start < LEAST or not size:
        return
    while start < stop:
        if not _supply.has(stop - start):
            advise(start, stop, mmap.MADV_NOHUGEPAGE)
            return
        end = min(stop, start // size * size + size)
        before = time.thread_time()
        with contextlib.suppress(OSError):  # what is wrong shows where it is filled
            advise(start, end, POPULATE_WRITE)
        _supply.tell(size, time.thread_time() - before)
        start = end


def empty(shape: Sequence[int], dtype: Any) -> Shaped[np.ndarray, "..."]:
    """An array to be filled; its memory is asked for by `populate`, else when it is first touched.

    Raises:
        MemoryError: the system refuses so much.
    """
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST:
        return np.empty(tuple(shape), dtype)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes for an array of shape {tuple(shape)}: {error.strerror}") from None
    made = np.frombuffer(pages, np.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        advise(made.ctypes.data, made.ctypes.data + nbytes, mmap.MADV_HUGEPAGE)
    return made.view(dtype).reshape(tuple(shape))


def copy(values: Shaped[np.ndarray, "..."], dtype: Any = None) -> Shaped[np.ndarray, "..."]:
    """The same values, cast to `dtype` where one is given."""
    made = empty(values.shape, values.dtype if dtype is None else dtype)
    populate(made)
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
