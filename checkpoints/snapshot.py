"""A copy of a live leaf on the host, of what this process will write of it, so that training goes on meanwhile."""

import dataclasses as dc
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jaxtyping import Array, Shaped

from shardzoo.checkpoints import pages
from shardzoo.checkpoints.grid import Block, Grid
from shardzoo.checkpoints.save import gather, overlap, owned, ranges
from shardzoo.zoo.layout import HOST

Region = tuple[tuple[int, int], ...]


@dc.dataclass(frozen=True)
class Snapshot:
    """The shards of a leaf that are this process's to write, each once.

    Attributes:
        shards: region -> its values: in this process's memory, or in that of the devices' host on their way there.
        mine: the regions whose blocks this process writes.
    """

    shards: Mapping[Region, Shaped[np.ndarray, "..."] | Array]
    mine: tuple[Block, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self.shards.values())

    def blocks(self, grid: Grid) -> list[tuple[Block, Callable[[], Shaped[np.ndarray, "..."]]]]:
        """The files that this process writes, each with what gives its values."""
        blocks = list(grid.blocks())
        if jax.process_count() > 1:
            blocks = [at for at in blocks if any(overlap(at, region) for region in self.mine)]
        return [(at, functools.partial(gather, self.shards, self.dtype, at)) for at in blocks]


def take(leaf: Array) -> Snapshot:
    """Copies what this process writes of a leaf: all of it if it is alone, else the shards that it owns.

    The copy of device memory is under way when this returns: the runtime keeps a buffer that is donated meanwhile.
    """
    mine = tuple(owned(leaf))
    wanted = {ranges(at, leaf.shape) for at in mine}
    shards = {ranges(s.index, leaf.shape): s.data for s in leaf.addressable_shards}
    kept = {r: _copy(data) for r, data in shards.items() if r in wanted or jax.process_count() == 1}
    return Snapshot(kept, mine, np.dtype(leaf.dtype))


def _copy(data: Array) -> Shaped[np.ndarray, "..."] | Array:
    if next(iter(data.devices())).platform == "cpu" or data.sharding.memory_kind == HOST:
        return pages.copy(np.asarray(data))
    return jax.device_put(data, data.sharding.with_memory_kind(HOST))
