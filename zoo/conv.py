"""Convolutions over images and videos whose rows are split over devices.

Frames are held channels last. The height is split over all axes but the batch's (`SPLIT`): `context` and the tensor
axes together, as convolutional autoencoders have small weights, which are whole on every device, and large frames. The
height rather than the width: rows are contiguous, so what neighbours exchange is too, and rows added to make a height
divide come after all others also when a frame is read as a sequence (`kv_lengths` is enough to hide them).

Layers take `height`, the frame's true number of rows on all devices together. Rows of the split beyond it are padding:
they may hold anything, are read as zeros (the border of the true frame), and never change a row before them.
Everything here but `on_mesh`, which makes it, runs inside a `shard_map` with `check_vma=True`; annotated shapes are one
device's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from shardzoo.kernels.flash_attention import flash_attention
from shardzoo.kernels.flash_attention.options import varying_over
from shardzoo.zoo import conv_pairs, layout
from shardzoo.zoo.layers import ColumnLinear, Leaf, contract
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import CONTEXT, DATA, TP, traced_platform

SPLIT = (CONTEXT, *TP)
ROWS = -3  # the height of (..., height, width, channels)
Border = tuple[int, int]  # pixels before and after


def on_mesh(
    declared: Any, mesh: Mesh | AbstractMesh, call: Callable[..., Any], in_specs: tuple, out_specs: Any
) -> Callable[..., Any]:
    """`call(model, *arrays)` on each device, every weight made to vary like the activations.

    That is done once, outside of any scan: its transpose adds the weights' gradients up over the devices, once.
    """

    def body(model: Any, *arrays: Any) -> Any:
        whole = layout.gather_at_rest(model, declared)
        return call(varying_over(whole, frozenset({DATA, *SPLIT})), *arrays)

    return layout.sharded(body, mesh, (layout.specs(declared), *in_specs), out_specs)


def pad_to_mesh(x: Array, mesh: Mesh | AbstractMesh, rows: int, multiple: int = 1) -> Array:
    """x with zeros added until its batch, dim 0, and its rows, dim `rows`, can be split; see `padded_height`."""
    height, extra = x.shape[rows], [(0, 0)] * x.ndim
    extra[0] = (0, -x.shape[0] % mesh.shape[DATA])
    extra[rows] = (0, padded_height(height, mesh.size // mesh.shape[DATA], multiple) - height)
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def padded_height(height: int, ways: int, multiple: int = 1) -> int:
    """The least number of rows from `height` on that `ways` devices share evenly, in multiples of `multiple`.

    One device takes any height as it is.
    """
    return height if ways == 1 else height + -height % (ways * multiple)


def clear_padding(
    x: Float[Array, "*lead rows width channels"], height: int
) -> Float[Array, "*lead rows width channels"]:
    """x with zeros in the rows beyond `height`."""
    return _chosen(_true_rows(x, height), x)


def _true_rows(
    x: Float[Array, "*lead rows width channels"], height: int
) -> Bool[Array, "*lead rows width channels"] | None:
    """Where x holds rows of the true frame; None where it holds no others."""
    rows = x.shape[ROWS]
    if lax.axis_size(SPLIT) * rows == height:
        return None
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + ROWS) < height - _place() * rows


def _chosen(which: Bool[Array, "*shape"] | None, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x where `which` says, zeros elsewhere; all of x where there is nothing to choose."""
    return x if which is None else lax.select(which, x, lax.full_like(x, 0))


def _place() -> Int[Array, ""]:
    """Which of the devices that share the rows this one is; there are several."""
    return lax.axis_index(tuple(axis for axis in SPLIT if lax.axis_size(axis) > 1))


def exchange_rows(
    x: Float[Array, "*lead rows width channels"], border: Border
) -> Float[Array, "*lead more_rows width channels"]:
    """x between rows of its neighbours: the last ones of the device before, the first ones of the device after.

    Zeros where there is no neighbour. Collectives: one permutation for each side of `border` that is not 0.
    """
    ways = lax.axis_size(SPLIT)
    before, after = border
    parts = [x]
    if before:
        last = lax.slice_in_dim(x, x.shape[ROWS] - before, None, axis=x.ndim + ROWS)
        parts.insert(0, lax.ppermute(last, SPLIT, [(i, i + 1) for i in range(ways - 1)]))
    if after:
        first = lax.slice_in_dim(x, 0, after, axis=x.ndim + ROWS)
        parts.append(lax.ppermute(first, SPLIT, [(i + 1, i) for i in range(ways - 1)]))
    return jnp.concatenate(parts, axis=ROWS)


