"""Writing one data file: zarr v3's `sharding_indexed`, inner chunks that each carry their crc32c, the index at the end.

What a chunk goes through (checksum, gathering, crc32c, the system call) is done while it lies in the processor's cache:
the values are read from memory once. The bytes are those that TensorStore writes for `orbax_layout.zarr_metadata`.
"""

import itertools
import math
import os
from collections.abc import Iterator

import google_crc32c
import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints import sums
from shardzoo.checkpoints.grid import Block, Grid, index_of

BAND = 8 << 20  # bytes: what is summed and then encoded is at most this where the chunks allow it
WRITE = 1 << 20  # bytes of one system call, or one chunk if that is more
_ABSENT = (1 << 64) - 1  # offset and size in the index of a chunk beyond the end of the leaf


def write_shard(
    handle: int, values: Shaped[np.ndarray, "..."], grid: Grid, start: tuple[int, ...], shape: tuple[int, ...]
) -> sums.Sums:
    """Writes the file that begins at `start` in a leaf of global `shape` to an open file; returns its checksum.

    `values` are those of the file, cut at the end of the leaf; chunks that reach past it are filled up with zeros.

    Raises:
        OSError: the storage is full or failed.
    """
    total = (0, 0)
    bits = values.view(f"u{values.itemsize}")  # copies of such types are plain memory moves
    writer = _ChunkWriter(handle, grid.inner, bits.dtype)
    counts = tuple(-(-n // c) for n, c in zip(values.shape, grid.inner, strict=True))
    for index, band in _bands(values.shape, grid.inner, values.itemsize):
        at = tuple(s + b.start for s, b in zip(start, band, strict=True))
        total = sums.add(total, sums.of_block(values[index_of(band)], at, shape))
        for inner in _chunks(index, counts, grid.inner, values.shape):
            writer.add(bits[index_of(inner)])
    writer.finish(_index(grid, counts, writer.chunk_bytes))
    return total


def _bands(shape: tuple[int, ...], inner: tuple[int, ...], itemsize: int) -> Iterator[tuple[tuple[int, ...], Block]]:
    """Blocks that hold whole chunks which follow each other: the leading chunk indices they share, and their ranges."""
    leading = next(
        (d for d in range(len(shape)) if math.prod(inner[:d]) * math.prod(shape[d:]) * itemsize <= BAND), len(shape)
    )
    for index in itertools.product(*(range(-(-n // c)) for n, c in zip(shape[:leading], inner, strict=False))):
        cut = tuple(slice(i * c, min(i * c + c, n)) for i, c, n in zip(index, inner, shape, strict=False))
        yield index, cut + tuple(slice(0, n) for n in shape[leading:])


def _chunks(
    index: tuple[int, ...], counts: tuple[int, ...], inner: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[Block]:
    """The ranges of the chunks whose indices begin with `index`, in C order."""
    for rest in itertools.product(*map(range, counts[len(index) :])):
        yield tuple(slice(i * c, min(i * c + c, n)) for i, c, n in zip(index + rest, inner, shape, strict=True))


def _index(grid: Grid, counts: tuple[int, ...], chunk_bytes: int) -> bytes:
    """Offset and size of every slot in C order; the chunks that exist lie one after the other in that order."""
    slots = tuple(o // c for o, c in zip(grid.outer, grid.inner, strict=True))
    table = np.full((*slots, 2), _ABSENT, "<u8")
    there = np.arange(math.prod(counts), dtype=np.uint64).reshape(counts) * np.uint64(chunk_bytes)
    inside = tuple(slice(count) for count in counts)
    table[..., 0][inside] = there
    table[..., 1][inside] = chunk_bytes
    return table.tobytes()


class _ChunkWriter:
    """Puts chunks and their crc32c into a buffer, and the buffer into the file when it is full."""

    def __init__(self, handle: int, shape: tuple[int, ...], dtype: np.dtype):
        self.chunk_bytes = math.prod(shape) * dtype.itemsize + 4
        self._shape, self._dtype = shape, dtype
        self._handle = handle
        self._buffer = np.empty(max(WRITE, self.chunk_bytes), np.uint8)
        self._used = 0

    def add(self, values: np.ndarray) -> None:
        """Adds one chunk of these values, filled up with zeros where they are fewer."""
        if self._used + self.chunk_bytes > self._buffer.size:
            self._flush()
        end = self._used + self.chunk_bytes
        body = self._buffer[self._used : end - 4]
        chunk = body.view(self._dtype).reshape(self._shape)
        if values.shape != self._shape:
            chunk[...] = 0
        chunk[tuple(map(slice, values.shape))] = values
        self._buffer[end - 4 : end] = np.frombuffer(_crc32c(body), np.uint8)
        self._used = end

    def finish(self, index: bytes) -> None:
        self._flush()
        _write_all(self._handle, memoryview(index + _crc32c(index)))

    def _flush(self) -> None:
        _write_all(self._handle, self._buffer[: self._used].data)
        self._used = 0


def _crc32c(data: bytes | np.ndarray) -> bytes:
    return google_crc32c.value(data).to_bytes(4, "little")


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]
