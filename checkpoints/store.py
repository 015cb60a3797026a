"""Writing the values of leaves within a budget of bytes in flight."""

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses as dc
import errno
import functools
import math
import os
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints import pages, sums
from shardzoo.checkpoints.grid import Block, Grid, LeafSpec, index_of
from shardzoo.checkpoints.orbax_layout import zarr_bytes
from shardzoo.checkpoints.shard_file import write_shard
from shardzoo.errors import InputError

WRITERS = 8  # files written at a time: waiting for the device costs no processor
ENCODERS = min(4, max(2, os.cpu_count() or 2))  # of these at a time in the processor: four outrun what reads for them
_RANGE_WRITE = 2  # Linux: SYNC_FILE_RANGE_WRITE
MOST_UNSYNCED = 64  # files that wait to be put on the device together: each is open until then
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or this user's share of it
# The place itself will not do, however often it is tried: below a file, on a read-only disk, without files of its own.
UNFIT = (
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENOENT),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EOPNOTSUPP),
)


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Writes a small file whole, on the device before it returns if `sync`."""
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        if sync:
            os.fsync(f.fileno())


def sync_folder(path: Path) -> None:
    """Puts the names in a folder on the device."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Removes a folder with all in it, several names at a time: each waits for the storage by itself.

    Raises:
        OSError: something cannot be removed.
    """
    levels: dict[int, list[str]] = {}
    files: list[str] = []
    for folder, _, names in os.walk(path):
        levels.setdefault(folder.count(os.sep), []).append(folder)
        files += [os.path.join(folder, name) for name in names]
    with concurrent.futures.ThreadPoolExecutor(WRITERS, "remove") as threads:
        list(threads.map(_try(os.unlink), files))
        for level in sorted(levels, reverse=True):
            list(threads.map(_try(os.rmdir), levels[level]))
    if os.path.lexists(path):  # the rest, or why it stays
        shutil.rmtree(path)


def _try(remove: Callable[[str], None]) -> Callable[[str], None]:
    def removing(name: str) -> None:
        with contextlib.suppress(OSError):
            remove(name)

    return removing


@functools.cache
def _range_writer() -> Callable[..., int] | None:
    """The system's `sync_file_range`; None where it has none."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform.startswith("linux") else None
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def _start_writing(handle: int) -> None:
    """Has the system begin to write a file to its device, where it can be told so; promises nothing."""
    call = _range_writer()
    if call is not None:
        call(handle, 0, 0, _RANGE_WRITE)


class Unsynced:
    """Files that are written and not yet known to be on the device: put there together, by `settle`.

    By itself each file waits for a commit of the file system's journal and for the device's cache; together they wait
    for one. Their values are on the way to the device from the moment that they are added. Safe to call from several
    threads.
    """

    def __init__(self) -> None:
        self._handles: list[int] = []
        self._lock = threading.Lock()
        self._settling = threading.Lock()

    def add(self, handle: int) -> None:
        """Takes a file over, by a handle of its own: errors of the device are told to handles open since before.

        Raises:
            OSError: the storage failed.
        """
        _start_writing(handle)
        with self._lock:
            self._handles.append(os.dup(handle))
            full = len(self._handles) >= MOST_UNSYNCED
        if full:
            self.settle()

    def settle(self) -> None:
        """Waits until all files added so far are on the device.

        Raises:
            OSError: the storage failed.
        """
        with self._settling:
            handles = self._take()
            try:
                with concurrent.futures.ThreadPoolExecutor(WRITERS, "sync") as threads:
                    list(threads.map(os.fsync, handles))
            finally:
                for handle in handles:
                    os.close(handle)

    def forget(self) -> None:
        """Lets go of the files as they are."""
        for handle in self._take():
            os.close(handle)

    def _take(self) -> list[int]:
        with self._lock:
            handles, self._handles = self._handles, []
        return handles


class Budget:
    """Bytes in flight: `take` waits until they fit. One larger than the whole budget passes alone."""

    def __init__(self, limit: int):
        self.limit = limit
        self._free = limit
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> int:
        """Waits for `nbytes` (or the whole budget) and returns what was taken, to be given back."""
        nbytes = min(nbytes, self.limit)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        return nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._free += nbytes
            self._changed.notify_all()


@dc.dataclass(kw_only=True)
class _Open:
    """A leaf being written: the stores under way, the files begun and the sum so far."""

    stores: list[concurrent.futures.Future] = dc.field(default_factory=list)
    begun: set = dc.field(default_factory=set)
    total: sums.Sums = (0, 0)


