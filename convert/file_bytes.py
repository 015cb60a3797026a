"""Random reads from one weight file: by memory map on local disks, by `pread` on network file systems.

Every reader hands out `Stored` records (where a tensor lies, its type and its strides); `read_stored` turns one into
a numpy array. Both are safe to call from several threads at once: nothing here keeps a file position.
"""

import math
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from shardzoo.checkpoints import pages
from shardzoo.errors import InputError

Strategy = Literal["auto", "mmap", "pread"]

# Page faults over a network cost a round trip each; large reads do not.
NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "smb2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    ]
)
MAX_ELEMENTS = 2**63 - 1
MAX_DIMS = 64  # numpy's own limit
# How much of a strided tensor's storage is held at once while it is copied into row-major order.
GATHER_BYTES = 16 << 20
_FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where one tensor lies in its file.

    `offset` and `strides` are in bytes, `strides` is None for row-major order. `dtype` is the type of one element as
    `read_stored` returns it; `packed` says that two elements share a byte, the first in the low half (4-bit floats).
    `nbytes` counts the elements as stored (a packed tensor's are half an array's), expanded dimensions included.
    `storage` names what the tensor is a view of: two tensors of equal offset, strides and shape are the same memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    packed: bool = False
    storage: str = ""


def element_count(shape: tuple[int, ...]) -> int | None:
    """Number of elements, or None where the product of the non-zero sizes does not fit 63 bits."""
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        return None
    return math.prod(shape)


