"""Reading and writing the values of leaves with TensorStore, within a budget of bytes in flight."""

import collections
import dataclasses as dc
import errno
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import tensorstore as ts
from jaxtyping import Shaped

from shardzoo.checkpoints import sums
from shardzoo.checkpoints.grid import Block, Grid, LeafSpec
from shardzoo.checkpoints.orbax_layout import zarr_bytes, zarr_metadata
from shardzoo.errors import InputError

IN_FLIGHT = 32  # system calls on files at a time
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or this user's share of it


def context(*, sync: bool = True) -> ts.Context:
    """TensorStore resources of one job: bounded concurrency, no cache; `sync` flushes each file to the device.

    Files are read by system calls: mapped, they cost half the CPU time, but the kernel's read-ahead takes 7.8 times the
    bytes of a shard whose chunks lie apart, and a file cut short under the reader ends the process.
    """
    return ts.Context(
        {
            "file_io_concurrency": {"limit": IN_FLIGHT},
            "data_copy_concurrency": {"limit": max(2, os.cpu_count() or 2)},
            "file_io_sync": sync,
            "cache_pool": {"total_bytes_limit": 0},
        }
    )


def open_array(folder: Path, spec: LeafSpec, grid: Grid, ctx: ts.Context) -> ts.TensorStore:
    """The array of a leaf, its metadata taken from `spec` and `grid`, not from the file; a missing file is an error."""
    where = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": zarr_metadata(spec, grid),
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
        "recheck_cached_data": False,
    }
    return ts.open(where, open=True, create=True, assume_metadata=True, context=ctx).result()


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
    """A leaf being written: its array, the commits under way, the files begun and the sum so far."""

    array: ts.TensorStore
    commits: list = dc.field(default_factory=list)
    begun: set = dc.field(default_factory=set)
    total: sums.Sums = (0, 0)


@dc.dataclass(kw_only=True)
class Kept:
    """Files of a leaf that an earlier run stored, and the sum of their values."""

    files: set[tuple[int, ...]] = dc.field(default_factory=set)
    total: sums.Sums = (0, 0)


class LeafWriter:
    """Writes blocks of whole files below `root`, several at a time, and sums what it writes.

    Args:
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
        self._context = context(sync=sync)
        self._sync = sync
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self.kept = dict(kept or {})
        self._tell = stored
        self._stored: collections.deque[tuple[str, Block, sums.Sums]] = collections.deque()
        self._failure: tuple[str, Exception] | None = None

    def begin(self, path: str, *, metadata: bool = True) -> None:
        """Creates the leaf's folder and, with `metadata`, its `zarr.json`."""
        folder, spec, grid = self.placed[path]
        try:
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            if metadata:
                write_file(self.root / folder / "zarr.json", zarr_bytes(spec, grid), sync=self._sync)
        except OSError as error:
            raise storage_error(path, error, self.root) from error
        kept = self.kept.get(path, Kept())
        array = open_array(self.root / folder, spec, grid, self._context)
        self._open[path] = _Open(array=array, begun=set(kept.files), total=kept.total)

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
        total = sums.of_block(values, tuple(s.start for s in at), spec.shape)
        cost = self._budget.take(2 * values.nbytes)  # the values, and the encoded file

        def committed(commit: ts.Future) -> None:
            error = commit.exception()
            if error is None:
                self._stored.append((path, at, total))
            elif isinstance(error, Exception):
                self._failure = (path, error)
            self._budget.give(cost)
            if done is not None:
                done()

        with self._lock:
            commit = state.array[at].write(values, can_reference_source_data_indefinitely=True).commit
            state.commits.append(commit)
            state.total = sums.add(state.total, total)
        commit.add_done_callback(committed)
        self.tell_stored()

    def _begin_block(self, path: str, at: Block) -> _Open:
        with self._lock:
            if path not in self._open:
                self.begin(path)
            state = self._open[path]
            files = files_of(at, self.placed[path][2])
            if files & state.begun:
                raise ValueError(f"{path}: block {at} was written before: write each file once")
            state.begun |= files
            state.commits = [commit for commit in state.commits if not commit.done() or commit.exception()]
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
            for commit in state.commits:
                commit.result()
        except (ValueError, OSError) as error:
            raise storage_error(path, error, self.root) from error
        with self._lock:  # not before: `drain` waits for what is still open when this is interrupted
            del self._open[path]
        self.tell_stored()
        return state.total, state.begun

    def drain(self) -> None:
        """Waits for everything under way, whatever comes of it: nothing is written after this returns."""
        for state in self._open.values():
            for commit in state.commits:
                commit.exception()
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
        return InputError(f"{what}: no space left at {root}: free some and run again; what is written stays for that")
    if isinstance(error, PermissionError) or "Permission denied" in text or "PERMISSION_DENIED" in text:
        return InputError(f"{what}: not allowed to write below {root}: change its permissions or choose another place")
    return InputError(f"{what}: the storage failed at {root} ({text.splitlines()[0][:600]}): run again")


def nbytes(block: Block, itemsize: int) -> int:
    """Bytes of the values in a block."""
    return math.prod(s.stop - s.start for s in block) * itemsize
