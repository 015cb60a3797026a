"""One data file: zarr v3's `sharding_indexed`, inner chunks that each carry their crc32c, the index at the end.

What a chunk goes through (checksum, gathering, crc32c, the system call) is done while it lies in the processor's cache:
the values are read from memory once. The bytes are those that TensorStore writes for `orbax_layout.zarr_metadata`, and
reading them takes half of its time.
"""

import itertools
import math
import os
from collections.abc import Iterator

import google_crc32c
import numpy as np
from jaxtyping import Int64, Shaped, UInt8

from shardzoo.checkpoints import pages, sums
from shardzoo.checkpoints.grid import Block, Grid, index_of

BAND = 4 << 20  # bytes of chunks that are summed, encoded and written together, where one chunk is not more
READ = 1 << 20  # bytes of chunks that are read by one system call, where one chunk is not more
_CRC = 4  # bytes
_ABSENT = (1 << 64) - 1  # offset and size in the index of a chunk beyond the end of the leaf


def write_shard(
    handle: int,
    values: Shaped[np.ndarray, "..."],
    grid: Grid,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    room: pages.Room,
) -> sums.Sums:
    """Writes the file that begins at `start` in a leaf of global `shape` to an open file; returns its checksum.

    `values` are those of the file, cut at the end of the leaf; chunks that reach past it are filled up with zeros.
    `room` holds a band at a time: first its words, widened for the checksum, then its bytes as they are written.

    Raises:
        OSError: the storage is full or failed.
    """
    total = (0, 0)
    bits = values.view(f"u{values.itemsize}")  # copies of such types are plain memory moves
    for band in _bands(values.shape, grid.inner, values.itemsize):
        at = tuple(s + b.start for s, b in zip(start, band, strict=True))
        total = sums.add(total, sums.of_block(values[index_of(band)], at, shape, room))
        chunks = _chunks(bits[index_of(band)], grid.inner)
        size = _chunk_bytes(grid, values.itemsize) * math.prod(chunks.shape[: values.ndim])
        buffer = room.of(size)
        _encode(chunks, buffer)
        _write_all(handle, buffer.data)
    index = _index(grid, values.shape, _chunk_bytes(grid, values.itemsize))
    _write_all(handle, memoryview(index + _crc32c(index)))
    return total


