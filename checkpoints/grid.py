"""How a leaf is cut on disk: the inner chunk (unit of reading) and the outer shard (one file).

The cuts follow the dims that the declaration splits, so a device of any degree that divides them reads
its own chunks and no others. Sizes are global; `inner` divides `outer` in every dim, and the last outer
shard of a dim may reach past its end.
"""

import dataclasses as dc
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shardzoo.zoo.layout import LAYER as STACK
from shardzoo.zoo.layout import Param

DEGREES = (2, 4, 8, 16, 3, 6, 12, 5, 10, 7, 9, 14)  # splits that chunks line up with, the commonest first
LEAST_CHUNK = 32 << 10  # bytes: no cut for a declared split goes below
LEAST_FREE_CHUNK = 128 << 10  # bytes: no cut of a dim that the declaration leaves whole goes below
MOST_CHUNK = 1 << 20  # bytes: dims are cut until the unit of reading is at most this
MOST_OUTER = 32 << 20  # bytes of one file, and of the block that the writer holds for it
MOST_ELEMENTS = 16 << 20  # of one file: blocks of 8 bits are made out of twice their bytes or more
SMALL_LEAF = 1 << 20  # bytes: a leaf up to here is one file

Block = tuple[slice, ...]


def index_of(block: Block) -> Any:
    """The block as an index that gives an array, also of one without dims."""
    return (*block, ...)


@dc.dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """One leaf to be stored: named dims, global shape, dtype, and the mesh axes its dims may split over.

    No file crosses a multiple of `unit` in any dim, where one is given: a writer's block then lies in one file's reach.
    With `rows`, every file is whole in the dims after that many: it holds all inputs of its outputs.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    split: Mapping[str, tuple[str, ...]] = dc.field(default_factory=dict)
    unit: tuple[int, ...] | None = dc.field(default=None, compare=False)
    rows: int | None = dc.field(default=None, compare=False)

    @classmethod
    def of(cls, param: Param) -> "LeafSpec":
        """The spec of a declared parameter; splits at rest are left to the mesh of the day."""
        split = {dim: (axes,) if isinstance(axes, str) else tuple(axes) for dim, axes in param.split.items()}
        return cls(dims=param.names, shape=tuple(param.shape), dtype=param.dtype, split=split)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without checksums."""
        return math.prod(self.shape) * self.dtype.itemsize


