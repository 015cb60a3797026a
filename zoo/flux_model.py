"""The layers of FLUX.1: blocks of two streams, blocks of one, and what the conditions give them.

Source: `Flux` of the black-forest-labs repository and `FluxTransformer2DModel` of diffusers 0.42. Mesh axes: the batch
over `data`, the tokens of text and image over `context`, heads and mlp over the tensor axes. Shapes inside layers are
one device's. Blocks of a kind are stacked, to be run by one `lax.scan`.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from shardzoo.errors import fail_if
from shardzoo.zoo import layout
from shardzoo.zoo.layers import (
    ColumnLinear,
    LayerNorm,
    Residual,
    RMSNorm,
    RowLinear,
    SplitInputLinear,
    gather_residual,
    row_sum,
)
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import TP
from shardzoo.zoo.rope import Rotary
from shardzoo.zoo.video_tokens import rotate_pairs, sinusoid

FREQ = 256  # features of a timestep
TIMES = 1000  # timesteps and guidance are multiplied by this


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
        fail_if(problems, "flux config")

    @property
    def embed(self) -> int:
        return self.heads * self.head_dim


class Vector(eqx.Module):
    """Two layers with silu between them, from a few numbers to the stream's width; split over the tensor axes."""

    up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls, c: Config, size: int) -> "Vector":
        return cls(
            up=ColumnLinear(
                Param("cond channels", (c.embed, size), {"cond": TP}), Param("cond", (c.embed,), {"cond": TP})
            ),
            down=RowLinear(Param("embed cond", (c.embed, c.embed), {"cond": TP}), Param("embed", (c.embed,))),
        )

    def hidden(self, x: Float[Array, "batch one channels"]) -> tuple[RowLinear, Array]:
        """The second layer and what goes into it, for `row_sum`."""
        return self.down, jax.nn.silu(self.up(x))


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

        def features(x: Num[Array, " batch"]) -> Float[Array, "batch one freq"]:
            return sinusoid(x.astype(dtype) * jnp.asarray(TIMES, dtype), FREQ).astype(dtype)[:, None]

        parts = [self.time.hidden(features(timesteps)), self.pooled.hidden(pooled[:, None])]
        if self.guidance is not None:
            assert guidance is not None  # checked at the call
            parts.append(self.guidance.hidden(features(guidance)))
        return row_sum(*parts)


def modulation(c: Config, rows: int) -> SplitInputLinear:
    """A layer that gives `rows` vectors from the conditions; large, so split on its input."""
    return SplitInputLinear(
        Param("block embed cond", (rows, c.embed, c.embed), {"cond": TP}), Param("block embed", (rows, c.embed))
    )


def modulated(
    x: Float[Array, "batch part_seq embed"], norm: LayerNorm, shift: Array, scale: Array
) -> Float[Array, "batch part_seq embed"]:
    """The stream, normed, scaled and shifted."""
    return norm(x) * (1 + scale) + shift


class Heads(eqx.Module):
    """Queries, keys and values, q and k normed per head: `qkv[B, S, 3, H_TP, D] = x[B, S, E] . W[3, H_TP, D, E]`."""

    qkv: ColumnLinear
    q_norm: RMSNorm
    k_norm: RMSNorm

    @classmethod
    def declare(cls, c: Config) -> "Heads":
        shape = (3, c.heads, c.head_dim)
        return cls(
            qkv=ColumnLinear(
                Param("block heads head_dim embed", (*shape, c.embed), {"heads": TP}),
                Param("block heads head_dim", shape, {"heads": TP}),
            ),
            q_norm=RMSNorm(Param("head_dim", (c.head_dim,)), eps=c.eps),
            k_norm=RMSNorm(Param("head_dim", (c.head_dim,)), eps=c.eps),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], turn: Rotary
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq two heads head_dim"]]:
        qkv = self.qkv(x)
        q, k = rotate_pairs(self.q_norm(qkv[:, :, 0]), turn), rotate_pairs(self.k_norm(qkv[:, :, 1]), turn)
        return q, jnp.stack([k, qkv[:, :, 2]], axis=2)


def up(c: Config) -> ColumnLinear:
    return ColumnLinear(Param("mlp embed", (c.mlp, c.embed), {"mlp": TP}), Param("mlp", (c.mlp,), {"mlp": TP}))