def _unescape_mount(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _mounts() -> Iterator[tuple[str, str]]:
    """(mount point, file system type) of every mount, later mounts last; nothing where the system does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if separator and len(fields) > 4:
            yield _unescape_mount(fields[4]), after.split(" ", 1)[0]


def file_system_type(path: Path) -> str:
    """Type of the file system that holds `path` ("ext4", "nfs4", ...); "" where the system does not say."""
    real = os.path.realpath(path)
    best, found = -1, ""
    for point, kind in _mounts():
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, found = len(point), kind
    return found


def is_network_file_system(kind: str) -> bool:
    """Whether page faults on this type of file system go over a network (FUSE mounts count: their cost is unknown)."""
    return kind in NETWORK_FILE_SYSTEMS or kind == "fuse" or kind.startswith("fuse.")


class FileBytes:
    """The bytes of one open file, read at any offset.

    Attributes:
        path, size: as opened; `mtime_ns` with `size` identify this version of the file.
        strategy: "mmap" or "pread", whichever was chosen.
    """

    def __init__(self, path: Path, strategy: Strategy = "auto"):
        self.path = path
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._address = 0  # of the map
        try:  # without O_NONBLOCK opening a pipe waits for its other end
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be opened ({getattr(error, 'strerror', error)})") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise InputError(f"{path}: is not a regular file")
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
        if strategy == "auto":
            strategy = "pread" if is_network_file_system(file_system_type(path)) else "mmap"
        self.strategy = strategy
        if strategy == "mmap" and self.size:
            try:
                self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
                self._address = np.frombuffer(self._map, np.uint8).ctypes.data
            except (
                OSError,
                ValueError,
            ):  # a file system without memory maps: same bytes, another way
                self.strategy = "pread"

    def close(self) -> None:
        """Closes the file. Arrays that `read_stored` returned stay valid: the last of them unmaps the file."""
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check(self, offset: int, count: int) -> None:
        if self._fd < 0:
            raise InputError(f"{self.path}: is closed; open the source again to read from it")
        # A map of a file that was cut short kills the process when touched: look before each read.
        status = os.fstat(self._fd)
        if status.st_size != self.size:
            raise InputError(
                f"{self.path}: size={status.st_size} was {self.size} when opened: the file changed while being read"
            )
        if status.st_mtime_ns != self.mtime_ns:
            raise InputError(f"{self.path}: was written to since it was opened: the file changed while being read")
        if offset < 0 or count < 0 or offset + count > self.size:
            raise InputError(f"{self.path}: bytes {offset} to {offset + count} reach past its {self.size} bytes")

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`."""
        self._check(offset, count)
        mapped = self._map
        if mapped is not None:
            return mapped[offset : offset + count]
        target = bytearray(count)
        self._fill(memoryview(target), offset)
        return bytes(target)

    def view(self, offset: int, count: int) -> memoryview:
        """Read-only bytes: of the map itself, or a fresh copy."""
        self._check(offset, count)
        mapped = self._map
        if mapped is not None:
            return memoryview(mapped)[offset : offset + count]
        target = pages.empty((count,), np.uint8)
        pages.populate(target)
        self._fill(target.data, offset)
        target.flags.writeable = False
        return target.data

    def _fill(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise InputError(f"{self.path}: reading at byte {offset + done} failed ({error.strerror})") from None
            if got == 0:
                raise InputError(f"{self.path}: ends at byte {offset + done}, {len(target) - done} bytes early")
            done += got

    def populate(self, offset: int, count: int) -> None:
        """Maps the pages of this range in one call, where the system can: cheaper than one fault for every few."""
        mapped = self._map
        if mapped is None or count <= 0 or sys.platform != "linux":
            return
        try:
            self._advise(offset, count, pages.POPULATE_READ)
        except OSError as error:
            raise InputError(f"{self.path}: reading at byte {offset} failed ({error.strerror})") from None

    def _advise(self, offset: int, count: int, advice: int) -> None:
        """Callers hold the map meanwhile: after `close` its addresses may be those of other memory."""
        pages.advise(self._address + offset, self._address + min(offset + count, self.size), advice)

    def release(self, offset: int, count: int) -> None:
        """Gives the mapped pages of this range back; they are read again when touched, so any view stays valid."""
        mapped = self._map
        if mapped is None or count <= 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        self._advise(offset, count, mmap.MADV_DONTNEED)


def read_stored(data: FileBytes, stored: Stored, rows: slice | None = None) -> np.ndarray:
    """A tensor, or `rows` of its first dimension, in row-major order with its stored element type.

    Returns:
        A read-only view of the map where the file allows one (row-major and aligned), else a fresh array.
    """
    shape, offset, start = stored.shape, stored.offset, 0
    if rows is not None:
        start, stop = _row_range(data.path, stored.shape, rows)
        shape = (stop - start, *shape[1:])
    if math.prod(shape) == 0:
        return np.empty(shape, stored.dtype)
    if stored.packed:
        return _read_packed(data, stored, shape, start)
    if stored.strides is not None:
        base = offset + start * stored.strides[0] if shape else offset
        return _gather(data, shape, stored.dtype, base, stored.strides)
    count = math.prod(shape) * stored.dtype.itemsize
    base = offset + (start * (stored.nbytes // stored.shape[0]) if shape else 0)
    array = np.ndarray(shape, stored.dtype, data.view(base, count))
    return array if array.flags.aligned else pages.copy(array)


def release_stored(data: FileBytes, stored: Stored, rows: slice | None = None) -> None:
    """Gives back the mapped pages that `read_stored` with the same arguments touched (all of a strided tensor's)."""
    if stored.nbytes == 0:
        return
    if stored.strides is not None:
        data.release(stored.offset, _span(stored.shape, stored.strides, stored.dtype.itemsize))
        return
    if rows is None:
        data.release(stored.offset, stored.nbytes)
        return
    start, stop = _row_range(data.path, stored.shape, rows)
    begin, end = (row * stored.nbytes // stored.shape[0] for row in (start, stop))
    data.release(stored.offset + begin, end - begin)


def _row_range(path: Path, shape: tuple[int, ...], rows: slice) -> tuple[int, int]:
    if not shape:
        raise InputError(f"{path}: rows of a tensor with no dimensions were asked for: read it whole")
    start, stop, step = rows.indices(shape[0])
    if step != 1:
        raise InputError(f"{path}: rows in steps of {step} were asked for: only whole ranges can be read")
    return start, max(start, stop)


def _read_packed(data: FileBytes, stored: Stored, shape: tuple[int, ...], start: int) -> np.ndarray:
    elements = math.prod(shape)
    first = start * (math.prod(stored.shape[1:]))
    whole = data.view(stored.offset + first // 2, (first + elements + 1) // 2 - first // 2)
    pairs = np.frombuffer(whole, np.uint8)
    halves = pages.empty((pairs.size, 2), np.uint8)
    pages.populate(halves)
    np.bitwise_and(pairs, 15, out=halves[:, 0])
    np.right_shift(pairs, 4, out=halves[:, 1])
    return halves.reshape(-1)[first % 2 :][:elements].reshape(shape).view(_FLOAT4)


def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first to the end of the last element."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + itemsize


def _gather(
    data: FileBytes,
    shape: tuple[int, ...],
    dtype: np.dtype,
    offset: int,
    strides: tuple[int, ...],
) -> np.ndarray:
    """Copies a strided tensor into row-major order, walking the file in storage order a few MiB at a time."""
    target = pages.empty(shape, dtype)
    pages.populate(target)
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    view = target.transpose(order)
    _gather_into(data, view, offset, tuple(strides[dim] for dim in order))
    return target


def _gather_into(data: FileBytes, target: np.ndarray, offset: int, strides: tuple[int, ...]) -> None:
    """Fills `target` from the file; its dimensions are in order of falling stride."""
    span = _span(target.shape, strides, target.itemsize)
    if span <= GATHER_BYTES:
        # (np.lib.stride_tricks refuses the 8-bit floats, the plain constructor does not.)
        target[...] = np.ndarray(target.shape, target.dtype, data.view(offset, span), 0, strides)
        data.release(offset, span)
        return
    inner = _span(target.shape[1:], strides[1:], target.itemsize)
    if inner > GATHER_BYTES:
        for index, part in enumerate(target):
            _gather_into(data, part, offset + index * strides[0], strides[1:])
        return
    step = (GATHER_BYTES - inner) // max(strides[0], 1) + 1
    for start in range(0, target.shape[0], step):
        _gather_into(data, target[start : start + step], offset + start * strides[0], strides)


if sys.byteorder != "little":  # every format read here is little-endian, and so is all hardware that JAX runs on
    raise ImportError("shardzoo.convert needs a little-endian machine")
