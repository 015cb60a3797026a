"""The inverse of I + L for strictly lower triangular L, by matrix products alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import varying_like

_BASE = 16  # products of smaller blocks leave a matrix unit idle: up to here whole tiles are multiplied


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def unit_lower_inverse(lower: Float[Array, "*lead size size"]) -> Float[Array, "*lead size size"]:
    """(I + L)^-1 for the part of `lower` below the diagonal; the rest of it is not read. size: a power of 2.

    Block doubling: of two neighbouring blocks that are inverted, the block below the first and beside the second is
    -T2 L21 T1. No power of L is formed: those grow with the binomials before they cancel, where the inverse stays
    small.
    """
    size = lower.shape[-1]
    base = min(size, _BASE)
    tiles = _diagonal(lower, base)
    inverse = _within_tiles(tiles)
    while base < size:
        pairs = _diagonal(lower, 2 * base)[..., base:, :base]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -_product(_product(second, pairs), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)
        base *= 2
    return inverse[..., 0, :, :]


def _diagonal(x: Float[Array, "*lead size size"], block: int) -> Float[Array, "*lead blocks block block"]:
    """The blocks on the diagonal."""
    size = x.shape[-1]
    return jnp.stack([x[..., i : i + block, i : i + block] for i in range(0, size, block)], axis=-3)


def _within_tiles(tiles: Float[Array, "*lead tile tile"]) -> Float[Array, "*lead tile tile"]:
    """The inverses of small tiles: the same doubling, with every block's product done as one of whole tiles."""
    size = tiles.shape[-1]
    place = np.arange(size)
    inverse = jnp.eye(size, dtype=tiles.dtype).reshape(*[1] * (tiles.ndim - 2), size, size)
    block = 1
    while block < size:
        pair, half = place // (2 * block), place // block % 2
        joins = (pair[:, None] == pair) & (half[:, None] == 1) & (half == 0)
        between = jnp.where(joins, tiles, 0)
        # The inverse of blocks of size 1 is the identity.
        inverse = inverse - (between if block == 1 else _product(_product(inverse, between), inverse))
        block *= 2
    return varying_like(jnp.broadcast_to(inverse, tiles.shape), tiles)


def _forward(lower: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _backward(inverse: Array, change: Array) -> tuple[Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_product(_product(turned, change), turned), -1),)


unit_lower_inverse.defvjp(_forward, _backward)
