"""The checksum: numpy and every mesh agree; changes that leave the file formats valid are seen."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from shardzoo.checkpoints import sums
from shardzoo.zoo.mesh import make_mesh

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64"]
DTYPES += ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "int2", "float4_e2m1fn"]
TP = ("kv", "rep")


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def random_bits(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    dtype = dtype_of(dtype) if isinstance(dtype, str) else dtype
    if dtype == np.bool_ or dtype in sums.SUB_BYTE:
        values = rng.integers(0, 2 if dtype == np.bool_ else 1 << sums.SUB_BYTE[dtype], shape, dtype=np.uint8)
        return np.asarray(values).view(dtype)
    raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def whole(a):
    return sums.of_block(a, (0,) * a.ndim, a.shape)


MESHES = [({}, ()), ({"tensor": 8}, (TP,)), ({"context": 2, "tensor": 4}, ("context", TP)),
          ({"tensor": 4}, (None, TP)), ({"data": 2, "tensor": 2}, (None, None, TP))]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_devices_agree_with_numpy(dtype):
    a = random_bits((8, 4, 40), dtype)
    for degrees, spec in MESHES if dtype == "bfloat16" else MESHES[2:3]:
        live = jax.device_put(a, NamedSharding(make_mesh(**degrees), PartitionSpec(*spec)))
        assert sums.of_array(live) == whole(a), (degrees, spec)


@pytest.mark.parametrize(
    "shape", [(), (1,), (0, 4), (5,), (3, 1), (7, 3, 2, 2), (2, 3, 1000), (1, 70000), (65, 8300), (9, 20, 150)]
)
def test_any_shape(shape):
    a = random_bits(shape, "bfloat16")
    assert sums.of_array(jax.numpy.asarray(a)) == whole(a)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_blocks_add_up(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    a = random_bits(shape, data.draw(st.sampled_from(["float32", "bfloat16", "int8", "float64"])))
    cuts = [sorted({0, n, data.draw(st.integers(0, n))}) for n in shape]
    total = (0, 0)
    for index in np.ndindex(*[len(c) - 1 for c in cuts]):
        box = tuple(slice(c[i], c[i + 1]) for c, i in zip(cuts, index, strict=True))
        total = sums.add(total, sums.of_block(a[box], tuple(s.start for s in box), shape))
    assert total == whole(a)


def test_large_blocks_are_summed_in_pieces():
    a = random_bits((3, 700, 1000), "float16")
    by_rows = [sums.of_block(a[i : i + 1], (i, 0, 0), a.shape) for i in range(3)]
    assert sums.add(sums.add(*by_rows[:2]), by_rows[2]) == whole(a)
    assert whole(a) == sums.of_block(np.asfortranarray(a), (0, 0, 0), a.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float64"])
def test_every_single_bit_changes_it(dtype):
    a = random_bits((3, 5), dtype)
    before = whole(a)
    for bit in range(a.nbytes * 8):
        b = a.copy()
        b.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        changed = whole(b)
        assert changed[0] != before[0] and changed[1] != before[1], bit


def test_values_in_the_wrong_place_change_it():
    a = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    variants = {
        "transposed": a.T,
        "rows swapped": a[[1, 0, *range(2, 64)]],
        "columns swapped": a[:, [1, 0, *range(2, 64)]],
        "halves swapped": np.roll(a, 32, 0),
        "reversed": a[::-1, ::-1],
        "all signs flipped": -a,
        "two signs flipped": a * np.where(np.arange(64) < 2, -1, 1).astype(np.float32),
    }
    for name, b in variants.items():
        assert whole(np.ascontiguousarray(b)) != whole(a), name
