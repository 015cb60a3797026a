"""Leaves as they lie on disk: ranges of them are read by several threads, file by file.

TensorStore reads the same files; what is done here takes half of its time, and a program that only writes does not
import it.
"""

import concurrent.futures
import dataclasses as dc
import itertools
import math
import os
import threading
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints import pages
from shardzoo.checkpoints.grid import Block, Grid, LeafSpec, index_of
from shardzoo.checkpoints.shard_file import read_shard

IN_FLIGHT = max(8, os.cpu_count() or 1)  # reads of files at a time: with more, processes wait for each other's pages


@dc.dataclass(frozen=True)
class Reading:
    """A host array and the reads that fill it."""

    host: Shaped[np.ndarray, "..."]
    parts: list[concurrent.futures.Future]

    def result(self) -> Shaped[np.ndarray, "..."]:
        """The array, filled.

        Raises:
            ValueError: a file is damaged; the message names it.
            OSError: one is missing or cannot be read.
        """
        for part in self.parts:
            part.result()
        return self.host


class Reader:
    """The threads of one reading job; a context manager where reads may be left over when it ends.

    Files are read by system calls: mapped, the kernel's read-ahead takes 7.8 times the bytes of a shard whose chunks
    lie apart, and a file cut short under the reader ends the process.
    """

    def __init__(self) -> None:
        self.pool = concurrent.futures.ThreadPoolExecutor(IN_FLIGHT, "read")
        self._kept = threading.local()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for what is being read; what has not begun is dropped."""
        self.pool.shutdown(cancel_futures=True)

    def open(self, folder: Path, spec: LeafSpec, grid: Grid) -> "StoredArray":
        """A leaf, of which nothing is read yet; a missing file is an error when it is read."""
        return StoredArray(self, folder, spec, grid, tuple(slice(0, n) for n in spec.shape), spec.dtype)

    def room(self) -> pages.Room:
        """Memory that this thread reads into."""
        if not hasattr(self._kept, "room"):
            self._kept.room = pages.Room()
        return self._kept.room


@dc.dataclass(frozen=True)
class StoredArray:
    """Ranges of a leaf (`ranges`, in its own indices), to be read in the dtype `numpy_dtype`."""

    reader: Reader
    folder: Path
    spec: LeafSpec
    grid: Grid
    ranges: Block
    numpy_dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.ranges)

    def cast(self, dtype: np.dtype) -> "StoredArray":
        """The same in another dtype."""
        return dc.replace(self, numpy_dtype=dtype)

    def at(self, ranges: Block) -> "StoredArray":
        """These ranges of the leaf, one for each dim.

        Raises:
            ValueError: they are not inside of it.
        """
        shape = self.spec.shape
        whole = tuple(slice(s.start or 0, n if s.stop is None else s.stop) for s, n in zip(ranges, shape, strict=True))
        if any(s.step not in (None, 1) for s in ranges) or any(
            not 0 <= s.start <= s.stop <= n for s, n in zip(whole, shape, strict=True)
        ):
            raise ValueError(f"ranges {ranges} are not whole ranges inside of {list(shape)}")
        return dc.replace(self, ranges=whole)

    def cut(self, axis: int, start: int, stop: int) -> "StoredArray":
        """The same with one dim's range cut."""
        return self.at((*self.ranges[:axis], slice(start, stop), *self.ranges[axis + 1 :]))

    def read(self) -> Reading:
        """Begins reading."""
        return self.begin(pages.empty(self.shape, self.numpy_dtype))

    def begin(self, host: Shaped[np.ndarray, "..."]) -> Reading:
        """Begins reading into `host`, of this shape and dtype."""
        if math.prod(self.shape) == 0:
            return Reading(host, [])
        files = [range(s.start // o, -(-s.stop // o)) for s, o in zip(self.ranges, self.grid.outer, strict=True)]
        return Reading(host, [self.reader.pool.submit(self._read_file, i, host) for i in itertools.product(*files)])

    def _read_file(self, index: tuple[int, ...], host: Shaped[np.ndarray, "..."]) -> None:
        block = self.grid.block(index)
        at = tuple(slice(max(s.start, b.start), min(s.stop, b.stop)) for s, b in zip(self.ranges, block, strict=True))
        inside = tuple(slice(a.start - s.start, a.stop - s.start) for a, s in zip(at, self.ranges, strict=True))
        file, into = self.folder / self.grid.file(index), host[index_of(inside)]
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages.populate(into)
            read_shard(handle, self.grid, index, at, self.spec.dtype, into, self.reader.room())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        finally:
            os.close(handle)
