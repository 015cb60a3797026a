"""The layers of Wan, for every member of Wan2.1 and Wan2.2.

Source: `WanModel` of the Wan2.1 and Wan2.2 repositories and `WanTransformer3DModel` of diffusers 0.42. The members
differ in sizes and in the image branch that `Config.image` says; the two experts of A14B are two models of one config.

Mesh axes: the batch over `data`, the video's tokens over `context`, heads and mlp over the tensor axes. Shapes inside
layers are one device's. The blocks are stacked, to be run by one `lax.scan`.

As in the original, the stream between blocks, the norms, the modulation, the timestep's layers and the head are in
float32 whatever the dtype of the activations.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from shardzoo.errors import fail_if, not_above_zero
from shardzoo.zoo import layout
from shardzoo.zoo.attention import cross_attention
from shardzoo.zoo.layers import (
    SEQ,
    WHOLE_STREAM,
    ColumnLinear,
    LayerNorm,
    Residual,
    RMSNorm,
    RowLinear,
    SplitInputLinear,
    contract,
    exact_gelu,
    gather_residual,
    in_float32,
    norm_together,
    own_share,
    settled,
)
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import TP
from shardzoo.zoo.rope import Rotary
from shardzoo.zoo.video_tokens import Sizes, rotate_pairs, sinusoid

Host = Array | np.ndarray  # what the public functions take
IMAGE_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        in_channels, out_channels: of the latents, condition channels among those that come in.
        heads, head_dim, layers, mlp: sizes; the stream is heads * head_dim wide.
        text: width of the text encoder's states.
        image: width of the image encoder's states; None for no image branch.
        image_positions: length of the learned positions that are added to them; None for none.
        freq: number of features of a timestep.
        patch: of a token, in time, height and width.
        eps: of the norms, but those of the image branch.
    """

    in_channels: int
    out_channels: int
    heads: int
    head_dim: int
    layers: int
    mlp: int
    text: int = 4096
    image: int | None = None
    image_positions: int | None = None
    freq: int = 256
    patch: Sizes = (1, 2, 2)
    eps: float = 1e-6

    def __post_init__(self):
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("patch", "eps")}
        sizes |= {f"patch[{i}]": p for i, p in enumerate(self.patch)}
        problems = [f"{n}={v} is not at least 1: change it" for n, v in sizes.items() if v is not None and v < 1]
        problems += [
            f"{name}={sizes[name]} is odd (its features come in pairs): change it"
            for name in ("head_dim", "freq")
            if sizes[name] % 2
        ]
        if self.image_positions is not None and self.image is None:
            problems.append(f"image_positions={self.image_positions} without image: give image its width")
        problems += not_above_zero(self, "eps")
        fail_if(problems, "wan config")

    @property
    def embed(self) -> int:
        return self.heads * self.head_dim


class Timesteps(NamedTuple):
    """Few distinct timesteps for many tokens: token i of a row has the timestep values[row, index[row, i]]."""

    values: Num[Host, "batch count"]
    index: Int[Host, "batch seq"]


class Context(NamedTuple):
    """Keys (normed) and values of every block's cross-attention: the same at each step of a sampling run.

    Keys and values stand apart, as `two`, outside the dims that one block reads whole; a block's own have no `layer`.
    """

    text: Float[Array, "*layer two batch kv_seq heads head_dim"]
    image: Float[Array, "*layer two batch image_seq heads head_dim"] | None = None


class Modulation(NamedTuple):
    """Shifts, scales and gates before each block's own table is added; float32, whole in embed.

    The second dim counts timesteps: one for all tokens; or one a token, split like the stream; or, with `index` (split
    like the stream), the distinct ones.
    """

    blocks: Float[Array, "batch count six embed"]
    head: Float[Array, "batch count embed"]
    index: Int[Array, "batch part_seq"] | None = None

    @property
    def along(self) -> dict[str, Array]:
        """What of it is split like the stream, by name."""
        if self.index is not None:
            return {"index": self.index}
        return {"blocks": self.blocks} if self.blocks.shape[SEQ] > 1 else {}

    def rows(self, table: Float[Array, "rows embed"], values: Array) -> list[Float[Array, "batch n embed"]]:
        """The rows of table + values, one for all tokens or for each of this device's."""
        added = table.astype(jnp.float32) + values
        return [self._each(added[:, :, row]) for row in range(len(table))]

    def _each(self, values: Float[Array, "batch count embed"]) -> Float[Array, "batch n embed"]:
        if self.index is None:
            return values
        return jnp.take_along_axis(values, self.index[..., None], axis=1)