@dc.dataclass(kw_only=True)
class Kept:
    """Files of a leaf that an earlier run stored, and the sum of their values."""

    files: set[tuple[int, ...]] = dc.field(default_factory=set)
    total: sums.Sums = (0, 0)


class LeafWriter:
    """Writes blocks of whole files below `root`, several at a time, and sums what it writes.

    A file is written under its own name: whoever lists what is stored does so after `stored` was told.

    Args:
        sync: put every file on the device: each before `stored` is told of it, or all together by `settle`.
        kept: what an earlier run stored, by path.
        stored: told of each block that is stored and its sum, by the thread of a later `write` or `finish`.

    Attributes:
        placed: path -> (folder below root, spec, grid).
    """

    def __init__(
        self,
        root: Path,
        placed: Mapping[str, tuple[str, LeafSpec, Grid]],
        *,
        budget: int,
        sync: bool,
        kept: Mapping[str, Kept] | None = None,
        stored: Callable[[str, Block, sums.Sums], None] | None = None,
    ):
        self.root = root
        self.placed = placed
        self._budget = Budget(budget)
        self._sync = sync
        self._threads = concurrent.futures.ThreadPoolExecutor(WRITERS, "store")
        self._rooms: queue.LifoQueue[pages.Room] = queue.LifoQueue()  # one for each file that is encoded at a time
        for _ in range(ENCODERS):
            self._rooms.put(pages.Room())
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self.kept = dict(kept or {})
        self._tell = stored
        self._unsynced = Unsynced()
        self._stored: collections.deque[tuple[str, Block, sums.Sums]] = collections.deque()
        self._failure: tuple[str, Exception] | None = None

    def begin(self, path: str, *, metadata: bool = True) -> None:
        """Creates the leaf's folder and, with `metadata`, its `zarr.json`."""
        folder, spec, grid = self.placed[path]
        try:
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            if metadata:
                self._write_metadata(self.root / folder / "zarr.json", zarr_bytes(spec, grid))
        except OSError as error:
            raise storage_error(path, error, self.root) from error
        kept = self.kept.get(path, Kept())
        self._open[path] = _Open(begun=set(kept.files), total=kept.total)

    def _write_metadata(self, file: Path, data: bytes) -> None:
        write_file(file, data, sync=False)
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._put_on_device(handle)
        finally:
            os.close(handle)

    def _put_on_device(self, handle: int) -> None:
        if self._sync and self._tell is None:
            self._unsynced.add(handle)
        elif self._sync:
            os.fsync(handle)

    def has(self, path: str, at: Block) -> bool:
        """Whether an earlier run stored this block."""
        kept = self.kept.get(path)
        return kept is not None and files_of(at, self.placed[path][2]) <= kept.files

    def write(
        self, path: str, at: Block, values: Shaped[np.ndarray, "..."], done: Callable[[], None] | None = None
    ) -> None:
        """Starts writing one block of whole files; waits only for room in the budget.

        `values` must stay as it is until `done` is called, by any thread, or `finish` returns. Safe to call from
        several threads.

        Raises:
            InputError: the storage is full, not writable, or failed, at this block or an earlier one.
            ValueError: the block is not made of whole files, was written before, or has another shape or dtype.
        """
        _, spec, grid = self.placed[path]
        shape = tuple(s.stop - s.start for s in at)
        if not grid.is_whole(at) or values.shape != shape or values.dtype != spec.dtype:
            raise ValueError(
                f"{path}: block {at} of {values.dtype.name}{list(values.shape)} is not whole files of {grid.outer}"
                f" in {spec.dtype.name}{list(spec.shape)}: write blocks that start and end on the grid"
            )
        self._raise_failure()
        state = self._begin_block(path, at)
        cost = self._budget.take(values.nbytes)
        with self._lock:
            state.stores.append(self._threads.submit(self._store, path, at, values, state, cost, done))
        self.tell_stored()

    def _store(
        self,
        path: str,
        at: Block,
        values: Shaped[np.ndarray, "..."],
        state: _Open,
        cost: int,
        done: Callable[[], None] | None,
    ) -> None:
        """Writes the files of one block; what fails is kept for the next `write` and raised by `finish`."""
        _, _, grid = self.placed[path]
        total = (0, 0)
        try:
            for index in sorted(files_of(at, grid)):
                part = grid.block(index)
                inside = tuple(slice(p.start - s.start, p.stop - s.start) for p, s in zip(part, at, strict=True))
                total = sums.add(total, self._write_shard(path, index, values[index_of(inside)]))
        except Exception as error:
            self._failure = (path, error)
            raise
        finally:
            self._budget.give(cost)
            if done is not None:
                done()
        with self._lock:
            state.total = sums.add(state.total, total)
        self._stored.append((path, at, total))

    def _write_shard(self, path: str, index: tuple[int, ...], values: Shaped[np.ndarray, "..."]) -> sums.Sums:
        folder, spec, grid = self.placed[path]
        file = self.root / folder / grid.file(index)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            room = self._rooms.get()
            try:
                start = tuple(s.start for s in grid.block(index))
                total = write_shard(handle, values, grid, start, spec.shape, room)
            finally:
                self._rooms.put(room)
            self._put_on_device(handle)
        finally:
            os.close(handle)
        return total

    def _begin_block(self, path: str, at: Block) -> _Open:
        with self._lock:
            if path not in self._open:
                self.begin(path)
            state = self._open[path]
            files = files_of(at, self.placed[path][2])
            if files & state.begun:
                raise ValueError(f"{path}: block {at} was written before: write each file once")
            state.begun |= files
            return state

    def _raise_failure(self) -> None:
        if self._failure is not None:
            path, error = self._failure
            raise storage_error(path, error, self.root) from error

    def tell_stored(self) -> None:
        """Passes on what has been stored since the last time."""
        while self._tell is not None:
            try:
                self._tell(*self._stored.popleft())
            except IndexError:
                return

    def finish(self, path: str) -> tuple[sums.Sums, set]:
        """Waits for the leaf's blocks; returns their sum and the indices of the files written.

        Raises:
            InputError: the storage is full, not writable, or failed.
        """
        with self._lock:
            if path not in self._open:
                self.begin(path)
            state = self._open[path]
        try:
            for store in state.stores:
                store.result()
        except OSError as error:
            raise storage_error(path, error, self.root) from error
        with self._lock:  # not before: `drain` waits for what is still open when this is interrupted
            del self._open[path]
        self.tell_stored()
        return state.total, state.begun

    def settle(self) -> None:
        """Waits until all files of finished leaves are on the device, where `sync` asks for it.

        Raises:
            InputError: the storage failed.
        """
        try:
            self._unsynced.settle()
        except OSError as error:
            raise storage_error("sync", error, self.root) from error

    def drain(self) -> None:
        """Waits for everything under way, whatever comes of it: nothing is written after this returns."""
        self._threads.shutdown()
        self._unsynced.forget()
        self._open.clear()


