"""The layers of the image autoencoders, up to the encoder and the decoder.

Images are channels last, shapes one device's: the batch is split over `data`, the rows over `conv.SPLIT`. Each layer
takes `height`, the true number of rows of its input on all devices together.
"""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float

from shardzoo.zoo.conv import Conv2d, GroupNorm, Pointwise, attend_pixels, nearest_twice
from shardzoo.zoo.image_vae_config import Config
from shardzoo.zoo.layers import ColumnLinear
from shardzoo.zoo.layout import Param
from shardzoo.zoo.remat import Remat, rematerialised


class ResidualBlock(eqx.Module):
    """x + conv(silu(norm(conv(silu(norm x))))), the x of the sum projected where the width changes.

    Collectives on several devices: an all-gather of each norm, two permutations of one row of each convolution.
    """

    norm1: GroupNorm
    conv1: Conv2d
    norm2: GroupNorm
    conv2: Conv2d
    shortcut: Pointwise | None

    @classmethod
    def declare(cls, into: int, out: int, groups: int) -> "ResidualBlock":
        return cls(
            norm1=GroupNorm.declare(into, groups),
            conv1=Conv2d.declare(into, out, 3),
            norm2=GroupNorm.declare(out, groups),
            conv2=Conv2d.declare(out, out, 3),
            shortcut=None if into == out else Pointwise.declare(into, out),
        )

    def __call__(
        self, x: Float[Array, "batch rows width channels"], height: int
    ) -> Float[Array, "batch rows width out"]:
        y = self.conv1(jax.nn.silu(self.norm1(x, height)), height)
        y = self.conv2(jax.nn.silu(self.norm2(y, height)), height)
        return y + (x if self.shortcut is None else self.shortcut(x))


class PixelAttention(eqx.Module):
    """x + attention of all pixels to each other.

    Collectives on several devices: two all-gathers, one of them the norm's.
    """

    norm: GroupNorm
    qkv: ColumnLinear
    out: Pointwise

    @classmethod
    def declare(cls, channels: int, groups: int) -> "PixelAttention":
        weight = Param("block out channels", (3, channels, channels))
        return cls(
            norm=GroupNorm.declare(channels, groups),
            qkv=ColumnLinear(weight, Param("block out", (3, channels))),
            out=Pointwise.declare(channels, channels),
        )

    def __call__(
        self, x: Float[Array, "batch rows width channels"], height: int
    ) -> Float[Array, "batch rows width channels"]:
        return x + self.out(attend_pixels(self.norm(x, height), self.qkv, height))


class Middle(eqx.Module):
    """Two residual blocks, with an attention between them if there is one."""

    block1: ResidualBlock
    attn: PixelAttention | None
    block2: ResidualBlock

    @classmethod
    def declare(cls, channels: int, c: Config) -> "Middle":
        block = ResidualBlock.declare(channels, channels, c.groups)
        return cls(block1=block, attn=PixelAttention.declare(channels, c.groups) if c.attention else None, block2=block)

    def __call__(
        self, x: Float[Array, "batch rows width channels"], height: int, *, remat: Remat
    ) -> Float[Array, "batch rows width channels"]:
        for layer in (self.block1, self.attn, self.block2):
            x = x if layer is None else call(layer, x, height, remat=remat)
        return x


class Level(eqx.Module):
    """Residual blocks of one size of image, and the convolution to the next size.

    Down: of stride 2, with zeros on the right and at the bottom only. Up: of pixels repeated into squares of two by
    two. Collectives of that convolution on several devices: one permutation of one row down, two up.
    """

    blocks: tuple[ResidualBlock, ...]
    change: Conv2d | None
    up: bool = eqx.field(static=True)

    @classmethod
    def declare(cls, into: int, out: int, blocks: int, groups: int, *, change: bool, up: bool) -> "Level":
        widths = [into] + [out] * (blocks - 1)
        return cls(
            blocks=tuple(ResidualBlock.declare(width, out, groups) for width in widths),
            change=Conv2d.declare(out, out, 3, stride=1 if up else 2) if change else None,
            up=up,
        )

    def __call__(
        self, x: Float[Array, "batch rows width channels"], height: int, *, remat: Remat
    ) -> tuple[Float[Array, "batch out_rows out_width out"], int]:
        """What comes out, and its height."""
        for block in self.blocks:
            x = call(block, x, height, remat=remat)
        if self.change is None:
            return x, height
        if self.up:
            return self.change(nearest_twice(x), 2 * height), 2 * height
        return self.change(x, height), height // 2


def call(layer: Callable[[Array, int], Array], x: Array, height: int, *, remat: Remat) -> Array:
    """`layer(x, height)`, of which the backward pass keeps what `remat` says."""
    return rematerialised(lambda layer, x: layer(x, height), remat, scanned=False)(layer, x)


class Encoder(eqx.Module):
    """Pixels to the moments of the latents."""

    conv_in: Conv2d
    levels: tuple[Level, ...]
    middle: Middle
    norm: GroupNorm
    conv_out: Conv2d

    @classmethod
    def declare(cls, c: Config) -> "Encoder":
        first, last = c.widths[0], c.widths[-1]
        pairs = list(zip((first, *c.widths), c.widths, strict=False))
        return cls(
            conv_in=Conv2d.declare(c.channels, first, 3),
            levels=tuple(
                Level.declare(*pair, c.blocks, c.groups, change=i < len(pairs) - 1, up=False)
                for i, pair in enumerate(pairs)
            ),
            middle=Middle.declare(last, c),
            norm=GroupNorm.declare(last, c.groups),
            conv_out=Conv2d.declare(last, 2 * c.latent_channels, 3),
        )

    def __call__(
        self, x: Float[Array, "batch rows width channels"], height: int, *, remat: Remat
    ) -> Float[Array, "batch out_rows out_width moments"]:
        x = self.conv_in(x, height)
        for level in self.levels:
            x, height = level(x, height, remat=remat)
        x = self.middle(x, height, remat=remat)
        return self.conv_out(jax.nn.silu(self.norm(x, height)), height)


class Decoder(eqx.Module):
    """Latents to pixels."""

    conv_in: Conv2d
    middle: Middle
    levels: tuple[Level, ...]
    norm: GroupNorm
    conv_out: Conv2d

    @classmethod
    def declare(cls, c: Config) -> "Decoder":
        widths = c.decoder_widths[::-1]
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        return cls(
            conv_in=Conv2d.declare(c.latent_channels, widths[0], 3),
            middle=Middle.declare(widths[0], c),
            levels=tuple(
                Level.declare(*pair, c.blocks + 1, c.groups, change=i < len(pairs) - 1, up=True)
                for i, pair in enumerate(pairs)
            ),
            norm=GroupNorm.declare(widths[-1], c.groups),
            conv_out=Conv2d.declare(widths[-1], c.channels, 3),
        )

    def __call__(
        self, x: Float[Array, "batch rows width channels"], height: int, *, remat: Remat
    ) -> Float[Array, "batch out_rows out_width pixels"]:
        x = self.middle(self.conv_in(x, height), height, remat=remat)
        for level in self.levels:
            x, height = level(x, height, remat=remat)
        return self.conv_out(jax.nn.silu(self.norm(x, height)), height)