def _normed(
    x: Float[Array, "batch part_seq embed"],
    eps: float,
    scale: Float[Array, "one_or_batch n embed"],
    shift: Float[Array, "one_or_batch n embed"],
    dtype: Any,
) -> Float[Array, "batch part_seq embed"]:
    """The stream, normed, scaled and shifted in float32: alike everywhere, so that a TPU's compiler sees one step."""
    x, scale, shift = settled((x, scale, shift))
    return settled((LayerNorm(eps=eps)(x) * scale + shift).astype(dtype))


class SelfAttention(eqx.Module):
    """Attention among the video's tokens, with q and k normed over all heads together.

    `qkv[B, S, 3, H_TP, D] = x[B, S, E] . W[3, H_TP, D, E]`; one psum over the tensor axes for the mean squares of q and
    k; `y[B, S, E] = psum_TP(o[B, S, H_TP, D] . Wo[E, H_TP, D])`, or a reduce-scatter along seq.
    """

    qkv: ColumnLinear
    q_norm: RMSNorm
    k_norm: RMSNorm
    out: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "SelfAttention":
        heads = (c.heads, c.head_dim)
        return cls(
            qkv=ColumnLinear(
                Param("block heads head_dim embed", (3, *heads, c.embed), {"heads": TP}),
                Param("block heads head_dim", (3, *heads), {"heads": TP}),
            ),
            q_norm=_head_norm(c),
            k_norm=_head_norm(c),
            out=_out(c),
        )

    def project(
        self, x: Float[Array, "batch seq embed"], turn: Rotary
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq two heads head_dim"]]:
        """Queries, and keys and values."""
        qkv = self.qkv(x)
        batch, seq, _, heads, head_dim = qkv.shape
        # Side by side, as they come: less to compile for a TPU, and fewer bytes moved.
        scales: list[Any] = [self.q_norm.weight, self.k_norm.weight]
        qk = self.q_norm(qkv[:, :, :2], jnp.stack(scales))
        qk = rotate_pairs(qk.reshape(batch, seq, 2 * heads, head_dim), turn)
        return qk[:, :, :heads], jnp.stack([qk[:, :, heads:], qkv[:, :, 2]], axis=2)


def _head_norm(c: Config) -> RMSNorm:
    return RMSNorm(Param("heads head_dim", (c.heads, c.head_dim), {"heads": TP}), eps=c.eps, axis=TP)


def _out(c: Config) -> RowLinear:
    weight = Param("embed heads head_dim", (c.embed, c.heads, c.head_dim), {"heads": TP})
    return RowLinear(weight, Param("embed", (c.embed,)))


class CrossKeys(eqx.Module):
    """Keys and values of one kind of condition: `kv[B, T, 2, H_TP, D] = c[B, T, E] . W[2, H_TP, D, E]`."""

    kv: ColumnLinear
    k_norm: RMSNorm

    @classmethod
    def declare(cls, c: Config) -> "CrossKeys":
        shape = (2, c.heads, c.head_dim)
        return cls(
            kv=ColumnLinear(
                Param("block heads head_dim embed", (*shape, c.embed), {"heads": TP}),
                Param("block heads head_dim", shape, {"heads": TP}),
            ),
            k_norm=_head_norm(c),
        )


class CrossAttention(eqx.Module):
    """Attention to the text and, each with a softmax of its own, to the image; the two results are added.

    Text and image are whole on every device of `context`. One psum over the tensor axes for the mean square of q, one
    for those of the keys (of text and image together), one (or a reduce-scatter) for the output.
    """

    q: ColumnLinear
    q_norm: RMSNorm
    text: CrossKeys
    image: CrossKeys | None
    out: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "CrossAttention":
        heads = (c.heads, c.head_dim)
        return cls(
            q=ColumnLinear(
                Param("heads head_dim embed", (*heads, c.embed), {"heads": TP}),
                Param("heads head_dim", heads, {"heads": TP}),
            ),
            q_norm=_head_norm(c),
            text=CrossKeys.declare(c),
            image=None if c.image is None else CrossKeys.declare(c),
            out=_out(c),
        )

    def context(
        self, text: Float[Array, "batch kv_seq embed"], image: Float[Array, "batch image_seq embed"] | None
    ) -> Context:
        """This block's keys and values."""
        pairs = [(self.text, text)] + ([] if self.image is None else [(self.image, image)])
        projected = [keys.kv(x) for keys, x in pairs]
        normed = norm_together(*((keys.k_norm, kv[:, :, 0]) for (keys, _), kv in zip(pairs, projected, strict=True)))
        return Context(*(jnp.stack([k, kv[:, :, 1]]) for k, kv in zip(normed, projected, strict=True)))

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, residual: Residual = WHOLE_STREAM
    ) -> Float[Array, "batch part_seq embed"]:
        q = self.q_norm(self.q(x))
        given = [kv for kv in context if kv is not None]
        attended = [cross_attention(q, jnp.stack([k, v], axis=2)) for k, v in given]
        return self.out(sum(attended[1:], attended[0]), residual)