def read_shard(
    handle: int,
    grid: Grid,
    index: tuple[int, ...],
    at: Block,
    dtype: np.dtype,
    into: Shaped[np.ndarray, "..."],
    room: pages.Room,
) -> None:
    """Reads ranges of the file at `index` of a leaf of `dtype`: the chunks that they share elements with, no others.

    Args:
        at: ranges in the indices of the leaf, inside of the file's block.
        into: takes the values, of the shape of `at`; cast where it has another dtype.

    Raises:
        ValueError: the file is not of its size, or a checksum does not hold.
        OSError: the storage failed.
    """
    block, size = grid.block(index), _chunk_bytes(grid, dtype.itemsize)
    found, expected = os.fstat(handle).st_size, grid.file_bytes(index, dtype.itemsize)
    if found != expected:
        raise ValueError(f"{found:,} bytes, not {expected:,}")
    inside = [(s.start - b.start, s.stop - b.start) for s, b in zip(at, block, strict=True)]
    first = [a // c for (a, _), c in zip(inside, grid.inner, strict=True)]
    last = [-(-b // c) for (_, b), c in zip(inside, grid.inner, strict=True)]
    offsets = _read_index(handle, grid, size, found)[index_of(tuple(map(slice, first, last)))]
    places = list(itertools.product(*map(range, first, last)))
    order = np.argsort(offsets, axis=None, kind="stable").tolist()
    raw = dtype if into.dtype != dtype else np.dtype(f"u{dtype.itemsize}")
    target = into if into.dtype != dtype else into.view(raw)
    for start, numbers in _runs(offsets.reshape(-1)[order], size):
        buffer = room.of(len(numbers) * size)
        _read_all(handle, buffer.data, start)
        for slot, number in enumerate(numbers):
            chunk, place = buffer[slot * size : (slot + 1) * size], places[order[number]]
            if _crc32c(chunk[:-_CRC]) != chunk[-_CRC:].tobytes():
                raise ValueError(f"chunk {place} does not have the checksum that was written with it")
            values = np.ndarray(grid.inner, raw, chunk.data)
            _put(values, [p * c for p, c in zip(place, grid.inner, strict=True)], inside, target)


def _read_index(handle: int, grid: Grid, chunk_bytes: int, size: int) -> Int64[np.ndarray, "..."]:
    """Offset of every slot of a file of `size` bytes, -1 for chunks that it does not hold."""
    slots = tuple(o // c for o, c in zip(grid.outer, grid.inner, strict=True))
    data = np.empty(math.prod(slots) * 16 + _CRC, np.uint8)
    _read_all(handle, data.data, size - data.size)
    if _crc32c(data[:-_CRC]) != data[-_CRC:].tobytes():
        raise ValueError("its index does not have the checksum that was written with it")
    table = data[:-_CRC].view("<u8").reshape(*slots, 2)
    there = table[..., 0] != _ABSENT
    ends = size - data.size - chunk_bytes
    if (table[..., 1][there] != chunk_bytes).any() or (table[..., 0][there] > ends).any():
        raise ValueError("its index names chunks that do not lie in it")
    return np.where(there, table[..., 0], np.uint64(_ABSENT)).astype(np.int64)


def _runs(offsets: Int64[np.ndarray, " n"], chunk_bytes: int) -> Iterator[tuple[int, range]]:
    """Where chunks of rising `offsets` follow each other: the first one's offset, and their numbers, up to `READ`."""
    most, start = max(1, READ // chunk_bytes), 0
    for stop in range(1, len(offsets) + 1):
        if stop == len(offsets) or stop - start == most or offsets[stop] != offsets[stop - 1] + chunk_bytes:
            if offsets[start] < 0:
                raise ValueError("a chunk is missing")
            yield int(offsets[start]), range(start, stop)
            start = stop


def _put(
    chunk: Shaped[np.ndarray, "..."], start: list[int], wanted: list[tuple[int, int]], into: Shaped[np.ndarray, "..."]
) -> None:
    """Puts what a chunk that begins at `start` has of the `wanted` ranges in its place."""
    both = [(max(s, a), min(s + n, b)) for s, n, (a, b) in zip(start, chunk.shape, wanted, strict=True)]
    source = tuple(slice(a - s, b - s) for (a, b), s in zip(both, start, strict=True))
    place = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(both, wanted, strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(into[index_of(place)], chunk[index_of(source)], casting="unsafe")


def _chunk_bytes(grid: Grid, itemsize: int) -> int:
    return math.prod(grid.inner) * itemsize + _CRC


def _bands(shape: tuple[int, ...], inner: tuple[int, ...], itemsize: int) -> Iterator[Block]:
    """Blocks of whole chunks that follow each other in the file: as many leading dims cut as bring them below BAND."""
    leading = next(
        (d for d in range(len(shape)) if math.prod(inner[:d]) * math.prod(shape[d:]) * itemsize <= BAND), len(shape)
    )
    for index in itertools.product(*(range(-(-n // c)) for n, c in zip(shape[:leading], inner, strict=False))):
        cut = tuple(slice(i * c, min(i * c + c, n)) for i, c, n in zip(index, inner, shape, strict=False))
        yield cut + tuple(slice(0, n) for n in shape[leading:])


def _chunks(values: Shaped[np.ndarray, "..."], inner: tuple[int, ...]) -> Shaped[np.ndarray, "..."]:
    """The values as an array of chunks, (chunks along each dim, then a chunk's dims); zeros where they end before."""
    counts = [-(-n // c) for n, c in zip(values.shape, inner, strict=True)]
    whole = tuple(k * c for k, c in zip(counts, inner, strict=True))
    if values.shape != whole:
        padded = np.zeros(whole, values.dtype)
        padded[tuple(slice(n) for n in values.shape)] = values
        values = padded
    split = values.reshape([n for pair in zip(counts, inner, strict=True) for n in pair])
    return split.transpose(*range(0, split.ndim, 2), *range(1, split.ndim, 2))


def _encode(chunks: Shaped[np.ndarray, "..."], into: UInt8[np.ndarray, " size"]) -> None:
    """Puts chunks one after the other, each followed by its crc32c."""
    dims = chunks.ndim // 2
    counts, inner = chunks.shape[:dims], chunks.shape[dims:]
    number = math.prod(counts)
    size = into.size // number
    strides = [math.prod(counts[d + 1 :]) * size for d in range(dims)]
    strides += [math.prod(inner[d + 1 :]) * chunks.itemsize for d in range(dims)]
    np.copyto(np.ndarray(chunks.shape, chunks.dtype, into.data, strides=strides), chunks)
    for chunk in into.reshape(number, size):
        chunk[-_CRC:] = np.frombuffer(_crc32c(chunk[:-_CRC]), np.uint8)


def _index(grid: Grid, shape: tuple[int, ...], chunk_bytes: int) -> bytes:
    """Offset and size of every slot in C order; the chunks that exist lie one after the other in that order."""
    slots = tuple(o // c for o, c in zip(grid.outer, grid.inner, strict=True))
    counts = tuple(-(-n // c) for n, c in zip(shape, grid.inner, strict=True))
    table = np.full((*slots, 2), _ABSENT, "<u8")
    there = tuple(slice(count) for count in counts)
    table[..., 0][there] = np.arange(math.prod(counts), dtype=np.uint64).reshape(counts) * np.uint64(chunk_bytes)
    table[..., 1][there] = chunk_bytes
    return table.tobytes()


def _crc32c(data: bytes | np.ndarray) -> bytes:
    return google_crc32c.value(data).to_bytes(_CRC, "little")


def _read_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        got = os.preadv(handle, [data], offset)
        if not got:
            raise ValueError(f"ends at byte {offset}, {len(data)} bytes early")
        data, offset = data[got:], offset + got


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]
