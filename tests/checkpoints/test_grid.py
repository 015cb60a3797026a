"""Chunks: whole files cover a leaf once, and line up with every declared degree."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardzoo.checkpoints.grid import MOST_CHUNK, MOST_OUTER, LeafSpec, plan_grid

TP = ("kv", "rep")
BF16 = np.dtype(ml_dtypes.bfloat16)


def leaf(dims, shape, split, dtype=BF16):
    return LeafSpec(dims=tuple(dims.split()), shape=shape, dtype=dtype, split=split)


REAL = [  # leaves of published models, and the degrees that divide their split dim
    (leaf("layer heads head_dim embed", (30, 9, 64, 576), {"heads": TP}), "heads", (1, 3, 9)),
    (leaf("layer kv_heads head_dim embed", (30, 3, 64, 576), {"kv_heads": ("kv",)}), "kv_heads", (1, 3)),
    (leaf("layer mlp embed", (30, 1536, 576), {"mlp": TP}), "mlp", (1, 2, 3, 4, 6, 8, 12, 16)),
    (leaf("layer embed mlp", (30, 576, 1536), {"mlp": TP}), "mlp", (1, 2, 3, 4, 6, 8, 12, 16)),
    (leaf("vocab embed", (49152, 576), {"vocab": TP}), "vocab", (1, 2, 3, 4, 6, 8, 12, 16)),
    (leaf("layer heads head_dim embed", (40, 40, 128, 5120), {"heads": TP}), "heads", (1, 2, 4, 5, 8, 10, 20, 40)),
    (leaf("layer embed heads head_dim", (40, 5120, 40, 128), {"heads": TP}), "heads", (1, 2, 4, 5, 8, 10, 20, 40)),
    (leaf("layer mlp embed", (40, 13824, 5120), {"mlp": TP}), "mlp", (1, 2, 3, 4, 6, 8, 9, 12, 16)),
    (leaf("vocab embed", (151936, 4096), {"vocab": TP}), "vocab", (1, 2, 4, 8, 16)),
]


def read_for(grid, d, start, stop):
    """Elements of dim d in the chunks that a shard from start to stop touches."""
    c = grid.inner[d]
    return (-(-stop // c) - start // c) * c


@pytest.mark.parametrize(("spec", "dim", "degrees"), REAL, ids=lambda v: str(getattr(v, "shape", "")))
def test_any_degree_reads_its_share_alone(spec, dim, degrees):
    grid, d = plan_grid(spec), spec.dims.index(dim)
    for degree in degrees:
        share = spec.shape[d] // degree
        for k in range(degree):
            assert read_for(grid, d, k * share, (k + 1) * share) == share, (degree, k)
    widest = max(
        (i for i, n in enumerate(spec.dims) if n not in spec.split and n != "layer"), key=lambda i: spec.shape[i]
    )
    if spec.nbytes > 100 << 20:  # a weight split at rest over up to four ways more
        for degree in (2, 4):
            assert (spec.shape[widest] // degree) % grid.inner[widest] == 0


@pytest.mark.parametrize(("spec", "dim", "degrees"), REAL, ids=lambda v: str(getattr(v, "shape", "")))
def test_sizes_stay_within_bounds(spec, dim, degrees):
    grid = plan_grid(spec)
    assert math.prod(grid.inner) * 2 <= MOST_CHUNK
    assert math.prod(grid.outer) * 2 <= MOST_OUTER
    assert grid.outer[0] == 1 or spec.dims[0] != "layer"
    overhead = sum(grid.file_bytes(i, 2) for i in grid.indices()) / spec.nbytes
    assert overhead < 1.002


def test_small_leaves_are_one_file():
    grid = plan_grid(leaf("layer embed", (30, 576), {}))
    assert list(grid.indices()) == [(0, 0)]
    assert list(plan_grid(leaf("", (), {})).blocks()) == [()]
    assert list(plan_grid(leaf("embed", (0,), {})).blocks()) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_files_cover_each_element_once(data):
    """Any shape and split; bounds small enough that large leaves are cut in every way."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 8, 12, 97, 500, 1009, 4096]), max_size=3)))
    names = tuple(data.draw(st.permutations(["layer", "heads", "embed"]))[: len(shape)])
    split = {n: TP for n in names if data.draw(st.booleans())}
    spec = LeafSpec(
        dims=names, shape=shape, dtype=np.dtype(data.draw(st.sampled_from(["int8", "float64"]))), split=split
    )
    grid = plan_grid(spec)
    if data.draw(st.booleans()) and shape:
        limit = tuple(n // data.draw(st.sampled_from([k for k in (1, 2, 3, 4) if n % k == 0])) for n in shape)
        grid = grid.within(limit)
        for block in grid.blocks():
            for s, k in zip(block, limit, strict=True):
                assert s.start // k == (s.stop - 1) // k, "a file crosses from one device's shard to another's"
    assert all(o % c == 0 for o, c in zip(grid.outer, grid.inner, strict=True))
    covered = sum(math.prod(s.stop - s.start for s in block) for block in grid.blocks())
    assert covered == math.prod(shape)
    for block in grid.blocks():
        assert grid.is_whole(block)
