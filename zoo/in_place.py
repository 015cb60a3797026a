"""Reading part of a large array where it lies: a block of stacked weights, rows of a table, a layer of a cache.

XLA for CPUs has no 16-bit floating-point moves: it widens the whole operand of a slice, gather or update to float32
first, and hoists that out of the loop, so that a bfloat16 model takes three times its memory and runs slower than a
float32 one. The same bits as integers move as they are. (SmolLM2-135M in bfloat16, one token: 45 ms so, 245 ms with
plain slices.) Elsewhere these are ordinary slices. On a CPU no gradient flows through them: `decoder.forward` reads its
weights so only when asked to (`in_place=True`), the decode loop always.
"""

import math
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num, Shaped

from shardzoo.kernels.flash_attention.options import accumulator
from shardzoo.zoo.mesh import traced_platform

Tree = TypeVar("Tree")

FEW = 8  # rows up to which a product by a weight costs less than reading it
BLOCK = 2 << 20  # bytes of a weight that stay in a core's cache between being read and being multiplied by
_FEWER = 4  # rows up to which a weight is multiplied without being written out
_PARTS = 16  # of a row of a weight that are multiplied side by side


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


class Stacked(eqx.Module):
    """A layer's weight among those of all layers, not read yet: `layers.contract` takes it where it lies.

    A loop over layers on a CPU writes each layer's weights out before it multiplies by them, which for few rows takes
    longer than the product.
    """

    stack: Shaped[Array, "layer out *rest"]
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype

    def __getitem__(self, outputs: slice) -> Shaped[Array, "*out_in"]:
        return self.read()[outputs]

    def read(self) -> Shaped[Array, "*out_in"]:
        return block_at(self.stack, self.layer)

    def product(self, rows: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """rows . weight over all inputs, for few rows; in float32 at least."""
        count, width = rows.shape
        outputs = math.prod(self.shape) // width
        stack = self.stack.reshape(-1, outputs, width)
        # XLA for CPUs works out what an 8-bit float stands for step by step, and would for each row anew.
        octets = self.dtype.itemsize == 1 and jnp.issubdtype(self.dtype, jnp.floating)
        if count <= (1 if octets else _FEWER) and width % _PARTS == 0:
            return self._by_rows(stack, rows.astype(accumulator(rows.dtype)))
        blocks = max(1, outputs * width * self.dtype.itemsize // BLOCK)
        size = outputs // next(n for n in range(blocks, outputs + 1) if outputs % n == 0)

        def block(first: Int[Array, ""]) -> Float[Array, "block rows"]:
            return weight_first(self._cut(stack, (first, 0), (size, width)).astype(rows.dtype), rows)

        if size == outputs:
            return block(jnp.zeros((), jnp.int32)).T
        return lax.map(block, jnp.arange(0, outputs, size, dtype=jnp.int32)).reshape(outputs, count).T

    def _by_rows(self, stack: Shaped[Array, "layer out in"], rows: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Sums over parts of the rows side by side, then over what is left: loops that are vectors, and read in place.

        A product of two matrices would have the weight written out, and one of 16-bit floats by a row widened as well.
        """
        (count, width), outputs = rows.shape, stack.shape[1]
        size = width // _PARTS
        total = sum(
            self._cut(stack, (0, first), (outputs, size)).astype(rows.dtype)[:, None] * rows[:, first : first + size]
            for first in range(0, width, size)
        )
        sums = weight_first(total.reshape(outputs * count, size), jnp.ones((2, size), rows.dtype))
        return sums[:, 0].reshape(outputs, count).T

    def _cut(
        self, stack: Shaped[Array, "layer out in"], first: tuple[Array | int, int], sizes: tuple[int, int]
    ) -> Shaped[Array, "some_out some_in"]:
        at = [jnp.asarray(i, jnp.int32) for i in (self.layer, *first)]
        return _pick(stack, at, lambda x, at: lax.dynamic_slice(x, at, (1, *sizes))[0])


def weight_first(weight: Float[Array, "out in"], rows: Float[Array, "rows in"]) -> Float[Array, "out rows"]:
    """weight . rows, transposed; in float32 at least. XLA for CPUs copies the operand on the right of a product."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(weight, rows, dims, preferred_element_type=accumulator(rows.dtype))


def rows_at(table: Float[Array, "rows width"], index: Int[Array, "*shape"]) -> Float[Array, "*shape width"]:
    """Rows of a table; every index must be in range."""
    return _pick(table, index, lambda x, i: x.at[i].get(mode="promise_in_bounds"))


def _pick(x: Array, index: Array | list[Array], take) -> Array:
    if not _as_bits(x.dtype):
        return take(x, index)
    # The barrier ties the array to the index: without it the conversion to integers moves out of the loop and becomes
    # a copy of the whole array, with it the conversion is part of the slice.
    x, index = lax.optimization_barrier((x, index))
    return lax.bitcast_convert_type(take(lax.bitcast_convert_type(x, jnp.uint16), index), x.dtype)