def files_of(at: Block, grid: Grid) -> set[tuple[int, ...]]:
    """The indices of the files that a block is made of."""
    counts = [range(s.start // o, -(-s.stop // o)) for s, o in zip(at, grid.outer, strict=True)]
    return {tuple(i + r.start for i, r in zip(index, counts, strict=True)) for index in np.ndindex(*map(len, counts))}


def storage_error(what: str, error: Exception, root: Path) -> InputError:
    """An error of the storage as one line that says what failed and what to change."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL or any(f"os_error_code='{n}'" in text or os.strerror(n) in text for n in FULL):
        return InputError(f"{what}: no space left at {root}: free some and run again")
    if isinstance(error, PermissionError) or "Permission denied" in text or "PERMISSION_DENIED" in text:
        return InputError(f"{what}: not allowed to write below {root}: change its permissions or choose another place")
    if number is not None and number in UNFIT:
        return InputError(f"{what}: cannot be written below {root} ({os.strerror(number)}): choose another destination")
    return InputError(f"{what}: the storage failed at {root} ({text.splitlines()[0][:600]}): run again")


def writable_folder(path: Path) -> Path:
    """The folder that holds `path` or will, the first of its parents that exists: tried by a file that is gone at once.

    Raises:
        InputError: that is not a folder, or nothing can be written there.
    """
    nearest = next(parent for parent in path.parents if os.path.lexists(parent))
    if not nearest.is_dir():
        raise InputError(f"{path}: {nearest} is not a folder: choose another destination")
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        if error.errno not in FULL:  # how much is free is asked where it is known how much is needed
            raise storage_error(str(path), error, nearest) from error
    return nearest


def nbytes(block: Block, itemsize: int) -> int:
    """Bytes of the values in a block."""
    return math.prod(s.stop - s.start for s in block) * itemsize
