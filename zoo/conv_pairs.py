"""Convolutions on CPUs by pairs of outputs, which take fewer multiplications than there are taps.

Two neighbouring outputs of a window of three, g.(a, b, c) and g.(b, c, d), are sums of four products of sums of inputs
and taps in place of six products of inputs and taps (S. Winograd, Arithmetic Complexity of Computations, 1980):

    m = g0 (a - c), (g0 + g1 + g2)/2 (b + c), (g0 - g1 + g2)/2 (c - b), g2 (b - d)
    y = m0 + m1 + m2, m1 - m2 - m3

The taps may be windows in the dims that are left, as they are here. Frames taken so leave two thirds of the
multiplications, frames and columns four ninths; rows stay as they are, split over devices. Of 32-bit floats the error
stays that of a convolution (1e-6 of the largest output); 16-bit ones would lose digits in the sums.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

TAPS = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])  # of each product
FEW, MANY = 32, 128  # channels from which on pairs of frames, and of columns too, are faster (measured)
PIXELS = 256  # from which on mixing taps for pairs of columns costs less than it saves


def pay(x: Float[Array, "..."], weight: Float[Array, "out channels *window"]) -> bool:
    """Whether `convolve_in_pairs` is faster and loses no digits."""
    return x.dtype.itemsize >= 4 and min(weight.shape[:2]) >= FEW


def convolve_in_pairs(
    seen: Float[Array, "batch seen rows width channels"],
    weight: Float[Array, "out channels window_frames window_rows window_columns"],
    borders: Sequence[tuple[int, int]],
) -> Float[Array, "batch frames out_rows out_width out"]:
    """The convolution with stride 1, without zeros in time and with `borders` of zeros in space.

    Frames are taken in pairs where a window of three gives an even number of them; columns in pairs where pixels and
    channels are many.
    """
    out, channels, window, _, columns = weight.shape
    by_frame = window == 3 and seen.shape[1] % 2 == 0
    pixels = seen.size // (seen.shape[1] * channels)
    by_column = columns == 3 and min(out, channels) >= MANY and pixels >= PIXELS
    kernels = _mixed(weight.astype(seen.dtype), by_frame, by_column)
    if not by_frame:  # a window's frames as channels
        frames = seen.shape[1] - window + 1
        seen = jnp.concatenate([seen[:, k : k + frames] for k in range(window)], axis=-1)
        kernels = jnp.moveaxis(kernels, 0, 2).reshape(1, *kernels.shape[1:3], -1, out)
    planes = [jnp.split(k, len(TAPS), axis=1) if by_column else [k] for k in kernels]
    planes = lax.optimization_barrier(planes)  # as in `conv.convolve`: made once, before a scan
    across = _columns_in_pairs if by_column else _columns
    if by_frame:
        return _in_pairs(seen, 1, lambda part, i: across(part, planes[i], borders))
    return across(seen, planes[0], borders)


def _mixed(
    weight: Float[Array, "out channels window_frames window_rows window_columns"], by_frame: bool, by_column: bool
) -> Float[Array, "frames window_rows columns channels out"]:
    """What each product takes of the weight, window first and output channels last.

    Taps are mixed and brought to the front by a product of matrices: much of the time of a short clip goes into
    bringing large weights into order, and by moves alone that takes twice as long.
    """
    out, channels, *window = weight.shape
    frames, rows, columns = (
        TAPS if paired else np.eye(n) for paired, n in zip((by_frame, False, by_column), window, strict=True)
    )
    mix = jnp.asarray(np.kron(np.kron(frames, rows), columns), weight.dtype)
    flat = weight.reshape(out * channels, -1)
    mixed = lax.dot_general(mix, flat, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    mixed = mixed.reshape(len(frames), len(rows), len(columns), out, channels)
    return jnp.swapaxes(mixed, -1, -2)


def _in_pairs(x: Array, axis: int, product: Callable[[Array, int], Array]) -> Array:
    """All windows of three along an axis, two by two: `product(part, i)` is of the i-th sum of each pair's inputs.

    There is an even number of windows.
    """
    reach = x.shape[axis] - 3
    a, b, c, d = (lax.slice_in_dim(x, i, i + reach, 2, axis) for i in range(4))
    m = [product(part, i) for i, part in enumerate((a - c, b + c, c - b, b - d))]
    y = jnp.stack([m[0] + m[1] + m[2], m[1] - m[2] - m[3]], axis + 1)
    return y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])


def _columns_in_pairs(
    x: Float[Array, "batch frames rows width channels"], kernels: Sequence[Array], borders: Sequence[tuple[int, int]]
) -> Float[Array, "batch frames out_rows out_width out"]:
    rows, (before, after) = borders
    width = x.shape[3] + before + after - 2
    x = jnp.pad(x, (*((0, 0),) * 3, (before, after + width % 2), (0, 0)))
    y = _in_pairs(x, 3, lambda part, i: _columns(part, kernels[i : i + 1], (rows, (0, 0))))
    return y[:, :, :, :width]


def _columns(
    x: Float[Array, "batch frames rows width channels"], kernels: Sequence[Array], borders: Sequence[tuple[int, int]]
) -> Float[Array, "batch frames out_rows out_width out"]:
    """Each frame by the only one of the kernels."""
    frames = x.reshape(-1, *x.shape[2:])
    y = lax.conv_general_dilated(frames, kernels[0], (1, 1), borders, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y.reshape(*x.shape[:2], *y.shape[1:])
