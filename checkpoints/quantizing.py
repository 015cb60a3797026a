"""Weights quantized as they are read: values and scales made out of the full-precision leaf on disk, in blocks.

A channel's scale is that of all its inputs, so of a weight that is split on its inputs every process reads whole rows
once; scales that are known are not worked out again.
"""

import collections
import concurrent.futures
import dataclasses as dc
import itertools
import math
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints import pages
from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.forms import quantized_leaves
from shardzoo.checkpoints.grid import Block
from shardzoo.checkpoints.manifest import Leaf
from shardzoo.checkpoints.stored import Reader, Reading, StoredArray
from shardzoo.zoo import quantize
from shardzoo.zoo.layout import Param

MOST = 16 << 20  # bytes of full-precision rows worked on at a time


class QuantizedWeight:
    """One leaf on disk that becomes values and scales; any number of threads may read parts of either.

    Args:
        ckpt, path: the leaf as it is stored.
        kind: what to quantize to.
        outputs: how many of its first dims are outputs.
        dtype: of the scales.
        pool: where it works.
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        path: str,
        kind: str,
        outputs: int,
        dtype: np.dtype,
        pool: concurrent.futures.Executor,
    ):
        self.leaf: Leaf = ckpt.leaf(path)
        self._ckpt, self._path, self._kind, self._outputs, self._dtype = ckpt, path, kind, outputs, dtype
        shape = self.leaf.spec.shape[:outputs]
        self._scale, self._known = np.zeros(shape, dtype), np.zeros(shape, bool)
        self._lock = threading.Lock()  # of the locks
        self._locks: dict[tuple[int, ...], threading.Lock] = collections.defaultdict(threading.Lock)
        self.pool = pool
        self._array: StoredArray | None = None

    def open(self, reader: Reader) -> None:
        """Opens the leaf's array; nothing is read yet."""
        if self._array is None:
            self._array = reader.open(self._ckpt.path / self.leaf.folder, self.leaf.spec, self.leaf.grid)

    def values(self, at: Block, into: Shaped[np.ndarray, "..."]) -> None:
        """Writes the values in these ranges."""
        columns: Any = (..., *at[self._outputs :])
        for rows in self._blocks(at[: self._outputs]):
            wanted = (*rows, *at[self._outputs :])
            place = tuple(slice(r.start - s.start, r.stop - s.start) for r, s in zip(wanted, at, strict=True))
            made = self._make_scales(rows)
            pages.populate(into[place])
            into[place] = (
                quantize.at_scale(self._read(wanted), self._scale[rows], self._kind) if made is None else made[columns]
            )

    def scales(self, at: Block, into: Shaped[np.ndarray, "..."]) -> None:
        """Writes the scales in these ranges."""
        for rows in self._blocks(at):
            self._make_scales(rows)
        into[...] = self._scale[at]

    def _make_scales(self, rows: Block) -> Shaped[np.ndarray, "..."] | None:
        """Works out the scales of these outputs, and with them all their values; None if they are known.

        Blocks that overlap, as several cuts of a leaf may, come to the same scales.
        """
        with self._lock:
            own = self._locks[tuple(part.start for part in rows)]
        with own:
            return None if self._known[rows].all() else self._quantize(rows)

    def _quantize(self, rows: Block) -> Shaped[np.ndarray, "..."]:
        inputs = self.leaf.spec.shape[self._outputs :]
        whole = self._read((*rows, *(slice(0, size) for size in inputs)))
        values, self._scale[rows] = quantize.quantize(whole, len(inputs), self._kind, self._dtype, self._path)
        self._known[rows] = True
        return values

    def _read(self, at: Block) -> Shaped[np.ndarray, "..."]:
        assert self._array is not None  # `open` comes first
        return self._array.at(at).read().result()

    def _blocks(self, rows: Block) -> Iterator[Block]:
        """The ranges of outputs cut into blocks of few enough bytes, along the leading dims first."""
        width = math.prod(self.leaf.spec.shape[self._outputs :]) * self.leaf.spec.dtype.itemsize
        cuts: list[list[slice]] = []
        for dim, part in enumerate(rows):
            each = width * math.prod(s.stop - s.start for s in rows[dim + 1 :])
            step = max(1, MOST // max(each, 1))
            cuts.append([slice(a, min(a + step, part.stop)) for a in range(part.start, part.stop, step)])
        yield from itertools.product(*cuts)


@dc.dataclass(frozen=True)
class Made:
    """Values or scales in some ranges, to be made: what `restore` has of them in place of a `StoredArray`."""

    weight: QuantizedWeight
    part: Literal["values", "scales"]
    at: Block
    numpy_dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.at)

    def cut(self, axis: int, start: int, stop: int) -> "Made":
        """The same with one dim's range cut."""
        return dc.replace(self, at=(*self.at[:axis], slice(start, stop), *self.at[axis + 1 :]))

    def begin(self, host: Shaped[np.ndarray, "..."]) -> Reading:
        """Begins writing them to `host`."""
        return Reading(host, [self.weight.pool.submit(getattr(self.weight, self.part), self.at, host)])


def finish(made: Mapping[str, tuple[QuantizedWeight, Any]]) -> None:
    """Ends the work on these weights; what has not begun is dropped."""
    for weight, _ in made.values():
        weight.pool.shutdown(cancel_futures=True)


def weights_to_quantize(ckpt: Checkpoint, params: Mapping[str, Param]) -> dict[str, tuple[QuantizedWeight, Any]]:
    """Path of each declared leaf that is made of a stored one -> that weight, and which part of it the leaf is."""
    pool = concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1), "quantize")
    found: dict[str, tuple[QuantizedWeight, Any]] = {}
    for root, (values, scale) in quantized_leaves(params).items():
        if values not in ckpt.manifest.leaves and root in ckpt.manifest.leaves:
            kind, of = quantize.KINDS[params[values].dtype], params[scale]
            weight = QuantizedWeight(ckpt, root, kind, of.ndim, of.dtype, pool)
            found |= {values: (weight, "values"), scale: (weight, "scales")}
    return found
