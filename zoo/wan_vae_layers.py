"""The layers of the Wan video autoencoders, up to the encoder and the decoder of one piece of a video.

Frames are channels last, shapes one device's: the batch is split over `data`, the rows over `conv.SPLIT`. Each layer
takes `height`, the true number of rows of its input on all devices together, and the cache of the step before: None at
the first step, whose piece is the first frame alone. Which rules that follows is said where it matters.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardzoo.zoo.conv import (
    CausalConv3d,
    ChannelNorm,
    Conv2d,
    Pointwise,
    attend_pixels,
    convolve_in_time,
    each_frame,
    nearest_twice,
    silu_norm,
)
from shardzoo.zoo.layers import ColumnLinear
from shardzoo.zoo.layout import Param
from shardzoo.zoo.wan_vae_config import Config, Level

Cache = Any  # nested tuples of arrays, the same at every step but the first, where it is None


class ResidualBlock(eqx.Module):
    """x + conv(silu(norm(conv(silu(norm x))))), the x of the sum projected where the width changes."""

    norm1: ChannelNorm
    conv1: CausalConv3d
    norm2: ChannelNorm
    conv2: CausalConv3d
    shortcut: Pointwise | None

    @classmethod
    def declare(cls, into: int, out: int) -> "ResidualBlock":
        return cls(
            norm1=ChannelNorm.declare(into),
            conv1=CausalConv3d.declare(into, out),
            norm2=ChannelNorm.declare(out),
            conv2=CausalConv3d.declare(out, out),
            shortcut=None if into == out else Pointwise.declare(into, out),
        )

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch frames height width out"], Cache]:
        first, second = cache or (None, None)
        y, first = self.conv1(silu_norm(self.norm1, x), height, first)
        y, second = self.conv2(silu_norm(self.norm2, y), height, second)
        return y + (x if self.shortcut is None else self.shortcut(x)), (first, second)


class FrameAttention(eqx.Module):
    """x + attention of all pixels of a frame to each other. Collectives on several devices: one all-gather."""

    norm: ChannelNorm
    qkv: ColumnLinear
    out: Pointwise

    @classmethod
    def declare(cls, channels: int) -> "FrameAttention":
        weight = Param("block out channels", (3, channels, channels))
        return cls(
            norm=ChannelNorm.declare(channels),
            qkv=ColumnLinear(weight, Param("block out", (3, channels))),
            out=Pointwise.declare(channels, channels),
        )

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int
    ) -> Float[Array, "batch frames height width channels"]:
        y = each_frame(self.norm(x), lambda frame: attend_pixels(frame, self.qkv, height))
        return x + self.out(y)


class Middle(eqx.Module):
    """Two residual blocks with an attention between them."""

    block1: ResidualBlock
    attn: FrameAttention
    block2: ResidualBlock

    @classmethod
    def declare(cls, channels: int) -> "Middle":
        block = ResidualBlock.declare(channels, channels)
        return cls(block1=block, attn=FrameAttention.declare(channels), block2=block)

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch frames height width channels"], Cache]:
        first, second = cache or (None, None)
        x, first = self.block1(x, height, first)
        x, second = self.block2(self.attn(x, height), height, second)
        return x, (first, second)


class Downsample(eqx.Module):
    """Half the height and width, by a convolution of stride 2; then half the frames, if `time` is there.

    The first frame is not convolved in time; after it a convolution of stride 2 reads each pair of frames and the one
    before.
    """

    space: Conv2d
    time: CausalConv3d | None

    @classmethod
    def declare(cls, level: Level) -> "Downsample":
        time = CausalConv3d.declare(level.out, level.out, (3, 1, 1)) if level.halve_time else None
        return cls(space=Conv2d.declare(level.out, level.out, 3, stride=2), time=time)

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch out_frames half_height half_width channels"], Cache]:
        x = each_frame(x, lambda frame: self.space(frame, height))
        if self.time is None:
            return x, ()
        if cache is None:
            return x, x
        seen = jnp.concatenate([cache, x], axis=1)
        y = convolve_in_time(seen, self.time.weight, ((0, 0), (0, 0)), stride=2)
        return y + self.time.bias.astype(x.dtype), x[:, -1:]


class Upsample(eqx.Module):
    """Twice the frames, if `time` is there, then twice the height and width: nearest pixels and a convolution.

    The first frame stays one frame, and is not seen by the convolution in time of those after it: for it the time
    before is zero. That convolution gives the channels of both frames, those of the first before those of the second.
    """

    time: CausalConv3d | None
    space: Conv2d

    @classmethod
    def declare(cls, level: Level, out: int) -> "Upsample":
        time = CausalConv3d.declare(level.out, 2 * level.out, (3, 1, 1)) if level.halve_time else None
        return cls(time=time, space=Conv2d.declare(level.out, out, 3))

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch out_frames twice_height twice_width out"], Cache]:
        if self.time is None:
            cache = ()
        elif cache is None:
            cache = jnp.zeros_like(jnp.concatenate([x, x], axis=1))
        else:
            y, cache = self.time(x, height, cache)
            batch, frames, rows, width, channels = x.shape
            y = y.reshape(batch, frames, rows, width, 2, channels)
            x = jnp.moveaxis(y, 4, 2).reshape(batch, 2 * frames, rows, width, channels)
        return each_frame(x, lambda frame: self.space(nearest_twice(frame), 2 * height)), cache


def mean_down(x: Float[Array, "batch frames height width channels"], level: Level) -> Array:
    """The shortcut of an encoder's level: means over pixels of a block and neighbouring channels.

    A first frame alone is taken with a frame of zeros before it.
    """
    time, space = level.time_factor, level.space_factor
    x = jnp.pad(x, ((0, 0), (-x.shape[1] % time, 0), *((0, 0),) * 3))
    batch, frames, rows, width, channels = x.shape
    x = x.reshape(batch, frames // time, time, rows // space, space, width // space, space, channels)
    x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(*x.shape[:4], level.out, -1).mean(axis=-1)


def repeat_up(x: Float[Array, "batch frames height width channels"], level: Level, *, first: bool) -> Array:
    """The shortcut of a decoder's level: channels, repeated where there are too few, become pixels of a block.

    Of a first frame only the last of its frames stays.
    """
    time, space = level.time_factor, level.space_factor
    batch, frames, rows, width, channels = x.shape
    x = jnp.repeat(x, level.out * time * space**2 // channels, axis=-1)
    x = x.reshape(batch, frames, rows, width, level.out, time, space, space).transpose(0, 1, 5, 2, 6, 3, 7, 4)
    x = x.reshape(batch, frames * time, rows * space, width * space, level.out)
    return x[:, time - 1 :] if first else x


class DownLevel(eqx.Module):
    """Residual blocks and a downsampling."""

    blocks: tuple[ResidualBlock, ...]
    down: Downsample | None
    level: Level = eqx.field(static=True)

    @classmethod
    def declare(cls, level: Level, blocks: int) -> "DownLevel":
        into = [level.into] + [level.out] * (blocks - 1)
        return cls(
            blocks=tuple(ResidualBlock.declare(i, level.out) for i in into),
            down=Downsample.declare(level) if level.change else None,
            level=level,
        )

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch out_frames out_height out_width out"], Cache]:
        x, kept = run_blocks(self.blocks, x, height, cache)
        if self.down is None:
            return x, kept
        x, last = self.down(x, height, None if cache is None else cache[-1])
        return x, (*kept, last)

    def shortcut(self, x: Float[Array, "batch frames height width channels"], *, first: bool) -> Array:
        return mean_down(x, self.level)


class UpLevel(eqx.Module):
    """Residual blocks, one more than on the way down, and an upsampling to `next_into` channels."""

    blocks: tuple[ResidualBlock, ...]
    up: Upsample | None
    level: Level = eqx.field(static=True)

    @classmethod
    def declare(cls, level: Level, blocks: int, next_into: int | None) -> "UpLevel":
        into = [level.into] + [level.out] * blocks
        return cls(
            blocks=tuple(ResidualBlock.declare(i, level.out) for i in into),
            up=Upsample.declare(level, next_into) if next_into else None,
            level=level,
        )

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch out_frames out_height out_width out"], Cache]:
        x, kept = run_blocks(self.blocks, x, height, cache)
        if self.up is None:
            return x, kept
        x, last = self.up(x, height, None if cache is None else cache[-1])
        return x, (*kept, last)

    def shortcut(self, x: Float[Array, "batch frames height width channels"], *, first: bool) -> Array | None:
        return repeat_up(x, self.level, first=first) if self.level.change else None


class WithShortcut(eqx.Module):
    """A level and what goes round it, which has no parameters."""

    inner: DownLevel | UpLevel

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch out_frames out_height out_width out"], Cache]:
        y, kept = self.inner(x, height, cache)
        round_it = self.inner.shortcut(x, first=cache is None)
        return (y if round_it is None else y + round_it), kept


def run_blocks(
    blocks: tuple[ResidualBlock, ...], x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
) -> tuple[Float[Array, "batch frames height width out"], tuple]:
    """x after the blocks, and their caches."""
    kept = []
    for i, block in enumerate(blocks):
        x, new = block(x, height, None if cache is None else cache[i])
        kept.append(new)
    return x, tuple(kept)


def with_shortcuts(c: Config, levels: list) -> tuple:
    return tuple(WithShortcut(level) if c.shortcuts else level for level in levels)


class Encoder(eqx.Module):
    """Pixels to the moments of the latents."""

    conv_in: CausalConv3d
    levels: tuple[DownLevel | WithShortcut, ...]
    middle: Middle
    norm: ChannelNorm
    conv_out: CausalConv3d
    factors: tuple[int, ...] = eqx.field(static=True)  # by which each level changes the height

    @classmethod
    def declare(cls, c: Config) -> "Encoder":
        levels = c.down_levels
        return cls(
            conv_in=CausalConv3d.declare(c.net_channels, levels[0].into),
            levels=with_shortcuts(c, [DownLevel.declare(level, c.blocks) for level in levels]),
            middle=Middle.declare(levels[-1].out),
            norm=ChannelNorm.declare(levels[-1].out),
            conv_out=CausalConv3d.declare(levels[-1].out, 2 * c.latent_channels),
            factors=tuple(level.space_factor for level in levels),
        )

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch out_frames out_height out_width moments"], Cache]:
        before = cache or (None,) * (len(self.levels) + 3)
        x, first = self.conv_in(x, height, before[0])
        after = [first]
        for level, factor, old in zip(self.levels, self.factors, before[1:-2], strict=True):
            x, new = level(x, height, old)
            height = height // factor
            after.append(new)
        x, middle = self.middle(x, height, before[-2])
        x, last = self.conv_out(silu_norm(self.norm, x), height, before[-1])
        return x, (*after, middle, last)


class Decoder(eqx.Module):
    """Latents to pixels."""

    conv_in: CausalConv3d
    middle: Middle
    levels: tuple[UpLevel | WithShortcut, ...]
    norm: ChannelNorm
    conv_out: CausalConv3d
    factors: tuple[int, ...] = eqx.field(static=True)  # by which each level changes the height

    @classmethod
    def declare(cls, c: Config) -> "Decoder":
        levels = c.up_levels
        after = [*(level.into for level in levels[1:]), None]
        return cls(
            conv_in=CausalConv3d.declare(c.latent_channels, levels[0].into),
            middle=Middle.declare(levels[0].into),
            levels=with_shortcuts(c, [UpLevel.declare(a, c.blocks, b) for a, b in zip(levels, after, strict=True)]),
            norm=ChannelNorm.declare(levels[-1].out),
            conv_out=CausalConv3d.declare(levels[-1].out, c.net_channels),
            factors=tuple(level.space_factor for level in levels),
        )

    def __call__(
        self, x: Float[Array, "batch frames height width channels"], height: int, cache: Cache
    ) -> tuple[Float[Array, "batch out_frames out_height out_width pixels"], Cache]:
        before = cache or (None,) * (len(self.levels) + 3)
        x, first = self.conv_in(x, height, before[0])
        x, middle = self.middle(x, height, before[1])
        after = [first, middle]
        for level, factor, old in zip(self.levels, self.factors, before[2:-1], strict=True):
            x, new = level(x, height, old)
            height = height * factor
            after.append(new)
        x, last = self.conv_out(silu_norm(self.norm, x), height, before[-1])
        return x, (*after, last)
