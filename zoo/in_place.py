"""Reading part of a large array where it lies: a block of stacked weights, rows of a table, a layer of a cache.

XLA for CPUs has no 16-bit floating-point moves: it widens the whole operand of a slice, gather or update to float32
first, and hoists that out of the loop, so that a bfloat16 model takes three times its memory and runs slower than a
float32 one. The same bits as integers move as they are. (SmolLM2-135M in bfloat16, one token: 45 ms so, 245 ms with
plain slices.) Elsewhere these are ordinary slices. On a CPU no gradient flows through them: `decoder.forward` reads its
weights so only when asked to (`in_place=True`), the decode loop always.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from shardzoo.zoo.mesh import traced_platform

Tree = TypeVar("Tree")


def _as_bits(dtype: jnp.dtype) -> bool:
    return traced_platform() == "cpu" and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def to_storage(x: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """x as arrays that are updated inside a loop are kept: 16-bit floats as integers on a CPU, else unchanged."""
    return lax.bitcast_convert_type(x, jnp.uint16) if _as_bits(x.dtype) else x


def from_storage(x: Num[Array, "*shape"], dtype: jnp.dtype) -> Num[Array, "*shape"]:
    """What `to_storage` was given, of this dtype."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def block_at(stacked: Tree, layer: Int[Array, ""]) -> Tree:
    """Element `layer` of the leading dim of each leaf."""
    return jax.tree.map(lambda leaf: _pick(leaf, layer, lambda x, i: lax.dynamic_index_in_dim(x, i, 0, False)), stacked)


def rows_at(table: Float[Array, "rows width"], index: Int[Array, "*shape"]) -> Float[Array, "*shape width"]:
    """Rows of a table; every index must be in range."""
    return _pick(table, index, lambda x, i: x.at[i].get(mode="promise_in_bounds"))


def _pick(x: Array, index: Array, take) -> Array:
    if not _as_bits(x.dtype):
        return take(x, index)
    # The barrier ties the array to the index: without it the conversion to integers moves out of the loop and becomes
    # a copy of the whole array, with it the conversion is part of the slice.
    x, index = lax.optimization_barrier((x, index))
    return lax.bitcast_convert_type(take(lax.bitcast_convert_type(x, jnp.uint16), index), x.dtype)
