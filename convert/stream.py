"""Moves the values of a planned conversion from its source files to a checkpoint, in bounded memory.

Each source file is read once, front to back, by one thread, which also takes the file's SHA-256; each block of a leaf
is written once, by a second set of threads. What is in flight at any time stays within a budget of bytes.
"""

import concurrent.futures
import hashlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.checkpoints import pages
from shardzoo.checkpoints.grid import Grid, index_of
from shardzoo.checkpoints.store import Budget
from shardzoo.checkpoints.writer import CheckpointWriter
from shardzoo.convert.plan import LeafPlan, Plan
from shardzoo.convert.rules import Part, Piece, Ranges, part, volume
from shardzoo.convert.source import Source, TensorInfo
from shardzoo.convert.stopping import Interrupt, Stopped
from shardzoo.errors import InputError
from shardzoo.progress import Progress
from shardzoo.zoo.quantize import quantize

HASH_BLOCK = 1 << 20
MOST_READERS = 4


class FileDigest:
    """SHA-256 of a file whose parts come by in rising order; what does not come by is read for it.

    `check` is called before each read and may raise.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None):
        self._path = path
        self._check = check
        self._fd = os.open(path, os.O_RDONLY)
        self._sha256 = hashlib.sha256()
        self._buffer = memoryview(bytearray(HASH_BLOCK))
        self._at = 0

    def feed(self, start: int, data: memoryview) -> None:
        """Takes the bytes of the file from `start` on; the ones already taken are passed over."""
        stop = start + len(data)
        if stop > self._at:
            self.skip_to(start)
            self._sha256.update(data[self._at - start :])
            self._at = stop

    def skip_to(self, offset: int) -> None:
        """Reads up to `offset` itself, into a buffer that stays in the processor's cache."""
        while self._at < offset:
            self._check()
            count = os.preadv(self._fd, [self._buffer[: offset - self._at]], self._at)
            if count == 0:
                raise InputError(f"{self._path}: ends at byte {self._at}: the file changed while being read")
            self._sha256.update(self._buffer[:count])
            self._at += count

    def hexdigest(self, size: int) -> str:
        self.skip_to(size)
        return self._sha256.hexdigest()

    def close(self) -> None:
        os.close(self._fd)