def bordered(
    x: Float[Array, "*lead rows width channels"], height: int, border: Border
) -> tuple[Float[Array, "*lead more_rows width channels"], Border]:
    """x as a convolution with this border reads it, and the rows of zeros that are still to be added.

    On one device the convolution adds its zeros itself; on several the rows are exchanged.
    """
    if border == (0, 0) or lax.axis_size(SPLIT) == 1:
        return x, border
    return exchange_rows(clear_padding(x, height), border), (0, 0)


def convolve(
    x: Float[Array, "*lead rows width channels"],
    weight: Float[Array, "out channels *window"],
    borders: Sequence[Border],
    strides: Sequence[int],
) -> Float[Array, "*out_lead out_rows out_width out"]:
    """x * weight, in x's dtype; `borders` of zeros and `strides` for each dim of the window.

    On a CPU the kernel is laid out before: XLA's fast convolutions there take the window first and output channels
    last, and it brings others to that form outside of loops only. In the body of a scan it would run plain loops,
    eight times slower. Behind the barrier the copy is made once, before the scan.
    """
    spatial, kernel, labels = "THW"[-len(strides) :], weight.astype(x.dtype), "OI{}"
    if traced_platform() == "cpu":
        kernel, labels = lax.optimization_barrier(jnp.moveaxis(kernel, (1, 0), (-2, -1))), "{}IO"
    dims = (f"N{spatial}C", labels.format(spatial), f"N{spatial}C")
    return lax.conv_general_dilated(x, kernel, strides, borders, dimension_numbers=dims)


class Conv2d(eqx.Module):
    """A convolution of each frame, as PyTorch's Conv2d with an odd window: y has the rows of x, divided by `stride`.

    Stride 1 has half a window of zeros on all sides; stride 2 has them on the right and at the bottom only, and where
    a size is odd it is rounded down. x and y are split by rows, each device's rows even for stride 2.
    Collectives on several devices, for a window of 3: two permutations of one row, for stride 2 one.
    """

    weight: Float[Leaf, "out channels window_rows window_columns"]
    bias: Float[Leaf, " out"]
    stride: int = eqx.field(static=True, default=1)

    @classmethod
    def declare(cls, channels: int, out: int, window: int, stride: int = 1) -> "Conv2d":
        weight = Param("out channels window_rows window_columns", (out, channels, window, window))
        return cls(weight=weight, bias=Param("out", (out,)), stride=stride)

    def __call__(
        self, x: Float[Array, "batch rows width channels"], height: int
    ) -> Float[Array, "batch out_rows out_width out"]:
        half = self.weight.shape[-1] // 2
        border = (half, half) if self.stride == 1 else (0, half)
        x, rows = bordered(x, height, border)
        return convolve(x, self.weight, (rows, border), (self.stride,) * 2) + self.bias.astype(x.dtype)


class Pointwise(eqx.Module):
    """A convolution with a window of one pixel. No collective."""

    weight: Float[Leaf, "out channels"]
    bias: Float[Leaf, " out"]

    @classmethod
    def declare(cls, channels: int, out: int) -> "Pointwise":
        return cls(weight=Param("out channels", (out, channels)), bias=Param("out", (out,)))

    def __call__(self, x: Float[Array, "*lead channels"]) -> Float[Array, "*lead out"]:
        return contract(x, self.weight) + self.bias.astype(x.dtype)


