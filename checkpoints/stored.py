"""Arrays of leaves as they lie on disk, read with TensorStore, which is imported for the first of them.

Writing does without it, and would hold 25 MiB of it for nothing.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from shardzoo.checkpoints.grid import Block, Grid, LeafSpec
from shardzoo.checkpoints.orbax_layout import zarr_metadata

IN_FLIGHT = max(8, os.cpu_count() or 1)  # reads of files at a time: with more, processes wait for each other's pages


class StoredArray:
    """An array of TensorStore, or ranges of one, of which nothing is read yet.

    Attributes:
        shape, numpy_dtype: of what is read.
    """

    def __init__(self, array: Any):
        self._array = array
        self.shape: tuple[int, ...] = array.shape
        self.numpy_dtype: np.dtype = array.dtype.numpy_dtype

    def cast(self, dtype: np.dtype) -> "StoredArray":
        """The same values in another dtype."""
        import tensorstore as ts

        return self if dtype == self.numpy_dtype else StoredArray(ts.cast(self._array, dtype.name))

    def at(self, ranges: Block) -> "StoredArray":
        """These ranges of it, which keep the indices of the leaf."""
        return StoredArray(self._array[ranges]) if ranges else self

    def cut(self, axis: int, start: int, stop: int) -> "StoredArray":
        """The same with one dim's range cut, in the indices of the leaf."""
        return StoredArray(self._array[(slice(None),) * axis + (slice(start, stop),)])

    def read(self) -> Any:
        """Begins reading all of it; the future's `result` is an array in row-major order."""
        return self._array.read(order="C")

    def begin(self, host: Shaped[np.ndarray, "..."], files: tuple[int, ...]) -> list[Any]:
        """Begins reading it into `host`, of its shape and dtype, file by file (of so many elements in each dim).

        Returns:
            Futures, one for each file.
        """
        import tensorstore as ts

        low, high = self._array.domain.inclusive_min, self._array.domain.exclusive_max
        parts = [
            [slice(max(at, a), min(at + cut, b)) for at in range(a // cut * cut, b, cut)]
            for a, b, cut in zip(low, high, files, strict=True)
        ]
        target = ts.array(host).translate_by[low] if any(low) else ts.array(host)
        return [target[part].write(self._array[part]) for part in itertools.product(*parts)]


class Reader:
    """TensorStore's resources of one reading job: bounded concurrency, no cache.

    Files are read by system calls: mapped, they cost half the CPU time, but the kernel's read-ahead takes 7.8 times the
    bytes of a shard whose chunks lie apart, and a file cut short under the reader ends the process.
    """

    def __init__(self) -> None:
        import tensorstore as ts

        self._context = ts.Context(
            {
                "file_io_concurrency": {"limit": IN_FLIGHT},
                "data_copy_concurrency": {"limit": max(2, os.cpu_count() or 2)},
                "cache_pool": {"total_bytes_limit": 0},
            }
        )

    def open(self, folder: Path, spec: LeafSpec, grid: Grid) -> StoredArray:
        """The array of a leaf, its metadata taken from `spec` and `grid`, not from the file.

        A file that is missing is an error when it is read.
        """
        import tensorstore as ts

        where = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "metadata": zarr_metadata(spec, grid),
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
            "recheck_cached_data": False,
        }
        return StoredArray(ts.open(where, open=True, create=True, assume_metadata=True, context=self._context).result())
