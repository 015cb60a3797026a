"""Videos as sequences of tokens: patches, their rotary positions in time, height and width, and timestep features.

Tokens run over frames, then rows, then columns of patches. Functions here hold no parameters and no collectives.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num

from shardzoo.errors import fail_if
from shardzoo.zoo.layers import contract
from shardzoo.zoo.mesh import traced_platform
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
) -> Float[Array, "batch seq patch_channels"]:
    """The video cut into patches, each one's numbers in one dim: channels, then its frames, rows and columns.

    In one dim, as a TPU pads small trailing dims to whole tiles; frame by frame, in a loop, as its compiler writes out
    a change of order for all that it moves.
    """
    batch, channels, *sizes = video.shape
    frames, rows, columns = (size // p for size, p in zip(sizes, patch, strict=True))

    def of_frame(x: Float[Array, "batch channels patch_frames height width"]) -> Float[Array, "batch part features"]:
        x = x.reshape(batch, channels, patch[0], rows, patch[1], columns, patch[2]).transpose(0, 3, 5, 1, 2, 4, 6)
        return x.reshape(batch, rows * columns, -1)

    each = video.reshape(batch, channels, frames, patch[0], *sizes[1:])
    return lax.map(of_frame, jnp.moveaxis(each, 2, 0)).swapaxes(0, 1).reshape(batch, frames * rows * columns, -1)


def join_patches(
    tokens: Float[Array, "batch padded_seq patch_channels"], grid: Sizes, patch: Sizes
) -> Float[Array, "batch channels frames height width"]:
    """The video of this grid of patches: the inverse of `patches`, but for the channels, which are innermost here.

    Tokens beyond the grid are padding.
    """
    frames, rows, columns = grid
    batch = tokens.shape[0]

    def of_frame(frame: Int[Array, ""]) -> Float[Array, "batch channels patch_frames height width"]:
        x = lax.dynamic_slice_in_dim(tokens, frame * rows * columns, rows * columns, axis=1)
        x = x.reshape(batch, rows, columns, *patch, -1).transpose(0, 6, 3, 1, 4, 2, 5)
        return x.reshape(*x.shape[:3], rows * patch[1], columns * patch[2])

    video = jnp.moveaxis(lax.map(of_frame, jnp.arange(frames)), 0, 2)
    return video.reshape(*video.shape[:2], frames * patch[0], *video.shape[4:])


def grid_rotary(head_dim: int, grid: Sizes, tokens: Int[Array, " seq"], theta: float = 1e4) -> Rotary:
    """Rotary tables of these tokens of a grid, for `rotate_pairs`; angles in float64, tables in float32.

    The pairs of a head are shared out among time, height and width: height and width get 2 * (head_dim // 6) of its
    dims each, time the rest. A table is laid out like a head: cosines twice each, sines with the sign that their
    place in the pair asks for.
    """
    _, rows, columns = grid
    side = 2 * (head_dim // 6)
    frame, place = lax.div(tokens, rows * columns), lax.rem(tokens, rows * columns)
    cos = sin = jnp.float32(0)
    first = 0
    for dims, count, at in zip(
        (head_dim - 2 * side, side, side), grid, (frame, lax.div(place, columns), lax.rem(place, columns)), strict=True
    ):
        angles = np.arange(count)[:, None] * theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
        signed = np.stack([-np.sin(angles), np.sin(angles)], axis=-1).reshape(count, dims)
        around = (0, 0), (first, head_dim - first - dims)
        for_cos, for_sin = (np.pad(x.astype(np.float32), around) for x in (np.repeat(np.cos(angles), 2, -1), signed))
        cos += jnp.take(for_cos, at, axis=0, mode="clip")
        sin += jnp.take(for_sin, at, axis=0, mode="clip")
        first += dims
    return cos[None], sin[None]


def rotate_pairs(x: Float[Array, "batch seq heads head_dim"], turn: Rotary) -> Float[Array, "batch seq heads head_dim"]:
    """x with each pair (2i, 2i + 1) turned by its position's angle; float32 inside.

    Each number gets its partner by an exact product with a permutation: a TPU makes it in place, where shifts along the
    head, or a dim of 2, cost it several copies in float32. A CPU reads the pairs backwards, in the step that turns
    them: a fifth of the product's time.
    """
    cos, sin = (table[:, :, None] for table in turn)
    if traced_platform() == "cpu":
        partner = lax.rev(x.reshape(*x.shape[:-1], -1, 2), (x.ndim,)).reshape(x.shape)
    else:
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