@dc.dataclass(frozen=True, kw_only=True)
class Grid:
    """Chunk shapes of one leaf: `outer` is one file, `inner` one separately readable chunk in it."""

    shape: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]

    def blocks(self) -> Iterator[Block]:
        """The global ranges of each file, in C order of their indices."""
        for index in self.indices():
            yield self.block(index)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """The index of each file, in C order; none when the leaf has no elements."""
        return itertools.product(*(range(-(-n // o)) for n, o in zip(self.shape, self.outer, strict=True)))

    def block(self, index: tuple[int, ...]) -> Block:
        """The global ranges of the file at `index`, cut at the end of each dim."""
        return tuple(slice(i * o, min(i * o + o, n)) for i, o, n in zip(index, self.outer, self.shape, strict=True))

    def file(self, index: tuple[int, ...]) -> str:
        """Name of the file at `index` below the leaf's folder (zarr's default chunk key)."""
        return "/".join(["c", *map(str, index)])

    def file_bytes(self, index: tuple[int, ...], itemsize: int) -> int:
        """Exact size of the file at `index`: its chunks with 4 bytes of crc32c each, then their index."""
        block = self.block(index)
        stored = math.prod(-(-(s.stop - s.start) // c) for s, c in zip(block, self.inner, strict=True))
        slots = math.prod(o // c for o, c in zip(self.outer, self.inner, strict=True))
        return stored * (math.prod(self.inner) * itemsize + 4) + slots * 16 + 4

    def is_whole(self, block: Block) -> bool:
        """Whether `block` starts and ends on file boundaries in every dim."""
        return len(block) == len(self.shape) and all(
            s.step in (None, 1) and s.start % o == 0 and (s.stop % o == 0 or s.stop == n) and s.start < s.stop <= n
            for s, o, n in zip(block, self.outer, self.shape, strict=True)
        )

    def within(self, limit: tuple[int, ...]) -> "Grid":
        """The same cuts made finer so that no file crosses a multiple of `limit` in any dim."""
        dims = zip(self.shape, self.outer, limit, strict=True)
        outer = tuple(o if k >= n else _common(o, k) for n, o, k in dims)
        inner = tuple(_common(c, o) for c, o in zip(self.inner, outer, strict=True))
        return Grid(shape=self.shape, outer=outer, inner=inner)


def _common(size: int, limit: int) -> int:
    """A divisor of `limit` near `size`: their common one, or all of `limit` where that would be too fine."""
    limit = max(1, limit)
    common = math.gcd(size, limit)
    return common if 4 * common >= min(size, limit) else limit


def plan_grid(leaf: LeafSpec) -> Grid:
    """Cuts `leaf`: declared splits first, then the stack dim, then the largest whole dim, then by size alone."""
    shape = tuple(max(1, n) for n in leaf.shape)
    inner = list(shape)
    item = leaf.dtype.itemsize
    small = leaf.nbytes <= SMALL_LEAF
    for d, name in enumerate(leaf.dims):
        if name == STACK and not small:
            inner[d] = 1
    for d, name in enumerate(leaf.dims):
        if name in leaf.split and name != STACK:
            inner[d] = _cut(inner, d, item, DEGREES, LEAST_CHUNK)
    free = [d for d, name in enumerate(leaf.dims) if name not in leaf.split and name != STACK]
    if free and len(shape) > 1:
        widest = max(free, key=lambda d: shape[d])
        inner[widest] = _cut(inner, widest, item, (2, 4, 8, 16), LEAST_FREE_CHUNK)
    _cut_to(inner, MOST_CHUNK // item)
    if leaf.rows is not None and not small:
        across = math.prod(-(-n // c) for n, c in zip(shape[leaf.rows :], inner[leaf.rows :], strict=True))
        _cut_to(inner, _most_elements(item) // across, leaf.rows)
    outer = list(shape) if small else _outer(shape, inner, leaf.dims, item, leaf.rows)
    grid = Grid(shape=leaf.shape, outer=tuple(outer), inner=tuple(inner))
    return grid if leaf.unit is None else grid.within(leaf.unit)


def also_at_rest(grid: Grid, leaf: LeafSpec, rest: Iterable[str]) -> Grid:
    """The same files with chunks that line up with a split at rest too: of dims in `rest`, or of the widest free one.

    For what is read back at once by whoever trains, with weights split at rest or not: chunks may get as small as for
    declared splits.
    """
    free = [d for d, name in enumerate(leaf.dims) if name not in leaf.split and name != STACK]
    wanted = [leaf.dims.index(name) for name in rest] or sorted(free, key=lambda d: leaf.shape[d])[-1:]
    inner = list(grid.inner)
    for d in wanted:
        inner[d] = _cut(inner, d, leaf.dtype.itemsize, (2, 4, 8, 16), LEAST_CHUNK)
    return dc.replace(grid, inner=tuple(inner))


def _cut(inner: list[int], d: int, item: int, degrees: tuple[int, ...], least: int) -> int:
    """Size of dim d cut so that its pieces line up with as many of `degrees` as divide it and `least` allows."""
    ways = 1
    for degree in degrees:
        finer = math.lcm(ways, degree)
        if inner[d] % finer == 0 and math.prod(inner) * item // finer >= least:
            ways = finer
    return inner[d] // ways


def _most_elements(item: int) -> int:
    """Of one file."""
    return min(MOST_OUTER // item, MOST_ELEMENTS)


def _cut_to(inner: list[int], most: int, dims: int | None = None) -> None:
    """Divides the largest of the first `dims` sizes by a small prime, or halves it rounding up, until `most` are left.

    What is counted are all elements; sizes of 1 stay.
    """
    while math.prod(inner) > most and max(inner[:dims], default=1) > 1:
        d = max(range(len(inner[:dims])), key=lambda d: inner[d])
        prime = next((p for p in (2, 3, 5, 7) if inner[d] % p == 0), None)
        inner[d] = inner[d] // prime if prime else -(-inner[d] // 2)


def _outer(
    shape: tuple[int, ...], inner: list[int], dims: tuple[str, ...], item: int, rows: int | None = None
) -> list[int]:
    """Whole inner chunks per file: one layer of a stack, then cut along the leading dims to the size limit."""
    counts = [1 if name == STACK else -(-n // c) for n, c, name in zip(shape, inner, dims, strict=True)]
    chunk, most = math.prod(inner), _most_elements(item)
    for d in range(len(counts[:rows])):
        rest = math.prod(counts) // counts[d] * chunk
        counts[d] = _fewest_files(counts[d], max(1, most // rest))
    return [k * c for k, c in zip(counts, inner, strict=True)]


def _fewest_files(chunks: int, most: int) -> int:
    """The largest divisor of `chunks` up to `most`, or `most` itself where divisors leave over half of it unused."""
    if chunks <= most:
        return chunks
    best = max(k for k in range(1, most + 1) if chunks % k == 0)
    return best if 2 * best > most else most
