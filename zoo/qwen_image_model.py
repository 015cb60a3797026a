"""The layers of Qwen-Image beside its blocks, which are in `flux_blocks`: config, conditions, text, the whole model.

Source: `QwenImageTransformer2DModel` of diffusers 0.42. Shapes inside layers are one device's.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Int, Num

from shardzoo.errors import fail_if, not_above_zero
from shardzoo.zoo import layout
from shardzoo.zoo.flux_blocks import TIMES, Double, Head, Vector
from shardzoo.zoo.layers import ColumnLinear, Leaf, RMSNorm, row_sum
from shardzoo.zoo.layout import Param
from shardzoo.zoo.video_tokens import sinusoid

FREQ = 256  # features of a timestep
KINDS = 2  # vectors that a model with `added_cond` may add to the timestep's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        in_channels, out_channels: of a token of the image: latent channels times the patch's area.
        patch: side of a patch, in latents.
        heads, head_dim, layers, mlp: sizes; the streams are heads * head_dim wide.
        text: width of the text encoder's states.
        zero_cond: whether reference images are modulated as of timestep 0 (Edit-2511).
        layered: whether images are layers of one, the last being what they were taken from (Layered).
        added_cond: whether one of `KINDS` learned vectors is added to the timestep's (Layered).
        axes: dims of a head that each axis of the positions turns.
        theta: base of the rotary frequencies.
        eps: of the norms.
    """

    biases: ClassVar[bool] = True
    gated: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    in_channels: int = 64
    out_channels: int = 64
    patch: int = 2
    heads: int = 24
    head_dim: int = 128
    layers: int = 60
    mlp: int = 12288
    text: int = 3584
    zero_cond: bool = False
    layered: bool = False
    added_cond: bool = False
    axes: tuple[int, ...] = (16, 56, 56)
    theta: float = 1e4
    eps: float = 1e-6

    def __post_init__(self):
        names = ("in_channels", "out_channels", "patch", "heads", "head_dim", "layers", "mlp", "text")
        problems = [f"{n}={getattr(self, n)} is not at least 1: change it" for n in names if getattr(self, n) < 1]
        problems += [f"axes={self.axes}: {n} is not an even number of dims: change it" for n in self.axes if n % 2]
        if len(self.axes) != 3 or sum(self.axes) != self.head_dim:
            problems.append(
                f"axes={self.axes} are not three of {sum(self.axes)} dims in all, head_dim={self.head_dim}: change one"
            )
        if self.patch > 0 and self.out_channels % self.patch**2:
            problems.append(
                f"out_channels={self.out_channels} does not divide by {self.patch**2} (patch={self.patch}): change one"
            )
        problems += not_above_zero(self, "theta", "eps")
        fail_if(problems, "qwen_image config")

    @property
    def embed(self) -> int:
        return self.heads * self.head_dim


class Conditions(eqx.Module):
    """The timestep, and for models that have it one of a few learned vectors, as one vector: one all-reduce."""

    time: Vector
    added: Float[Leaf, "kinds embed"] | None

    @classmethod
    def declare(cls, c: Config) -> "Conditions":
        return cls(
            time=Vector.declare(c, FREQ),
            added=Param("kinds embed", (KINDS, c.embed)) if c.added_cond else None,
        )

    def __call__(
        self, timesteps: Num[Array, " rows"], kinds: Int[Array, " rows"] | None, dtype: Any
    ) -> Float[Array, "rows one embed"]:
        """In `dtype`, which the timesteps are rounded to first, as the reference does."""
        features = sinusoid(timesteps.astype(dtype), FREQ, scale=float(TIMES)).astype(dtype)
        x = row_sum(self.time.hidden(features[:, None]))
        if self.added is None:
            return x
        assert kinds is not None  # checked at the call
        return x + self.added[kinds][:, None].astype(dtype)


class Text(eqx.Module):
    """States of the text encoder, normed, as the text's stream. Nothing split."""

    norm: RMSNorm
    linear: ColumnLinear

    @classmethod
    def declare(cls, c: Config) -> "Text":
        return cls(norm=RMSNorm(Param("channels", (c.text,)), eps=c.eps), linear=_linear(c, c.text))

    def __call__(self, x: Float[Array, "batch part_seq channels"]) -> Float[Array, "batch part_seq embed"]:
        return self.linear(self.norm(x))


def _linear(c: Config, size: int) -> ColumnLinear:
    return ColumnLinear(Param("embed channels", (c.embed, size)), Param("embed", (c.embed,)))


class QwenImage(eqx.Module):
    """Embeddings of image, text and conditions, stacked blocks of two streams, head."""

    image: ColumnLinear
    text: Text
    conditions: Conditions
    double: Double
    head: Head
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "QwenImage":
        return cls(
            image=_linear(c, c.in_channels),
            text=Text.declare(c),
            conditions=Conditions.declare(c),
            double=layout.stack(Double.declare(c), c.layers),
            head=Head.declare(c),
            config=c,
        )
