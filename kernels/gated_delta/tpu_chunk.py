"""The mathematics of one chunk inside the TPU kernels of the gated delta rule; formulas as in `chunked`.

Matrices of tokens with tokens are (CHUNK, CHUNK), whole tiles of the matrix unit. Betas scale columns, never rows: with
L = M diag(beta) in place of diag(beta) M a chunk adds x = diag(beta) (I + L)^-1 (v - p (k . S)), so that betas stay
what they arrive as, rows of lanes, which broadcast for free.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

CHUNK = 128  # tokens
LANES = 128
_SUBLANES = 8


def product(a: Array, b: Array, contract_a: int = 1, contract_b: int = 0, *, low: bool) -> Float[Array, "m n"]:
    """The matrix product over one dimension of each, of operands rounded to bfloat16 (`low`) or with all their bits."""
    dims = (((contract_a,), (contract_b,)), ((), ()))
    precision = lax.Precision.DEFAULT if low else lax.Precision.HIGHEST
    if low:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def places() -> tuple[Array, Array]:
    """The row and the column of each element of a matrix of tokens with tokens."""
    shape = (CHUNK, CHUNK)
    return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)


def column(row: Float[Array, "1 chunk"]) -> Float[Array, "chunk lanes"]:
    """Lanes as a column that stands in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def widened(x: Float[Array, "rows lanes"], width: int) -> Float[Array, "rows width"]:
    """A column that stands in every lane, for arrays of `width` lanes."""
    return x if width == x.shape[1] else jnp.concatenate([x] * (width // x.shape[1]), axis=1)


def running_sums(x: Float[Array, "chunk lanes"]) -> Float[Array, "chunk lanes"]:
    """Sums over the rows up to each row."""
    rows = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    step = 1
    while step < x.shape[0]:
        if step < _SUBLANES:
            x = x + jnp.where(rows >= step, pltpu.roll(x, step, 0), 0.0)
        else:
            x = jnp.concatenate([x[:step], x[step:] + x[:-step]], axis=0)
        step *= 2
    return x


class Decays(NamedTuple):
    """d_ij from after token j to token i, 0 for j > i; and p_i from before the chunk to token i, in every lane."""

    between: Float[Array, "chunk chunk"]
    since: Float[Array, "chunk lanes"]


def decays(log_decay: Float[Array, "1 chunk"]) -> Decays:
    """Each is the exponential of a sum of its own: none is the difference of two others (see `chunked`)."""
    row, col = places()
    sums = running_sums(jnp.where(row > col, column(log_decay), 0.0))
    since = jnp.broadcast_to(sums[:, :1] + log_decay[:, :1], (CHUNK, LANES))
    return Decays(jnp.exp(jnp.where(row >= col, sums, -jnp.inf)), jnp.exp(since))


def inverses(lowers: Sequence[Float[Array, "chunk chunk"]], *, low: bool) -> list[Float[Array, "chunk chunk"]]:
    """(I + L)^-1 of each strictly lower triangular L: block doubling, as `inverse` does it.

    From blocks of 8 rows on only the lower of two blocks is computed. All matrices take a step before any takes the
    next, so that the matrix unit has work while it waits for one of them. With `low` the doubling rounds operands to
    bfloat16, and what is left of I - (I + L) T, with L to 16 bits, corrects the result T once.
    """
    row, col = places()
    apart = row ^ col  # for i > j in [b, 2b) where a block of size 2b holds the pair and blocks of size b do not
    found = [jnp.where(row == col, 1.0, jnp.where(apart == 1, -x, 0.0)) for x in lowers]
    block = 2
    while block < CHUNK:
        rows = _Rows(block)
        joins = rows.lower((apart >= block) & (apart < 2 * block))
        between = [jnp.where(joins, rows.lower(x), 0.0) for x in lowers]
        below = [rows.spread(product(x, t, low=low)) for x, t in zip(between, found, strict=True)]
        below = [product(rows.lower(t), x, low=low) for t, x in zip(found, below, strict=True)]
        found = [rows.less(t, x) for t, x in zip(found, below, strict=True)]
        block *= 2
    return [_corrected(t, x) for t, x in zip(found, lowers, strict=True)] if low else found


def _corrected(inverse: Float[Array, "chunk chunk"], lower: Float[Array, "chunk chunk"]) -> Array:
    row, col = places()
    high = lower.astype(jnp.bfloat16)
    halves = jnp.concatenate([high, (lower - high.astype(jnp.float32)).astype(jnp.bfloat16)], axis=0)
    rounded = inverse.astype(jnp.bfloat16)
    applied = product(halves, rounded, low=True)
    whole = rounded.astype(jnp.float32)
    left = jnp.where(row == col, 1.0, 0.0) - whole - applied[:CHUNK] - applied[CHUNK:]
    return whole + product(rounded, left, low=True)


class _Rows:
    """The rows of the lower one of every two blocks, where blocks are whole registers; else all rows."""

    def __init__(self, block: int):
        self.block, self.all = block, block < _SUBLANES

    def _pieces(self, x: Array) -> list[Array]:
        return [x[n : n + self.block] for n in range(0, x.shape[0], self.block)]

    def lower(self, x: Array) -> Array:
        return x if self.all else jnp.concatenate(self._pieces(x)[1::2], axis=0)

    def spread(self, x: Array) -> Array:
        """The rows at their places, zeros between them."""
        if self.all:
            return x
        pieces = [p for piece in self._pieces(x) for p in (jnp.zeros_like(piece), piece)]
        return jnp.concatenate(pieces, axis=0)

    def less(self, x: Array, change: Array) -> Array:
        """x with the change subtracted from these rows."""
        if self.all:
            return x - change
        pieces = self._pieces(x)
        pieces[1::2] = [a - b for a, b in zip(pieces[1::2], self._pieces(change), strict=True)]
        return jnp.concatenate(pieces, axis=0)
