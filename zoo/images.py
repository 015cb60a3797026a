"""Images as bytes and as values, and as the image encoder of CLIP takes them, in the two ways that Wan has them run.

`stretched` is the Wan repositories' way: a frame from -1 to 1 is resized to a square whatever its shape. `cropped` is
that of transformers' CLIPImageProcessor, which diffusers uses: bytes are resized until the shorter side fits, and the
middle is cut out. The two also resize differently: the first as PyTorch interpolates, the second as Pillow resamples.

A resize is a product with one small matrix for the rows and one for the columns, made with numpy.
"""

import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import lax
from jaxtyping import Array, Float, UInt8, jaxtyped

from shardzoo.zoo.mesh import on_host

Host = Array | np.ndarray
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
HALF = 255 / 2
BITS = 22  # of the fraction in Pillow's fixed-point weights


@jaxtyped(typechecker=beartype)
def as_bytes(
    images: Float[Host, "batch channels height width"],
) -> UInt8[np.ndarray, "batch height width channels"]:
    """Images from -1 to 1 as bytes, rounded, in every process; what lies beyond is cut off."""
    scaled = jnp.round(jnp.clip(jnp.asarray(images, jnp.float32) / 2 + 0.5, 0, 1) * 255)
    return on_host(scaled.astype(jnp.uint8)).transpose(0, 2, 3, 1)


@jaxtyped(typechecker=beartype)
def as_values(
    images: UInt8[Host, "batch height width channels"],
) -> Float[np.ndarray, "batch channels height width"]:
    """Bytes as values from -1 to 1."""
    return np.asarray(images).transpose(0, 3, 1, 2).astype(np.float32) / np.float32(HALF) - 1


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Keys' kernel of width 2, in the dtype of x."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def interpolation(size: int, to: int) -> np.ndarray:
    """The weights [to, size] of PyTorch's bicubic interpolation (`align_corners=False`), which smooths nothing.

    Places and weights in float32, as PyTorch has them, with places rounded once (a fused multiply and add); beyond the
    border the outermost pixel goes on.
    """
    place = (float(np.float32(size / to)) * (np.arange(to) + 0.5) - 0.5).astype(np.float32)
    first = np.floor(place)
    share = (place - first).astype(np.float32)
    weights = np.zeros((to, size), np.float32)
    for offset in range(-1, 3):
        column = np.clip(first.astype(np.int64) + offset, 0, size - 1)
        np.add.at(weights, (np.arange(to), column), _cubic(share - np.float32(offset), -0.75))
    return weights


def resampling(size: int, to: int) -> np.ndarray:
    """The weights [to, size] of Pillow's bicubic resampling of bytes: whole numbers, in units of 2^-BITS.

    Shrinking widens the kernel, so that every pixel counts; at the border it is cut off and scaled up.
    """
    scale = size / to
    wide = max(scale, 1.0)
    centre = (np.arange(to)[:, None] + 0.5) * scale
    pixel = np.arange(size)[None]
    inside = (pixel >= (centre - 2 * wide + 0.5).astype(np.int64)) & (
        pixel < (centre + 2 * wide + 0.5).astype(np.int64)
    )
    weights = np.where(inside, _cubic((pixel - centre + 0.5) / wide, -0.5), 0.0)
    weights /= weights.sum(1, keepdims=True)
    return np.trunc(weights * 2**BITS + np.copysign(0.5, weights)).astype(np.int32)


@jaxtyped(typechecker=beartype)
def stretched(
    frames: Float[Host, "batch channels height width"], size: int = 224
) -> Float[Array, "batch channels size size"]:
    """Frames from -1 to 1 as normed squares of `size` pixels, in float32, in the Wan repositories' way."""
    rows, columns = (interpolation(n, size) for n in frames.shape[2:])
    x = jnp.asarray(frames, jnp.float32)
    x = jnp.einsum("bchw,qw->bchq", x, columns, precision=lax.Precision.HIGHEST)
    x = jnp.einsum("bchq,ph->bcpq", x, rows, precision=lax.Precision.HIGHEST)
    return _normed(x * 0.5 + 0.5)


@jaxtyped(typechecker=beartype)
def cropped(
    images: UInt8[Host, "batch height width channels"], size: int = 224
) -> Float[Array, "batch channels size size"]:
    """Bytes as normed squares of `size` pixels, in float32, in the way of transformers' CLIPImageProcessor.

    The bytes between are those of Pillow, bit for bit.
    """
    short = min(images.shape[1:3])
    to = tuple(size if n == short else int(size * n / short) for n in images.shape[1:3])
    top, left = ((n - size) // 2 for n in to)
    return resized(images, *to)[:, :, top : top + size, left : left + size]


@jaxtyped(typechecker=beartype)
def resized(
    images: UInt8[Host, "batch height width channels"], rows: int, columns: int
) -> Float[Array, "batch channels rows columns"]:
    """Bytes as normed images of this size, in float32, in the way of transformers' image processors."""
    height, width = images.shape[1:3]
    x = jnp.asarray(images, jnp.int32).transpose(0, 3, 1, 2)
    x = _bytes(jnp.einsum("bchw,qw->bchq", x, resampling(width, columns)))
    x = _bytes(jnp.einsum("bchq,ph->bcpq", x, resampling(height, rows)))
    return _normed(x.astype(jnp.float32) / 255)


def _bytes(x: Array) -> Array:
    """Sums in units of 2^-BITS, rounded to whole numbers from 0 to 255."""
    return jnp.clip((x + (1 << (BITS - 1))) >> BITS, 0, 255)


def _normed(x: Float[Array, "batch channels height width"]) -> Float[Array, "batch channels height width"]:
    return (x - MEAN[:, None, None]) / STD[:, None, None]
