"""Videos as sequences of tokens: patches, their rotary positions in time, height and width, and timestep features.

Tokens run over frames, then rows, then columns of patches. Functions here hold no parameters and no collectives.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from shardzoo.errors import fail_if
from shardzoo.zoo.layers import contract
from shardzoo.zoo.rope import Rotary

Sizes = tuple[int, int, int]  # of something in time, height and width
AXES = ("frames", "height", "width")


def grid_of(latents: tuple[int, ...], patch: Sizes, title: str) -> Sizes:
    """How many patches a video of shape [batch, channels, frames, height, width] has along each axis.

    Raises:
        InputError: a size that the patch does not divide.
    """
    found = list(zip(AXES, latents[2:], patch, strict=True))
    fail_if(
        [f"{name}={size} does not divide by the patch's {p}: crop or pad it" for name, size, p in found if size % p],
        title,
    )
    return tuple(size // p for _, size, p in found)


def patches(
    video: Float[Array, "batch channels frames height width"], patch: Sizes
) -> Float[Array, "batch seq channels patch_frames patch_height patch_width"]:
    """The video cut into patches."""
    batch, channels, *sizes = video.shape
    split = [n for size, p in zip(sizes, patch, strict=True) for n in (size // p, p)]
    x = video.reshape(batch, channels, *split).transpose(0, 2, 4, 6, 1, 3, 5, 7)
    return x.reshape(batch, -1, channels, *patch)


def join_patches(
    tokens: Float[Array, "batch seq patch_channels"], grid: Sizes, patch: Sizes
) -> Float[Array, "batch channels frames height width"]:
    """The video of this grid of patches: the inverse of `patches`, but for the channels, which are innermost here."""
    x = tokens.reshape(tokens.shape[0], *grid, *patch, -1).transpose(0, 7, 1, 4, 2, 5, 3, 6)
    return x.reshape(*x.shape[:2], *(n * p for n, p in zip(grid, patch, strict=True)))


def grid_rotary(head_dim: int, grid: Sizes, tokens: Int[Array, " seq"], theta: float = 1e4) -> Rotary:
    """Rotary tables of these tokens of a grid, for `rotate_pairs`; angles in float64, tables in float32.

    The pairs of a head are shared out among time, height and width: height and width get 2 * (head_dim // 6) of its
    dims each, time the rest. A table is laid out like a head: cosines twice each, sines with the sign that their
    place in the pair asks for.
    """
    _, rows, columns = grid
    side = 2 * (head_dim // 6)
    places = (tokens // (rows * columns), tokens // columns % rows, tokens % columns)
    cos, sin = [], []
    for dims, count, place in zip((head_dim - 2 * side, side, side), grid, places, strict=True):
        angles = np.arange(count)[:, None] * theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
        cos.append(jnp.take(np.repeat(np.cos(angles), 2, -1).astype(np.float32), place, axis=0, mode="clip"))
        signed = np.stack([-np.sin(angles), np.sin(angles)], axis=-1).reshape(count, dims)
        sin.append(jnp.take(signed.astype(np.float32), place, axis=0, mode="clip"))
    return jnp.concatenate(cos, axis=-1)[None], jnp.concatenate(sin, axis=-1)[None]


def rotate_pairs(x: Float[Array, "batch seq heads head_dim"], turn: Rotary) -> Float[Array, "batch seq heads head_dim"]:
    """x with each pair (2i, 2i + 1) turned by its position's angle; float32 inside.

    Each number gets its partner by an exact product with a permutation: a TPU makes it in place, where shifts along the
    head, or a dim of 2, cost it several copies in float32.
    """
    cos, sin = (table[:, :, None] for table in turn)
    swap = np.eye(x.shape[-1], dtype=np.float32)[np.arange(x.shape[-1]) ^ 1]
    with jax.default_matmul_precision("highest"):
        partner = contract(x, jnp.asarray(swap, x.dtype))
    return (x.astype(jnp.float32) * cos + partner.astype(jnp.float32) * sin).astype(x.dtype)


def sinusoid(
    timesteps: Num[Array, "*lead"], size: int, period: float = 1e4, scale: float = 1.0
) -> Float[Array, "*lead size"]:
    """Cosines, then sines, of each timestep at size / 2 frequencies from 1 down to 1 / period; float32.

    `scale` multiplies the angles.
    """
    half = size // 2
    exponents = np.float32(-math.log(period)) * np.arange(half, dtype=np.float32) / np.float32(half)
    # Rounded once, as PyTorch's are but for two of 128; numpy's own float32 is a bit off at 55.
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = timesteps.astype(jnp.float32)[..., None] * frequencies * scale
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
