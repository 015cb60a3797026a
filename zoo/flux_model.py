"""The layers of FLUX.1 beside its blocks, which are in `flux_blocks`: config, conditions, the whole model.

Source: `Flux` of the black-forest-labs repository and `FluxTransformer2DModel` of diffusers 0.42. Shapes inside layers
are one device's.
"""

import dataclasses
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Num

from shardzoo.errors import fail_if, not_above_zero
from shardzoo.zoo import layout
from shardzoo.zoo.flux_blocks import Double, Head, Single, Vector, features
from shardzoo.zoo.layers import ColumnLinear, row_sum
from shardzoo.zoo.layout import Param

FREQ = 256  # features of a timestep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        in_channels, out_channels: of a token of the image: latent channels times the patch.
        heads, head_dim, double_layers, single_layers, mlp: sizes; the streams are heads * head_dim wide.
        text, pooled: widths of the text encoder's states and of the pooled state of the other one.
        guidance: whether the model is told the scale of a guidance that was distilled into it.
        axes: dims of a head that each axis of the positions turns.
        theta: base of the rotary frequencies.
        eps: of the norms.
    """

    biases: ClassVar[bool] = True
    gated: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    in_channels: int = 64
    out_channels: int = 64
    heads: int = 24
    head_dim: int = 128
    double_layers: int = 19
    single_layers: int = 38
    mlp: int = 12288
    text: int = 4096
    pooled: int = 768
    guidance: bool = True
    axes: tuple[int, ...] = (16, 56, 56)
    theta: float = 1e4
    eps: float = 1e-6

    def __post_init__(self):
        names = ("in_channels", "out_channels", "heads", "head_dim", "double_layers", "single_layers")
        sizes = {name: getattr(self, name) for name in (*names, "mlp", "text", "pooled")}
        problems = [f"{n}={v} is not at least 1: change it" for n, v in sizes.items() if v < 1]
        problems += [f"axes={self.axes}: {n} is not an even number of dims: change it" for n in self.axes if n % 2]
        if sum(self.axes) != self.head_dim:
            problems.append(f"axes={self.axes} are {sum(self.axes)} dims in all, head_dim={self.head_dim}: change one")
        problems += not_above_zero(self, "theta", "eps")
        fail_if(problems, "flux config")

    @property
    def embed(self) -> int:
        return self.heads * self.head_dim


class Conditions(eqx.Module):
    """Timestep, guidance and pooled text as one vector per row: one all-reduce."""

    time: Vector
    guidance: Vector | None
    pooled: Vector

    @classmethod
    def declare(cls, c: Config) -> "Conditions":
        return cls(
            time=Vector.declare(c, FREQ),
            guidance=Vector.declare(c, FREQ) if c.guidance else None,
            pooled=Vector.declare(c, c.pooled),
        )

    def __call__(
        self,
        timesteps: Num[Array, " batch"],
        guidance: Num[Array, " batch"] | None,
        pooled: Float[Array, "batch channels"],
    ) -> Float[Array, "batch one embed"]:
        """In pooled's dtype, in which timesteps and guidance are multiplied too, as the reference does."""
        dtype = pooled.dtype
        parts = [self.time.hidden(features(timesteps, FREQ, dtype)), self.pooled.hidden(pooled[:, None])]
        if self.guidance is not None:
            assert guidance is not None  # checked at the call
            parts.append(self.guidance.hidden(features(guidance, FREQ, dtype)))
        return row_sum(*parts)


class Flux(eqx.Module):
    """Embeddings of image, text and conditions, stacked blocks of two streams and of one, head."""

    image: ColumnLinear
    text: ColumnLinear
    conditions: Conditions
    double: Double
    single: Single
    head: Head
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Flux":
        def linear(size: int) -> ColumnLinear:
            return ColumnLinear(Param("embed channels", (c.embed, size)), Param("embed", (c.embed,)))

        return cls(
            image=linear(c.in_channels),
            text=linear(c.text),
            conditions=Conditions.declare(c),
            double=layout.stack(Double.declare(c), c.double_layers),
            single=layout.stack(Single.declare(c), c.single_layers),
            head=Head.declare(c),
            config=c,
        )