def down(c: Config, bias: bool = True) -> RowLinear:
    return RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}), Param("embed", (c.embed,)) if bias else None)


def out(c: Config) -> RowLinear:
    weight = Param("embed heads head_dim", (c.embed, c.heads, c.head_dim), {"heads": TP})
    return RowLinear(weight, Param("embed", (c.embed,)))


class Stream(eqx.Module):
    """One stream's half of a block of two, in two parts round the attention.

    Collectives, all over the tensor axes: with the "whole" residual two all-reduces; with "seq" two all-gathers and two
    reduce-scatters. `modulation` is run beforehand, for all blocks at once.
    """

    modulation: SplitInputLinear
    attn: Heads
    out: RowLinear
    up: ColumnLinear
    down: RowLinear
    norm: LayerNorm

    @classmethod
    def declare(cls, c: Config) -> "Stream":
        return cls(
            modulation=modulation(c, 6),
            attn=Heads.declare(c),
            out=out(c),
            up=up(c),
            down=down(c),
            norm=LayerNorm(eps=c.eps),
        )

    def project(
        self, x: Float[Array, "batch part_seq embed"], rows: list[Array], turn: Rotary, residual: Residual
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq two heads head_dim"]]:
        """Queries, and keys and values; `rows` are the modulation's: shift, scale, gate, and again for the mlp."""
        return self.attn(gather_residual(modulated(x, self.norm, *rows[:2]), residual), turn)

    def finish(
        self,
        x: Float[Array, "batch part_seq embed"],
        attended: Float[Array, "batch seq heads head_dim"],
        rows: list[Array],
        residual: Residual,
    ) -> Float[Array, "batch part_seq embed"]:
        """The stream after this block, from what the queries got."""
        _, _, gate, shift, scale, mlp_gate = rows
        x = x + gate * self.out(attended, residual)
        y = gather_residual(modulated(x, self.norm, shift, scale), residual)
        return x + mlp_gate * self.down(jax.nn.gelu(self.up(y), approximate=True), residual)


class Double(eqx.Module):
    """A block of two streams, each with weights of its own, that attend to each other."""

    text: Stream
    image: Stream

    @classmethod
    def declare(cls, c: Config) -> "Double":
        return cls(text=Stream.declare(c), image=Stream.declare(c))


class Single(eqx.Module):
    """A block of one stream, attention beside the mlp: `y = psum_TP(o . Wo + h . Wd) + b`.

    Collectives over the tensor axes: with the "whole" residual one all-reduce; with "seq" one all-gather and one
    reduce-scatter.
    """

    modulation: SplitInputLinear
    attn: Heads
    out: RowLinear
    up: ColumnLinear
    down: RowLinear
    norm: LayerNorm

    @classmethod
    def declare(cls, c: Config) -> "Single":
        return cls(
            modulation=modulation(c, 3),
            attn=Heads.declare(c),
            out=out(c),
            up=up(c),
            down=down(c, bias=False),
            norm=LayerNorm(eps=c.eps),
        )

    def finish(
        self,
        x: Float[Array, "batch part_seq embed"],
        normed: Float[Array, "batch seq embed"],
        attended: Float[Array, "batch seq heads head_dim"],
        gate: Array,
        residual: Residual,
    ) -> Float[Array, "batch part_seq embed"]:
        hidden = jax.nn.gelu(self.up(normed), approximate=True)
        return x + gate * row_sum((self.out, attended), (self.down, hidden), residual=residual)


class Head(eqx.Module):
    """Norm, modulation (scale, then shift) and the layer that gives the image's tokens. No collective of its own."""

    modulation: SplitInputLinear
    norm: LayerNorm
    out: ColumnLinear

    @classmethod
    def declare(cls, c: Config) -> "Head":
        return cls(
            modulation=modulation(c, 2),
            norm=LayerNorm(eps=c.eps),
            out=ColumnLinear(Param("channels embed", (c.out_channels, c.embed)), Param("channels", (c.out_channels,))),
        )

    def __call__(
        self, x: Float[Array, "batch part_seq embed"], rows: list[Array]
    ) -> Float[Array, "batch part_seq channels"]:
        scale, shift = rows
        return self.out(modulated(x, self.norm, shift, scale))


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
