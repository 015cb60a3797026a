"""The layers of FLUX.2 beside its blocks, which are in `flux_blocks`: config, conditions, modulation, the whole model.

Source: `Flux2` of the black-forest-labs repository and `Flux2Transformer2DModel` of diffusers 0.42. Shapes inside
layers are one device's. No layer has a bias.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
from jax import lax
from jaxtyping import Array, Float, Num

from shardzoo.errors import fail_if, not_above_zero
from shardzoo.zoo import layout
from shardzoo.zoo.flux_blocks import Double, Head, Rows, Single, Vector, features, modulation, rows_of
from shardzoo.zoo.layers import ColumnLinear, SplitInputLinear, row_sum
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import TP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        in_channels, out_channels: of a token of the image: latent channels times the patch.
        heads, head_dim, double_layers, single_layers: sizes; the streams are heads * head_dim wide.
        mlp: width of the mlp, of each of the two parts that its first layer gives.
        text: width of the text encoder's states, of several layers side by side.
        freq: features of a timestep, and of a guidance.
        guidance: whether the model is told the scale of a guidance that was distilled into it.
        axes: dims of a head that each axis of the positions turns: image, row, column, place in the text.
        theta: base of the rotary frequencies.
        eps: of the norms.
    """

    biases: ClassVar[bool] = False
    gated: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    in_channels: int = 128
    out_channels: int = 128
    heads: int = 48
    head_dim: int = 128
    double_layers: int = 8
    single_layers: int = 48
    mlp: int = 18432
    text: int = 15360
    freq: int = 256
    guidance: bool = True
    axes: tuple[int, ...] = (32, 32, 32, 32)
    theta: float = 2e3
    eps: float = 1e-6

    def __post_init__(self):
        names = ("in_channels", "out_channels", "heads", "head_dim", "double_layers", "single_layers")
        sizes = {name: getattr(self, name) for name in (*names, "mlp", "text", "freq")}
        problems = [f"{n}={v} is not at least 1: change it" for n, v in sizes.items() if v < 1]
        problems += [f"freq={self.freq} is not an even number: change it"] if self.freq % 2 else []
        problems += [f"axes={self.axes}: {n} is not an even number of dims: change it" for n in self.axes if n % 2]
        if sum(self.axes) != self.head_dim:
            problems.append(f"axes={self.axes} are {sum(self.axes)} dims in all, head_dim={self.head_dim}: change one")
        problems += not_above_zero(self, "theta", "eps")
        fail_if(problems, "flux2 config")

    @property
    def embed(self) -> int:
        return self.heads * self.head_dim


class Conditions(eqx.Module):
    """Timestep and guidance as one vector per row: one all-reduce."""

    time: Vector
    guidance: Vector | None
    freq: int = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Conditions":
        return cls(
            time=Vector.declare(c, c.freq), guidance=Vector.declare(c, c.freq) if c.guidance else None, freq=c.freq
        )

    def __call__(
        self, timesteps: Num[Array, " batch"], guidance: Num[Array, " batch"] | None, dtype: Any
    ) -> Float[Array, "batch one embed"]:
        """In `dtype`, in which timesteps and guidance are multiplied too, as the reference does."""
        parts = [self.time.hidden(features(timesteps, self.freq, dtype))]
        if self.guidance is not None:
            assert guidance is not None  # checked at the call
            parts.append(self.guidance.hidden(features(guidance, self.freq, dtype)))
        return row_sum(*parts)


class Modulation(eqx.Module):
    """What modulates all blocks of two streams (by stream) and all of one, computed once for a step.

    Each is a fifth of a block's size or more, so it is split on its input over the tensor axes.
    """

    text: SplitInputLinear
    image: SplitInputLinear
    single: SplitInputLinear

    @classmethod
    def declare(cls, c: Config) -> "Modulation":
        return cls(text=modulation(c, 6), image=modulation(c, 6), single=modulation(c, 3))

    def __call__(
        self, condition: Float[Array, "batch one embed"], head: SplitInputLinear
    ) -> tuple[tuple[tuple[Rows, Rows], Rows], Rows]:
        """Rows of the blocks of two streams (text, image), of those of one, and of the head: one all-reduce in all."""
        layers = (self.text, self.image, self.single, head)
        sums = lax.psum([layer.partial(condition) for layer in layers], TP)
        text, image, single, last = (rows_of(layer.finished(x)) for layer, x in zip(layers, sums, strict=True))
        return ((text, image), single), last


class Flux2(eqx.Module):
    """Embeddings of image, text and conditions, modulation, stacked blocks of two streams and of one, head."""

    image: ColumnLinear
    text: ColumnLinear
    conditions: Conditions
    modulation: Modulation
    double: Double
    single: Single
    head: Head
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Flux2":
        return cls(
            image=ColumnLinear(Param("embed channels", (c.embed, c.in_channels))),
            text=ColumnLinear(Param("embed channels", (c.embed, c.text))),
            conditions=Conditions.declare(c),
            modulation=Modulation.declare(c),
            double=layout.stack(Double.declare(c), c.double_layers),
            single=layout.stack(Single.declare(c), c.single_layers),
            head=Head.declare(c),
            config=c,
        )
