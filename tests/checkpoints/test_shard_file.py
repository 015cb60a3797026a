"""Data files are byte for byte what TensorStore writes for the same metadata."""

import contextlib
import errno
import math
import os
import re
import threading
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts

from shardzoo.checkpoints import shard_file, store, stored, sums
from shardzoo.checkpoints.grid import Grid, LeafSpec
from shardzoo.checkpoints.manifest import STORED, dtype_of
from shardzoo.checkpoints.orbax_layout import zarr_metadata
from shardzoo.checkpoints.save import _unit
from shardzoo.errors import InputError

# shape, inner, outer: no dims; one chunk; cut at the end of both dims; uneven chunks; one of several bands
GRIDS = [
    ((), (), ()),
    ((5,), (5,), (5,)),
    ((7, 9), (2, 4), (4, 8)),
    ((3, 130, 70), (1, 64, 16), (1, 128, 48)),
    ((2, 600, 1100), (1, 200, 275), (1, 600, 1100)),
]
rng = np.random.default_rng(7)


def values(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Random bits, where any bits are a value."""
    if dtype.itemsize == 1:
        return np.asarray(rng.integers(-2, 2, shape)).astype(dtype)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "zarr.json"
    }


def both(tmp_path: Path, grid: Grid, x: np.ndarray) -> tuple[dict[str, bytes], dict[str, bytes], sums.Sums]:
    spec = LeafSpec(dims=tuple(f"d{i}" for i in range(x.ndim)), shape=x.shape, dtype=x.dtype)
    writer = store.LeafWriter(tmp_path / "ours", {"x": ("x", spec, grid)}, budget=1 << 20, sync=False)
    for block in grid.blocks():
        writer.write("x", block, x[(*block, ...)])
    by_tensorstore(tmp_path / "theirs", spec, grid, x)
    total, _ = writer.finish("x")
    writer.drain()
    return files(tmp_path / "ours" / "x"), files(tmp_path / "theirs"), total


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("cuts", GRIDS, ids=lambda cuts: str(cuts[0]))
def test_the_bytes_are_those_of_tensorstore(tmp_path, name, cuts):
    shape, inner, outer = cuts
    grid = Grid(shape=shape, inner=inner, outer=outer)
    x = values(shape, dtype_of(name))
    ours, theirs, total = both(tmp_path, grid, x)
    assert ours == theirs
    assert {grid.file(i): grid.file_bytes(i, x.itemsize) for i in grid.indices()} == {
        n: len(b) for n, b in ours.items()
    }
    assert total == sums.of_block(x, (0,) * x.ndim, shape)


def by_tensorstore(folder: Path, spec: LeafSpec, grid: Grid, x: np.ndarray) -> None:
    where = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": zarr_metadata(spec, grid),
        "store_data_equal_to_fill_value": True,
    }
    ts.open(where, create=True).result()[...].write(x).result()


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("cuts", GRIDS, ids=lambda cuts: str(cuts[0]))
def test_what_tensorstore_wrote_is_read(tmp_path, monkeypatch, name, cuts):
    """All of it and random ranges, in reads of one chunk and of many."""
    shape, inner, outer = cuts
    grid, x = Grid(shape=shape, inner=inner, outer=outer), values(shape, dtype_of(name))
    spec = LeafSpec(dims=tuple(f"d{i}" for i in range(x.ndim)), shape=x.shape, dtype=x.dtype)
    by_tensorstore(tmp_path, spec, grid, x)
    leaf = stored.Reader().open(tmp_path, spec, grid)
    assert leaf.read().result().tobytes() == x.tobytes()
    for _ in range(8):
        monkeypatch.setattr(shard_file, "READ", int(rng.choice([1, 1 << 20])))
        ends = [sorted(rng.choice(n + 1, 2, replace=False).tolist()) for n in shape]
        at = tuple(slice(a, b) for a, b in ends)
        found = leaf.at(at).read().result()
        assert found.dtype == x.dtype and found.tobytes() == x[(*at, ...)].tobytes()


@pytest.mark.parametrize("pair", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")])
def test_values_are_cast_as_they_are_read(tmp_path, pair):
    one, other = map(dtype_of, pair)
    grid = Grid(shape=(50, 70), inner=(16, 16), outer=(48, 64))
    x = np.asarray(rng.standard_normal(grid.shape) * 1e5).astype(one)
    spec = LeafSpec(dims=("a", "b"), shape=x.shape, dtype=one)
    by_tensorstore(tmp_path, spec, grid, x)
    leaf = stored.Reader().open(tmp_path, spec, grid)
    with np.errstate(over="ignore"):
        expected = x.astype(other)
    assert leaf.cast(other).cut(0, 3, 41).read().result().tobytes() == expected[3:41].tobytes()


def test_ranges_outside_of_a_leaf_are_refused(tmp_path):
    grid = Grid(shape=(5, 3), inner=(2, 3), outer=(4, 3))
    x = values(grid.shape, np.dtype("<u2"))
    spec = LeafSpec(dims=("a", "b"), shape=x.shape, dtype=x.dtype)
    by_tensorstore(tmp_path, spec, grid, x)
    leaf = stored.Reader().open(tmp_path, spec, grid)
    for rows in (slice(3, 6), slice(-2, 1), slice(4, 3), slice(0, 4, 2)):
        with pytest.raises(ValueError, match=r"inside of \[5, 3\]"):
            leaf.at((rows, slice(0, 3)))
    with pytest.raises(ValueError, match="argument"):
        leaf.at((slice(0, 2),))
    assert leaf.at((slice(None), slice(1, None))).read().result().tobytes() == x[:, 1:].tobytes()


def test_only_the_chunks_asked_for_are_read(tmp_path, monkeypatch):
    grid = Grid(shape=(64, 64), inner=(16, 16), outer=(64, 32))
    x = values(grid.shape, np.dtype("<u2"))
    spec = LeafSpec(dims=("a", "b"), shape=x.shape, dtype=x.dtype)
    by_tensorstore(tmp_path, spec, grid, x)
    taken = []
    real = os.preadv

    def counted(handle, buffers, offset):
        taken.append(real(handle, buffers, offset))
        return taken[-1]

    monkeypatch.setattr(os, "preadv", counted)
    stored.Reader().open(tmp_path, spec, grid).at((slice(10, 40), slice(16, 32))).read().result()
    chunk, index = 16 * 16 * 2 + 4, 8 * 16 + 4
    assert sorted(taken) == [index, chunk, chunk, chunk]  # every other chunk of the file belongs to other columns


def test_what_has_not_begun_when_reading_ends_is_dropped(tmp_path, monkeypatch):
    grid = Grid(shape=(64, 8), inner=(1, 8), outer=(1, 8))
    x = values(grid.shape, np.dtype("<u2"))
    spec = LeafSpec(dims=("a", "b"), shape=x.shape, dtype=x.dtype)
    by_tensorstore(tmp_path, spec, grid, x)
    real, begun, go = os.preadv, threading.Semaphore(0), threading.Event()

    def late(*args):
        begun.release()
        go.wait(20)
        return real(*args)

    monkeypatch.setattr(os, "preadv", late)
    with pytest.raises(KeyboardInterrupt), stored.Reader() as reader:
        reading = reader.open(tmp_path, spec, grid).read()
        begun.acquire(timeout=20)
        threading.Timer(0.2, go.set).start()
        raise KeyboardInterrupt
    read = sum(not part.cancelled() for part in reading.parts)
    assert 0 < read <= stored.IN_FLIGHT and all(part.done() for part in reading.parts)


def test_damaged_files_are_told(tmp_path):
    grid = Grid(shape=(4, 6), inner=(2, 3), outer=(4, 6))
    x = values(grid.shape, np.dtype("<u2"))
    spec = LeafSpec(dims=("a", "b"), shape=x.shape, dtype=x.dtype)
    by_tensorstore(tmp_path, spec, grid, x)
    file = tmp_path / "c/0/0"
    data = file.read_bytes()
    leaf = stored.Reader().open(tmp_path, spec, grid)

    def told(content: bytes) -> str:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: ") as error:
            leaf.read().result()
        return str(error.value)

    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert "does not have the checksum" in told(bytes(flipped)), bit
    assert f"{len(data) - 1} bytes, not {len(data)}" in told(data[:-1])
    assert f"{len(data) + 1} bytes" in told(data + b"0")
    for table in ([1 << 62, 16], [0, 15], [(1 << 64) - 1] * 2):
        index = np.frombuffer(data[64:-4], "<u8").copy()
        index[:2] = table
        assert "lie in it" in (text := told(data[:64] + sealed(index.tobytes()))) or "missing" in text
    file.unlink()
    with pytest.raises(FileNotFoundError, match="c/0/0"):
        leaf.read().result()


def sealed(index: bytes) -> bytes:
    return index + google_crc32c.value(index).to_bytes(4, "little")


@pytest.mark.parametrize("band", [1, 3000, 1 << 20])
def test_bands_and_small_writes_change_nothing(tmp_path, monkeypatch, band):
    grid = Grid(shape=(3, 50, 70), inner=(1, 16, 16), outer=(2, 48, 64))
    x = values(grid.shape, np.dtype("<u2"))
    monkeypatch.setattr(shard_file, "BAND", band)
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:301]))  # a write may stop short
    ours, theirs, total = both(tmp_path, grid, x)
    assert ours == theirs and total == sums.of_block(x, (0, 0, 0), grid.shape)


def test_values_that_lie_in_any_order(tmp_path):
    grid = Grid(shape=(60, 40), inner=(8, 16), outer=(32, 32))
    x = values((40, 60), np.dtype("<f4")).T
    ours, theirs, _ = both(tmp_path, grid, x)
    assert ours == theirs


def test_a_failed_write_is_raised_and_kept(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = LeafSpec(dims=("a",), shape=(6,), dtype=np.dtype("f4"))
    grid = Grid(shape=(6,), inner=(2,), outer=(2,))
    told, done = [], []
    writer = store.LeafWriter(
        tmp_path, {"x": ("x", spec, grid)}, budget=1, sync=True, stored=lambda *block: told.append(block)
    )
    x = np.arange(6, dtype="f4")
    first, second, third = grid.blocks()
    writer.write("x", first, x[first], lambda: done.append(1))
    monkeypatch.setattr(os, "write", full)
    writer.write("x", second, x[second], lambda: done.append(2))
    with pytest.raises(ValueError, match="no space left"):
        writer.finish("x")
    with pytest.raises(ValueError, match="no space left"):
        writer.write("x", third, x[third])
    writer.drain()
    writer.tell_stored()
    assert sorted(done) == [1, 2] and [at for _, at, _ in told] in ([first], [])


def of_ones(folder: Path, number: int) -> tuple[store.LeafWriter, Grid]:
    """A writer that syncs, and the grid of a leaf of as many files."""
    spec = LeafSpec(dims=("a",), shape=(number,), dtype=np.dtype("f4"))
    grid = Grid(shape=(number,), inner=(1,), outer=(1,))
    return store.LeafWriter(folder, {"x": ("x", spec, grid)}, budget=1 << 20, sync=True), grid


def open_below(folder: Path) -> int:
    """Files below `folder` that this process has open, whoever else opens and closes some meanwhile."""
    found = 0
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{handle}").startswith(f"{folder}/")
    return found


def test_files_are_put_on_the_device_together(tmp_path, monkeypatch):
    """All of them, none before it is known to be written, and with few open at a time."""
    synced, most = [], []

    def fsync(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        most.append(open_below(tmp_path))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(store, "MOST_UNSYNCED", 10)
    writer, grid = of_ones(tmp_path, 135)
    for block in grid.blocks():
        writer.write("x", block, np.ones(1, "f4"))
    writer.finish("x")
    writer.settle()
    assert sorted(synced) == sorted(str(p) for p in tmp_path.rglob("*") if p.is_file()) and len(synced) == 136
    # Those being synced and those that wait, each up to the limit and one of every writer beyond it; and one at each
    # writer's hands.
    assert max(most) <= 2 * (10 + store.WRITERS) + store.WRITERS
    writer.drain()
    assert open_below(tmp_path) == 0


def test_a_device_that_fails_is_told(tmp_path, monkeypatch):
    def fails(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer, grid = of_ones(tmp_path, 3)
    for block in grid.blocks():
        writer.write("x", block, np.ones(1, "f4"))
    writer.finish("x")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(InputError, match="sync: the storage failed"):
        writer.settle()
    writer.drain()
    assert open_below(tmp_path) == 0


def test_a_folder_goes_with_all_in_it(tmp_path, monkeypatch):
    """What a link leads to stays; what cannot be removed is told."""
    kept = tmp_path / "kept" / "file"
    kept.parent.mkdir()
    kept.write_text("kept")
    gone = tmp_path / "gone"
    for name in ("a/b/c/1", "a/b/2", "3"):
        (gone / name).parent.mkdir(parents=True, exist_ok=True)
        (gone / name).write_text(name)
    (gone / "a" / "folder").symlink_to(kept.parent)
    (gone / "a" / "file").symlink_to(kept)
    store.remove_folder(gone)
    assert not gone.exists() and kept.read_text() == "kept"

    def fails(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rmdir", fails)
    with pytest.raises(OSError, match="Read-only"):
        store.remove_folder(kept.parent)


def test_a_file_reaches_over_all_shards_of_a_process_that_lie_together():
    """Four shards of a (8, 6) leaf, by the processes that own them."""

    def unit(owners):
        return _unit((8, 6), (4, 3), {((4 * i, 4 * i + 4), (3 * j, 3 * j + 3)): p for (i, j), p in owners.items()})

    assert unit({(0, 0): 0, (0, 1): 0, (1, 0): 1, (1, 1): 1}) == (4, 6)
    assert unit({(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 1}) == (8, 3)
    assert unit({(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 0}) == (4, 3)
    assert unit({(0, 0): 2, (0, 1): 2, (1, 0): 2, (1, 1): 2}) == (8, 6)
    assert _unit((8,), (1,), {((i, i + 1),): i // 2 % 2 for i in range(8)}) == (2,)
    assert _unit((), (), {(): 1}) == () and _unit((0, 4), (0, 2), {}) == (1, 2)