class CausalConv3d(eqx.Module):
    """A convolution in time and space that reads no later frame, over a video that comes in pieces.

    Each call takes the next frames and the cache that the call before gave: the last frames of its input, with the
    rows of the neighbours round them. Before the first frame everything is zero.
    Collectives on several devices, for a window of 3 rows: two permutations of one row of the new frames.
    """

    weight: Float[Leaf, "out channels window_frames window_rows window_columns"]
    bias: Float[Leaf, " out"]

    @classmethod
    def declare(cls, channels: int, out: int, window: tuple[int, int, int] = (3, 3, 3)) -> "CausalConv3d":
        weight = Param("out channels window_frames window_rows window_columns", (out, channels, *window))
        return cls(weight=weight, bias=Param("out", (out,)))

    def __call__(
        self,
        x: Float[Array, "batch frames rows width channels"],
        height: int,
        cache: Float[Array, "batch cached more_rows width channels"] | None = None,
    ) -> tuple[Float[Array, "batch frames rows width out"], Float[Array, "batch cached more_rows width channels"]]:
        """The convolved frames and the next cache; no cache means that x is the first frame, alone."""
        frames, rows, columns = self.weight.shape[-3:]
        x, row_border = bordered(x, height, (rows // 2, rows // 2))
        borders = (row_border, (columns // 2, columns // 2))
        if cache is None:
            cache = jnp.pad(x, ((0, 0), (frames - 2, 0), *((0, 0),) * 3))
            y = each_frame(x, lambda frame: convolve(frame, self.weight[:, :, -1], borders, (1, 1)))
        else:
            seen = jnp.concatenate([cache, x], axis=1)
            y, cache = convolve_in_time(seen, self.weight, borders), seen[:, -(frames - 1) :]
        return y + self.bias.astype(x.dtype), cache


def each_frame(
    x: Float[Array, "batch frames rows width channels"], layer
) -> Float[Array, "batch frames out_rows out_width out"]:
    """`layer` of each frame: frames go into the batch and come back."""
    y = layer(x.reshape(-1, *x.shape[2:]))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def convolve_in_time(
    seen: Float[Array, "batch seen rows width channels"],
    weight: Float[Array, "out channels window_frames window_rows window_columns"],
    borders: Sequence[Border],
    stride: int = 1,
) -> Float[Array, "batch frames out_rows out_width out"]:
    """The convolution without zeros in time: as many frames as have their whole window in `seen`, every `stride`-th.

    On a CPU as convolutions in space: XLA has fast ones in two dims only there. The window's frames are channels, or
    frames are taken in pairs, which is half the time (`conv_pairs`).
    """
    window = weight.shape[2]
    if traced_platform() != "cpu":
        return convolve(seen, weight, ((0, 0), *borders), (stride, 1, 1))
    if stride == 1 and conv_pairs.pay(seen, weight):
        return conv_pairs.convolve_in_pairs(seen, weight, borders)
    frames = (seen.shape[1] - window) // stride + 1
    parts = [seen[:, k : k + stride * (frames - 1) + 1 : stride] for k in range(window)]
    folded = jnp.concatenate(parts, axis=-1)
    flat = jnp.moveaxis(weight, 2, 1).reshape(weight.shape[0], -1, *weight.shape[3:])
    return each_frame(folded, lambda frame: convolve(frame, flat, borders, (1, 1)))


def nearest_twice(
    x: Float[Array, "*lead rows width channels"],
) -> Float[Array, "*lead twice_rows twice_width channels"]:
    """Every pixel as a square of two by two. No collective: rows stay with their device."""
    *lead, rows, width, channels = x.shape
    wide = jnp.broadcast_to(x[..., :, None, :, None, :], (*lead, rows, 2, width, 2, channels))
    return wide.reshape(*lead, 2 * rows, 2 * width, channels)


class ChannelNorm(eqx.Module):
    """x / |x| * sqrt(channels) * weight, |x| over the channels and at least 1e-12; float32 inside.

    Not an RMS norm with an epsilon: pixels near zero come out at full length.
    """

    weight: Float[Leaf, " channels"]

    @classmethod
    def declare(cls, channels: int) -> "ChannelNorm":
        return cls(weight=Param("channels", (channels,)))

    def __call__(self, x: Float[Array, "*lead channels"]) -> Float[Array, "*lead channels"]:
        wide = x.astype(np.promote_types(np.float32, x.dtype))
        square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
        unit = wide * lax.rsqrt(jnp.maximum(square, 1e-24))
        return unit.astype(x.dtype) * (x.shape[-1] ** 0.5 * self.weight).astype(x.dtype)


class GroupNorm(eqx.Module):
    """(x - mean) / std * weight + bias, mean and std over an image and the channels of a group; float32 inside.

    Rows beyond `height` do not count. Collectives on several devices: one all-gather of two numbers a group.
    """

    weight: Float[Leaf, " channels"]
    bias: Float[Leaf, " channels"]
    groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True, default=1e-6)

    @classmethod
    def declare(cls, channels: int, groups: int) -> "GroupNorm":
        return cls(weight=Param("channels", (channels,)), bias=Param("channels", (channels,)), groups=groups)

    def __call__(
        self, x: Float[Array, "batch rows width channels"], height: int
    ) -> Float[Array, "batch rows width channels"]:
        wide = x.astype(np.promote_types(np.float32, x.dtype))
        mean, variance = self.moments(wide, height)
        scale = self.spread(lax.rsqrt(variance + self.eps)) * self.weight.astype(wide.dtype)
        shift = self.bias.astype(wide.dtype) - self.spread(mean) * scale
        return (wide * scale + shift).astype(x.dtype)

    def spread(self, of_groups: Float[Array, "batch groups"]) -> Float[Array, "batch one one channels"]:
        """What each group has, for each of its channels."""
        batch, channels = len(of_groups), self.weight.shape[0]
        each = lax.broadcast_in_dim(of_groups, (batch, self.groups, channels // self.groups), (0, 1))
        return each.reshape(batch, 1, 1, channels)

    def total(self, x: Float[Array, "batch rows width channels"]) -> Float[Array, "batch groups"]:
        """The sum over this device's rows and the channels of each group."""
        return x.sum((1, 2)).reshape(len(x), self.groups, -1).sum(-1)

    def moments(
        self, x: Float[Array, "batch rows width channels"], height: int
    ) -> tuple[Float[Array, "batch groups"], Float[Array, "batch groups"]]:
        """Mean and variance of each group over all devices.

        Each device takes the squares about its own mean, and those of the means about the whole mean are added: no
        two large numbers are subtracted.
        """
        ways, rows = lax.axis_size(SPLIT), x.shape[1]
        counts = np.clip(height - rows * np.arange(ways), 0, rows) * (x.shape[2] * x.shape[3] // self.groups)
        each = jnp.asarray(1 / np.maximum(counts, 1), x.dtype)
        own = each[0] if ways == 1 else lax.dynamic_index_in_dim(each, _place(), keepdims=False)
        true = _true_rows(x, height)
        mean = self.total(_chosen(true, x)) * own
        square = self.total(_chosen(true, jnp.square(x - self.spread(mean))))
        parts = lax.all_gather(jnp.stack([mean, square]), SPLIT) if ways > 1 else jnp.stack([mean, square])[None]
        share = jnp.asarray(counts / counts.sum(), x.dtype)[:, None, None]
        mean = (parts[:, 0] * share).sum(0)
        variance = (parts[:, 1] / float(counts.sum()) + jnp.square(parts[:, 0] - mean) * share).sum(0)
        return mean, variance


def attend_pixels(
    x: Float[Array, "batch rows width channels"], qkv: ColumnLinear, height: int
) -> Float[Array, "batch rows width channels"]:
    """Attention of all pixels of an image to each other, one head of all channels; before the output's projection.

    Queries stay with their rows; the image is gathered and keys and values are computed from all of it on every device:
    half the bytes of gathered keys and values. Collectives on several devices: one all-gather.
    """
    batch, rows, width, channels = x.shape
    mine = x.reshape(batch, rows * width, channels)
    q = ColumnLinear(qkv.weight[:1], qkv.bias[:1])(mine)
    kv = ColumnLinear(qkv.weight[1:], qkv.bias[1:])(lax.all_gather(mine, SPLIT, axis=1, tiled=True))
    lengths = None if kv.shape[1] == height * width else jnp.full(batch, height * width, jnp.int32)
    return flash_attention(q, kv[:, :, :1], kv[:, :, 1:], kv_lengths=lengths).reshape(x.shape)


def silu_norm(norm: ChannelNorm, x: Float[Array, "*lead channels"]) -> Float[Array, "*lead channels"]:
    """What stands before each convolution of a residual block."""
    return jax.nn.silu(norm(x))