class Mlp(eqx.Module):
    """y = down(gelu(up x)), gelu by tanh; x and y whole, the mlp dim split over the tensor axes."""

    up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "Mlp":
        return cls(
            up=ColumnLinear(Param("mlp embed", (c.mlp, c.embed), {"mlp": TP}), Param("mlp", (c.mlp,), {"mlp": TP})),
            down=RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}), Param("embed", (c.embed,))),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], residual: Residual = WHOLE_STREAM
    ) -> Float[Array, "batch part_seq embed"]:
        return self.down(settled(in_float32(jax.nn.gelu, self.up(x))), residual)


class Block(eqx.Module):
    """One layer on a stream in float32, in steps that each work on any stretch of its tokens.

    Collectives of a block, besides those of `attention` and, where the keys of the condition are not given, one
    all-reduce for their norm; all over the tensor axes: two small all-reduces for the norms of queries (and keys), and
    with the "whole" residual three all-reduces, with "seq" three all-gathers and three reduce-scatters.
    """

    table: Float[Array | Param, "block embed"]
    attn: SelfAttention
    cross_norm: LayerNorm
    cross: CrossAttention
    mlp: Mlp
    plain_norm: LayerNorm

    @classmethod
    def declare(cls, c: Config) -> "Block":
        return cls(
            table=Param("block embed", (6, c.embed)),
            attn=SelfAttention.declare(c),
            cross_norm=LayerNorm(Param("embed", (c.embed,)), Param("embed", (c.embed,)), eps=c.eps),
            cross=CrossAttention.declare(c),
            mlp=Mlp.declare(c),
            plain_norm=LayerNorm(eps=c.eps),
        )

    def project(
        self,
        x: Float[Array, "batch part_seq embed"],
        modulation: Modulation,
        turn: Rotary,
        dtype: Any,
        residual: Residual = WHOLE_STREAM,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq two heads head_dim"]]:
        """Queries, and keys and values, in `dtype` from the stream."""
        shift, scale, *_ = modulation.rows(self.table, modulation.blocks)
        y = _normed(x, self.plain_norm.eps, 1 + scale, shift, dtype)
        return self.attn.project(gather_residual(y, residual), turn)

    def attend(
        self,
        x: Float[Array, "batch part_seq embed"],
        attended: Float[Array, "batch seq heads head_dim"],
        modulation: Modulation,
        context: Context,
        residual: Residual = WHOLE_STREAM,
    ) -> Float[Array, "batch part_seq embed"]:
        """The stream with what the queries got added, and what the condition then gives."""
        gate = modulation.rows(self.table, modulation.blocks)[2]
        weight, bias = (v.astype(jnp.float32)[None, None] for v in (self.cross_norm.weight, self.cross_norm.bias))
        x = settled(x + self.attn.out(attended, residual).astype(gate.dtype) * gate)
        y = _normed(x, self.cross_norm.eps, weight, bias, attended.dtype)
        return x + self.cross(gather_residual(y, residual), context, residual).astype(x.dtype)

    def feed(
        self,
        x: Float[Array, "batch part_seq embed"],
        modulation: Modulation,
        dtype: Any,
        residual: Residual = WHOLE_STREAM,
    ) -> Float[Array, "batch part_seq embed"]:
        """The stream after this block, from what `attend` gave."""
        *_, shift, scale, gate = modulation.rows(self.table, modulation.blocks)
        y = _normed(x, self.plain_norm.eps, 1 + scale, shift, dtype)
        return x + self.mlp(gather_residual(y, residual), residual).astype(gate.dtype) * gate


class TimeEmbedding(eqx.Module):
    """A timestep's features through two layers, and six times as wide through a third; float32.

    The weights are split over the tensor axes and their results, which are small, whole: two all-reduces.
    """

    features: ColumnLinear
    out: RowLinear
    project: SplitInputLinear

    @classmethod
    def declare(cls, c: Config) -> "TimeEmbedding":
        return cls(
            features=ColumnLinear(
                Param("cond channels", (c.embed, c.freq), {"cond": TP}), Param("cond", (c.embed,), {"cond": TP})
            ),
            out=RowLinear(Param("embed cond", (c.embed, c.embed), {"cond": TP}), Param("embed", (c.embed,))),
            project=SplitInputLinear(
                Param("block embed cond", (6, c.embed, c.embed), {"cond": TP}), Param("block embed", (6, c.embed))
            ),
        )

    def __call__(
        self, timesteps: Num[Array, "batch count"], residual: Residual = WHOLE_STREAM
    ) -> tuple[Float[Array, "batch part_count six embed"], Float[Array, "batch part_count embed"]]:
        """What the blocks and what the head get; with "seq" each device's share along `count` over the tensor axes."""
        features = sinusoid(timesteps, self.features.weight.shape[-1])
        head = self.out(jax.nn.silu(self.features(features)))
        blocks = self.project(jax.nn.silu(head), residual)
        return blocks, head if residual == "whole" else own_share(head, TP)


class TextEmbedding(eqx.Module):
    """The text encoder's states in the stream's width: two layers with gelu by tanh. One all-reduce."""

    up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "TextEmbedding":
        return cls(
            up=ColumnLinear(
                Param("cond channels", (c.embed, c.text), {"cond": TP}), Param("cond", (c.embed,), {"cond": TP})
            ),
            down=RowLinear(Param("embed cond", (c.embed, c.embed), {"cond": TP}), Param("embed", (c.embed,))),
        )

    def __call__(self, text: Float[Array, "batch kv_seq channels"]) -> Float[Array, "batch kv_seq embed"]:
        return self.down(in_float32(jax.nn.gelu, self.up(text)))


class ImageEmbedding(eqx.Module):
    """The image encoder's states in the stream's width: norm, two layers with gelu (erf), norm. One all-reduce."""

    positions: Float[Array | Param, "kv_seq channels"] | None
    norm_in: LayerNorm
    up: ColumnLinear
    down: RowLinear
    norm_out: LayerNorm

    @classmethod
    def declare(cls, c: Config) -> "ImageEmbedding":
        assert c.image is not None

        def norm(dim: str, size: int) -> LayerNorm:
            return LayerNorm(Param(dim, (size,)), Param(dim, (size,)), eps=IMAGE_EPS)

        return cls(
            positions=None if c.image_positions is None else Param("kv_seq channels", (c.image_positions, c.image)),
            norm_in=norm("channels", c.image),
            up=ColumnLinear(
                Param("cond channels", (c.image, c.image), {"cond": TP}), Param("cond", (c.image,), {"cond": TP})
            ),
            down=RowLinear(Param("embed cond", (c.embed, c.image), {"cond": TP}), Param("embed", (c.embed,))),
            norm_out=norm("embed", c.embed),
        )

    def __call__(self, image: Float[Array, "batch kv_seq channels"]) -> Float[Array, "batch kv_seq embed"]:
        image = image if self.positions is None else image + self.positions.astype(image.dtype)
        return self.norm_out(self.down(in_float32(exact_gelu, self.up(self.norm_in(image)))))


class PatchEmbedding(eqx.Module):
    """A linear layer over a patch, its weight stored as that of a convolution. No collective."""

    weight: Float[Array | Param, "embed channels frames height width"]
    bias: Float[Array | Param, " embed"]

    @classmethod
    def declare(cls, c: Config) -> "PatchEmbedding":
        shape = (c.embed, c.in_channels, *c.patch)
        return cls(Param("embed channels frames height width", shape), Param("embed", (c.embed,)))

    def __call__(self, x: Float[Array, "batch part_seq patch_channels"]) -> Float[Array, "batch part_seq embed"]:
        # A TPU's compiler needs half the time for this change of shape in float32, which lies in tiles unpacked.
        weight = self.weight.astype(jnp.float32).reshape(len(self.weight), -1)
        return contract(x, weight) + self.bias.astype(x.dtype)


class Head(eqx.Module):
    """Norm, modulation and the layer that gives patches, their channels innermost; float32. No collective."""

    table: Float[Array | Param, "block embed"]
    norm: LayerNorm
    out: ColumnLinear

    @classmethod
    def declare(cls, c: Config) -> "Head":
        size = math.prod(c.patch) * c.out_channels
        return cls(
            table=Param("block embed", (2, c.embed)),
            norm=LayerNorm(eps=c.eps),
            out=ColumnLinear(Param("channels embed", (size, c.embed)), Param("channels", (size,))),
        )

    def __call__(
        self, x: Float[Array, "batch part_seq embed"], modulation: Modulation
    ) -> Float[Array, "batch part_seq channels"]:
        shift, scale = modulation.rows(self.table, modulation.head[:, :, None])
        return self.out(self.norm(x) * (1 + scale) + shift)


class Wan(eqx.Module):
    """Embeddings of patches, timesteps, text and image, stacked blocks, head."""

    patch: PatchEmbedding
    time: TimeEmbedding
    text: TextEmbedding
    image: ImageEmbedding | None
    blocks: Block
    head: Head
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Wan":
        return cls(
            patch=PatchEmbedding.declare(c),
            time=TimeEmbedding.declare(c),
            text=TextEmbedding.declare(c),
            image=None if c.image is None else ImageEmbedding.declare(c),
            blocks=layout.stack(Block.declare(c), c.layers),
            head=Head.declare(c),
            config=c,
        )