def blocks_of(ranges: Ranges, grid: Grid) -> Iterator[Ranges]:
    """The blocks (whole files) of a leaf that share elements with `ranges`, in C order."""
    counts = [range(a // o, -(-b // o)) for (a, b), o in zip(ranges, grid.outer, strict=True)]
    for index in itertools.product(*counts):
        yield tuple((s.start, s.stop) for s in grid.block(index))


def rows_of(info: TensorInfo, share: Part) -> slice | None:
    """The rows of a tensor that are read for a share of it, or None for a tensor without rows."""
    return slice(*share.rows) if info.shape else None


def cost_of(info: TensorInfo, share: Part, block: Ranges, leaf: LeafPlan) -> int:
    """Bytes that a share needs from its reading to its last written byte: the pages read, and what is made of them."""
    start, stop = share.rows if info.shape else (0, 1)
    read = (stop - start) * math.prod(info.shape[1:]) * info.dtype.itemsize
    lies = info.offset is not None and info.offset % info.dtype.itemsize == 0
    whole = share.columns == tuple((0, n) for n in info.shape[1:]) and share.at == block
    if lies and whole and info.dtype == leaf.spec.dtype and leaf.scales is None:
        return read  # written as it lies in the file
    return read + volume(share.at) * leaf.itemsize


def least_budget(source: Source, plan: Plan, grids: Mapping[str, Grid]) -> int:
    """Bytes that the most expensive share of a conversion needs: no budget below can hold."""
    return max(
        (
            cost_of(source.tensors[piece.source], share, block, leaf)
            for path, leaf in plan.leaves.items()
            for piece in leaf.pieces
            for block in blocks_of(piece.at, grids[path])
            if (share := part(piece, block))
        ),
        default=0,
    )


def take(source: Source, piece: Piece, share: Part) -> tuple[slice | None, np.ndarray, np.ndarray]:
    """The rows read for a share of a piece: their range, the rows whole, and the values in the shape of the leaf."""
    rows = rows_of(source.tensors[piece.source], share)
    whole = source.read(piece.source, rows)
    columns = (slice(None), *(slice(a, b) for a, b in share.columns)) if rows else ()
    flat = whole[columns].reshape(-1)
    count = int(np.prod(share.cover, dtype=np.int64))
    return rows, whole, flat[share.first : share.first + count].reshape(share.cover)[index_of(share.cut)]


class Held:
    """What a block in flight holds: its bytes of the budget and the mapped pages of its source, given back once."""

    def __init__(self, budget: Budget, nbytes: int, give: Callable[[], None]):
        self._budget, self._give = budget, give
        self._cost = budget.take(nbytes)
        self._once = threading.Lock()

    def release(self) -> None:
        if self._once.acquire(blocking=False):
            self._give()
            self._budget.give(self._cost)


class Stream:
    """One run of a conversion.

    Args:
        source, plan, writer: where values come from, what becomes of them, where they go.
        budget: bytes in flight.
        progress: told of each block written.
        interrupt: looked at before each block.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        writer: CheckpointWriter,
        *,
        budget: int,
        progress: Progress | None,
        interrupt: Interrupt,
    ):
        self._source, self._plan, self._writer = source, plan, writer
        self._budget = Budget(budget)
        self._progress = progress
        self._interrupt = interrupt
        self._done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._skipped: set[tuple[str, Ranges]] = set()
        self._halves: dict[tuple[str, Ranges], tuple[np.ndarray, list[int]]] = {}
        self._left = {path: math.prod(writer.grid(path).shape) for path in plan.leaves}
        self._by_key: dict[str, list[Piece]] = {}
        for leaf in plan.leaves.values():
            for piece in leaf.pieces:
                self._by_key.setdefault(piece.source, []).append(piece)
        for pieces in self._by_key.values():
            pieces.sort(key=lambda piece: piece.take)
        self.digests: dict[int, str] = {}
        self.resumed = 0

    def run(self) -> None:
        """Writes every block and finishes every leaf; `digests` then holds the SHA-256 of each source file.

        Raises:
            InputError: a source file changed or cannot be read, the storage is full or failed, a cast overflows.
        """
        cpus = max(2, os.cpu_count() or 2)
        readers = concurrent.futures.ThreadPoolExecutor(min(len(self._source.files), cpus, MOST_READERS), "read")
        self._writers = concurrent.futures.ThreadPoolExecutor(min(cpus, 8), "write")
        self._failures: list[BaseException] = []
        jobs: list[concurrent.futures.Future] = []
        try:
            for path, count in self._left.items():
                if count == 0 and path not in self._writer.done:
                    self._finish(path)
            jobs += [readers.submit(self._guarded, self._read_file, i) for i in range(len(self._source.files))]
            concurrent.futures.wait(jobs)
        finally:
            # Whatever happens here, the threads must be gone before the writer is.
            if not all(job.done() for job in jobs):
                self._stop.set()
            readers.shutdown(cancel_futures=True)
            self._writers.shutdown()
        if self._failures:
            raise self._failures[0]
        self._interrupt.check()

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Runs `work` in a thread; the first failure stops all threads."""
        try:
            work(*args)
        except Stopped:
            pass
        except BaseException as error:
            self._failures.append(error)
            self._stop.set()

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set() or self._interrupt.asked:
            raise Stopped

    def _read_file(self, number: int) -> None:
        file = self._source.files[number]
        keys = [key for key, info in self._source.tensors.items() if info.file == number]
        keys.sort(key=lambda key: self._source.tensors[key].offset or 0)
        self._raise_if_stopped()
        known = self._writer.notes.get(f"sha256 {file.path}")
        digest = FileDigest(self._source.path_of(number), self._raise_if_stopped) if known is None else None
        try:
            for key in keys:
                for piece in self._by_key.get(key, ()):
                    self._read_piece(piece, digest)
            if known is not None:
                self.digests[number] = known["sha256"]
            if digest is not None:
                self.digests[number] = digest.hexdigest(file.size)
                self._writer.note(f"sha256 {file.path}", {"sha256": self.digests[number]})
        finally:
            if digest is not None:
                digest.close()

    def _read_piece(self, piece: Piece, digest: FileDigest | None) -> None:
        grid = self._writer.grid(piece.target)
        for block in blocks_of(piece.at, grid):
            self._raise_if_stopped()
            share = part(piece, block)
            if share is None:
                continue
            if self._has(piece.target, block):
                self._skip(piece, block, share)
                continue
            self._read_share(piece, block, share, digest)

    def _has(self, path: str, block: Ranges) -> bool:
        """Whether an earlier run stored this block, and the scales of a quantized one."""
        scales = self._plan.leaves[path].scales
        return self._writer.has(path, _slices(block)) and (
            scales is None or all(self._writer.has(scales, _slices(there)) for there, _ in self._rows(scales, block))
        )

    def _skip(self, piece: Piece, block: Ranges, share: Part) -> None:
        """Counts what an earlier run stored; the scales of a block with the first of its shares."""
        scales = self._plan.leaves[piece.target].scales
        with self._lock:
            first = (piece.target, block) not in self._skipped
            self._skipped.add((piece.target, block))
        self._count(piece.target, share.at, piece.source, resumed=True)
        if scales is not None and first:
            self._count(scales, block[: len(self._writer.grid(scales).shape)], piece.source, resumed=True)

    def _rows(self, scales: str, block: Ranges) -> Iterator[tuple[Ranges, Ranges]]:
        """The blocks of a leaf of scales that hold those of a block of values, and which part of each does."""
        grid = self._writer.grid(scales)
        rows = block[: len(grid.shape)]
        for there in blocks_of(rows, grid):
            yield there, tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(rows, there, strict=True))

    def _read_share(self, piece: Piece, block: Ranges, share: Part, digest: FileDigest | None) -> None:
        info = self._source.tensors[piece.source]
        cost = cost_of(info, share, block, self._plan.leaves[piece.target])
        held = Held(self._budget, cost, lambda: self._source.release(piece.source, rows_of(info, share)))
        try:
            rows, whole, values = take(self._source, piece, share)
            if digest is not None:
                self._take_digest(digest, piece.source, rows, whole)
            self._writers.submit(self._guarded, self._write_share, piece, block, share, values, held)
        except BaseException:
            held.release()
            raise

    def _take_digest(self, digest: FileDigest, key: str, rows: slice | None, whole: np.ndarray) -> None:
        """Takes the digest on to the end of these rows, from the rows themselves: the file is read no second time."""
        info = self._source.tensors[key]
        if info.offset is None or whole.size == 0:
            return
        start = info.offset + (rows.start * (info.nbytes // info.shape[0]) if rows else 0)
        self._source.populate(info.file, start, whole.nbytes)
        digest.feed(start, whole.reshape(-1).view(np.uint8).data)

    def _write_share(self, piece: Piece, block: Ranges, share: Part, values: np.ndarray, held: Held) -> None:
        try:
            self._raise_if_stopped()
            leaf = self._plan.leaves[piece.target]
            values = values if leaf.scales else self._cast(piece, values)
            ready = values if share.at == block else self._assemble(piece.target, block, share.at, values)
            if ready is None:
                held.release()
            else:
                ready = ready if leaf.scales is None else self._quantize(piece, block, ready, leaf.scales)
                self._writer.write(piece.target, _slices(block), ready, done=held.release)
        except BaseException:
            held.release()
            raise
        self._count(piece.target, share.at, piece.source, resumed=False)

    def _quantize(self, piece: Piece, block: Ranges, whole: np.ndarray, scales: str) -> np.ndarray:
        """The values of a block, whose scales are written on the way."""
        kind, dtype = self._plan.quantized, self._plan.leaves[scales].spec.dtype
        outputs = len(self._writer.grid(scales).shape)
        assert kind is not None and whole.shape[outputs:] == self._writer.grid(piece.target).shape[outputs:], piece
        try:
            values, scale = quantize(whole, whole.ndim - outputs, kind, dtype)
        except InputError:
            quantize(whole, whole.ndim - outputs, kind, dtype, self._not_finite(piece.target, block, whole))
            raise
        for there, at in self._rows(scales, block):
            inside = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(at, block[:outputs], strict=True))
            ready = self._assemble(scales, there, at, scale[inside])
            if ready is not None:
                self._writer.write(scales, _slices(there), ready)
            self._count(scales, at, piece.source, resumed=False)
        return values

    def _cast(self, piece: Piece, values: np.ndarray) -> np.ndarray:
        dtype = self._plan.leaves[piece.target].spec.dtype
        if values.dtype == dtype:
            return values
        with np.errstate(over="ignore"):
            made = pages.copy(values, dtype)
        if np.isfinite(made).all():
            return made
        lost = ~np.isfinite(made) & np.isfinite(values)
        if lost.any():
            raise InputError(
                f"{piece.source}: {int(lost.sum())} values do not fit dtype={dtype.name}, the first is"
                f" {float(values[lost][0]):g}: cast to bfloat16 or float32, or keep {values.dtype.name}"
            )
        return made

    def _not_finite(self, path: str, block: Ranges, whole: np.ndarray) -> str:
        """Names of the tensors that brought NaN or infinite values into a block."""
        found = []
        for piece in self._plan.leaves[path].pieces:
            both = [(max(a, c) - c, min(b, d) - c) for (a, b), (c, d) in zip(piece.at, block, strict=True)]
            inside = tuple(slice(a, max(a, b)) for a, b in both)
            if not np.isfinite(whole[inside].astype(np.float32)).all():
                found.append(piece.source)
        return ", ".join(dict.fromkeys(found))

    def _assemble(self, path: str, block: Ranges, at: Ranges, values: np.ndarray) -> np.ndarray | None:
        """Puts a share into its block and returns the block once it is whole."""
        shape = [stop - start for start, stop in block]
        place = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(at, block, strict=True))
        with self._lock:
            if (path, block) not in self._halves:
                self._halves[path, block] = pages.empty(shape, values.dtype), [math.prod(shape)]
            array, left = self._halves[path, block]
            array[place] = values
            left[0] -= values.size
            if left[0]:
                return None
            del self._halves[path, block]
        return array

    def _count(self, path: str, ranges: Ranges, what: str, *, resumed: bool) -> None:
        """Notes that a share is stored; the last one finishes its leaf."""
        elements = volume(ranges)
        nbytes = elements * self._plan.leaves[path].spec.dtype.itemsize
        with self._lock:
            self._left[path] -= elements
            self._done += nbytes
            self.resumed += nbytes if resumed else 0
            done, last = self._done, self._left[path] == 0
        if last and path not in self._writer.done:
            self._finish(path)
        if self._progress:
            self._progress(done, self._plan.bytes_written, what)

    def _finish(self, path: str) -> None:
        self._writer.finish_leaf(path, provenance(self._source, self._plan.leaves[path]))


def _slices(ranges: Ranges) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in ranges)


def provenance(source: Source, leaf: LeafPlan) -> list[dict]:
    """The manifest's record of a leaf's pieces: all that export and verify need to run them backwards."""
    records: Iterable[tuple[Piece, TensorInfo]] = ((p, source.tensors[p.source]) for p in leaf.pieces)
    return [
        {
            "file": info.file,
            "key": piece.source,
            "shape": list(info.shape),
            "dtype": info.dtype.name,
            "at": [list(r) for r in piece.at],
            "take": [list(r) for r in piece.take],
        }
        for piece, info in records
    ]
