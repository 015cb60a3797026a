"""The blocks that FLUX.1 and FLUX.2 share: of two streams that attend to each other, of one with an mlp beside them.

Mesh axes: the batch over `data`, the tokens of text and image over `context`, heads and mlp over the tensor axes.
Shapes inside layers are one device's. Blocks of a kind are stacked, to be run by one `lax.scan` (`run_blocks`).
"""

import dataclasses
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Num

from shardzoo.zoo import layout
from shardzoo.zoo.attention import attention
from shardzoo.zoo.joint_streams import Pair, Shares, everywhere
from shardzoo.zoo.layers import (
    ColumnLinear,
    LayerNorm,
    Residual,
    RMSNorm,
    RowLinear,
    SplitInputLinear,
    gated,
    gather_residual,
    in_float32,
    row_sum,
    settled,
)
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import CONTEXT, TP
from shardzoo.zoo.remat import Remat, rematerialised
from shardzoo.zoo.rope import Rotary
from shardzoo.zoo.video_tokens import rotate_pairs, sinusoid

TIMES = 1000  # timesteps and guidance are multiplied by this
Model = TypeVar("Model")
Rows = tuple[Array, ...]  # of a modulation: shift, scale, gate; twice in a block of two streams


def rows_of(x: Float[Array, "*lead one row embed"]) -> Rows:
    """The rows of a modulation as they come out of its layer."""
    return tuple(x[..., row, :] for row in range(x.shape[-2]))


@runtime_checkable
class Sizes(Protocol):
    """What these layers ask of a model's config.

    Attributes:
        biases: whether linear layers have them.
        gated: whether the mlp's first layer is a pair, silu of one part times the other; gelu of one part otherwise.
        shared: whether all blocks of a kind are modulated alike, by layers that stand outside them.
    """

    biases: ClassVar[bool]
    gated: ClassVar[bool]
    shared: ClassVar[bool]

    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def out_channels(self) -> int: ...
    @property
    def eps(self) -> float: ...


# What a condition varies over before the modulations of all blocks are made of it, each device's from its share of the
# inputs and for its share of the tokens: backwards their sums are then one, after all loops.
SUMMED = frozenset((*TP, CONTEXT))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How a model's `forward` runs; the options are explained there."""

    residual: Residual = "whole"
    remat: Remat = False
    dtype: Any = None


class Vector(eqx.Module):
    """Two layers with silu between them, from a few numbers to the stream's width; split over the tensor axes."""

    up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls, c: Sizes, size: int) -> "Vector":
        return cls(
            up=ColumnLinear(
                Param("cond channels", (c.embed, size), {"cond": TP}),
                Param("cond", (c.embed,), {"cond": TP}) if c.biases else None,
            ),
            down=RowLinear(Param("embed cond", (c.embed, c.embed), {"cond": TP}), _bias(c)),
        )

    def hidden(self, x: Float[Array, "batch one channels"]) -> tuple[RowLinear, Array]:
        """The second layer and what goes into it, for `row_sum`."""
        return self.down, jax.nn.silu(self.up(x))


def features(x: Num[Array, " batch"], size: int, dtype: Any) -> Float[Array, "batch one freq"]:
    """Those of timesteps or guidance, multiplied in `dtype`, as the references do."""
    return sinusoid(x.astype(dtype) * jnp.asarray(TIMES, dtype), size).astype(dtype)[:, None]


def modulation(c: Sizes, rows: int) -> SplitInputLinear:
    """A layer that gives `rows` vectors from the conditions; large, so split on its input."""
    return SplitInputLinear(
        Param("block embed cond", (rows, c.embed, c.embed), {"cond": TP}),
        Param("block embed", (rows, c.embed)) if c.biases else None,
    )


def modulated(
    x: Float[Array, "batch part_seq embed"], norm: LayerNorm, shift: Array, scale: Array
) -> Float[Array, "batch part_seq embed"]:
    """The stream, normed, scaled and shifted."""
    x, scale, shift = settled((x, scale, shift))
    return settled(norm(x) * (1 + scale) + shift)


class Heads(eqx.Module):
    """Queries, keys and values, q and k normed per head: `qkv[B, S, 3, H_TP, D] = x[B, S, E] . W[3, H_TP, D, E]`."""

    qkv: ColumnLinear
    q_norm: RMSNorm
    k_norm: RMSNorm

    @classmethod
    def declare(cls, c: Sizes) -> "Heads":
        shape = (3, c.heads, c.head_dim)
        return cls(
            qkv=ColumnLinear(
                Param("block heads head_dim embed", (*shape, c.embed), {"heads": TP}),
                Param("block heads head_dim", shape, {"heads": TP}) if c.biases else None,
            ),
            q_norm=RMSNorm(Param("head_dim", (c.head_dim,)), eps=c.eps),
            k_norm=RMSNorm(Param("head_dim", (c.head_dim,)), eps=c.eps),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], turn: Rotary
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq two heads head_dim"]]:
        return self.turned(self.qkv(x), self.scales, turn)

    @property
    def scales(self) -> Float[Array, "two one head_dim"]:
        """Weights of both norms."""
        weights: list[Any] = [self.q_norm.weight, self.k_norm.weight]
        return jnp.stack(weights)[:, None]

    def turned(
        self,
        qkv: Float[Array, "batch seq three heads head_dim"],
        scales: Float[Array, "*seq two one head_dim"],
        turn: Rotary,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq two heads head_dim"]]:
        """Queries, and keys and values: queries and keys normed with these weights and turned.

        Side by side, as they come: less to compile for a TPU, and fewer bytes moved.
        """
        batch, seq, _, heads, head_dim = qkv.shape
        qk = self.q_norm(qkv[:, :, :2], scales).reshape(batch, seq, 2 * heads, head_dim)
        qk = rotate_pairs(qk, turn)
        return qk[:, :, :heads], jnp.stack([qk[:, :, heads:], qkv[:, :, 2]], axis=2)


def up(c: Sizes) -> ColumnLinear:
    """The mlp's first layer; of a gated one both parts under a leading whole dim, the gate first."""
    pair = ("block ", (2,)) if c.gated else ("", ())
    dims, shape = f"{pair[0]}mlp", (*pair[1], c.mlp)
    bias = Param(dims, shape, {"mlp": TP}) if c.biases else None
    return ColumnLinear(Param(f"{dims} embed", (*shape, c.embed), {"mlp": TP}), bias)


def activated(y: Float[Array, "batch seq *block_mlp"]) -> Float[Array, "batch seq mlp"]:
    """What follows the mlp's first layer: of a pair silu of the first part times the second, else gelu."""
    if y.ndim == 4:
        return settled(gated(jax.nn.silu, y))
    return settled(in_float32(jax.nn.gelu, y))


def down(c: Sizes, bias: Param | None) -> RowLinear:
    return RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}), bias)


def out(c: Sizes) -> RowLinear:
    return RowLinear(Param("embed heads head_dim", (c.embed, c.heads, c.head_dim), {"heads": TP}), _bias(c))


def _bias(c: Sizes) -> Param | None:
    return Param("embed", (c.embed,)) if c.biases else None


class Stream(eqx.Module):
    """One stream's half of a block of two, in two parts round the attention.

    Collectives, all over the tensor axes: with the "whole" residual two all-reduces; with "seq" two all-gathers and two
    reduce-scatters. `modulation`, of blocks with one of their own, is run beforehand, for all blocks at once.
    """

    modulation: SplitInputLinear | None
    attn: Heads
    out: RowLinear
    up: ColumnLinear
    down: RowLinear
    norm: LayerNorm

    @classmethod
    def declare(cls, c: Sizes) -> "Stream":
        return cls(
            modulation=None if c.shared else modulation(c, 6),
            attn=Heads.declare(c),
            out=out(c),
            up=up(c),
            down=down(c, _bias(c)),
            norm=LayerNorm(eps=c.eps),
        )

    def project(
        self, x: Float[Array, "batch part_seq embed"], rows: Rows, residual: Residual
    ) -> Float[Array, "batch seq three heads head_dim"]:
        """Queries, keys and values; `rows` are the modulation's: shift, scale, gate, and again for the mlp."""
        return self.attn.qkv(gather_residual(modulated(x, self.norm, *rows[:2]), residual))

    def finish(
        self,
        x: Float[Array, "batch part_seq embed"],
        attended: Float[Array, "batch seq heads head_dim"],
        rows: Rows,
        residual: Residual,
    ) -> Float[Array, "batch part_seq embed"]:
        """The stream after this block, from what the queries got."""
        _, _, gate, shift, scale, mlp_gate = rows
        x = settled(x + gate * self.out(attended, residual))
        y = gather_residual(modulated(x, self.norm, shift, scale), residual)
        return x + mlp_gate * self.down(activated(self.up(y)), residual)


class Double(eqx.Module):
    """A block of two streams, each with weights of its own, that attend to each other.

    Collectives: those of two `Stream`s and of one attention.
    """

    text: Stream
    image: Stream

    @classmethod
    def declare(cls, c: Sizes) -> "Double":
        return cls(text=Stream.declare(c), image=Stream.declare(c))

    def __call__(
        self,
        streams: Pair,
        rows: tuple[Rows, Rows],
        turns: tuple[Pair, Pair],
        valid: tuple[Bool[Array, "one text"], Bool[Array, "one image"]] | None,
        residual: Residual,
    ) -> Pair:
        """The streams after this block: text, image. `valid` tells apart tokens and padding."""
        halves = (self.text, self.image)
        qkv = [half.project(x, r, residual) for half, x, r in zip(halves, streams, rows, strict=True)]
        attended = self.attended((qkv[0], qkv[1]), turns, valid)
        parts = zip(halves, streams, attended, rows, strict=True)
        text, image = (half.finish(x, found, r, residual) for half, x, found, r in parts)
        return text, image

    def attended(
        self,
        qkv: tuple[Float[Array, "batch text three heads head_dim"], Float[Array, "batch image three heads head_dim"]],
        turns: tuple[Pair, Pair],
        valid: tuple[Bool[Array, "one text"], Bool[Array, "one image"]] | None,
    ) -> tuple[Float[Array, "batch text heads head_dim"], Float[Array, "batch image heads head_dim"]]:
        """What the queries of both streams get from the keys of both.

        Normed and turned as one sequence, text then image: a TPU's compiler sees that once, and in the shapes of the
        blocks of one stream.
        """
        size, joined = qkv[0].shape[1], jnp.concatenate(qkv, axis=1)
        cos, sin = (jnp.concatenate(pair, axis=1) for pair in zip(*turns, strict=True))
        of_text = (jnp.arange(joined.shape[1]) < size)[:, None, None, None]
        scales = jnp.where(of_text, self.text.attn.scales, self.image.attn.scales)
        q, kv = self.text.attn.turned(joined, scales, (cos, sin))
        mask = None if valid is None else everywhere(jnp.concatenate(valid, axis=1), q)
        out = attention(q, kv, key_mask=mask)
        return out[:, :size], out[:, size:]


class Single(eqx.Module):
    """A block of one stream, attention beside the mlp: `y = psum_TP(o . Wo + h . Wd) + b`.

    Collectives over the tensor axes: with the "whole" residual one all-reduce; with "seq" one all-gather and one
    reduce-scatter. Besides, those of one attention.
    """

    modulation: SplitInputLinear | None
    attn: Heads
    out: RowLinear
    up: ColumnLinear
    down: RowLinear
    norm: LayerNorm

    @classmethod
    def declare(cls, c: Sizes) -> "Single":
        return cls(
            modulation=None if c.shared else modulation(c, 3),
            attn=Heads.declare(c),
            out=out(c),
            up=up(c),
            down=down(c, None),  # `out` has the bias of both
            norm=LayerNorm(eps=c.eps),
        )

    def __call__(
        self,
        x: Float[Array, "batch part_seq embed"],
        rows: Rows,
        turn: Rotary,
        mask: Bool[Array, "batch seq"] | None,
        residual: Residual,
    ) -> Float[Array, "batch part_seq embed"]:
        """The stream after this block; `mask` hides padding."""
        shift, scale, gate = rows
        normed = gather_residual(modulated(x, self.norm, shift, scale), residual)
        attended = attention(*self.attn(normed, turn), key_mask=mask)
        return x + gate * row_sum((self.out, attended), (self.down, activated(self.up(normed))), residual=residual)


class Head(eqx.Module):
    """Norm, modulation (scale, then shift) and the layer that gives the image's tokens. No collective of its own."""

    modulation: SplitInputLinear
    norm: LayerNorm
    out: ColumnLinear

    @classmethod
    def declare(cls, c: Sizes) -> "Head":
        return cls(
            modulation=modulation(c, 2),
            norm=LayerNorm(eps=c.eps),
            out=ColumnLinear(
                Param("channels embed", (c.out_channels, c.embed)),
                Param("channels", (c.out_channels,)) if c.biases else None,
            ),
        )

    def __call__(self, x: Float[Array, "batch part_seq embed"], rows: Rows) -> Float[Array, "batch part_seq channels"]:
        scale, shift = rows
        return self.out(modulated(x, self.norm, shift, scale))


@runtime_checkable
class Doubles(Protocol):
    """A model's stacked blocks of two streams, live or declared."""

    @property
    def double(self) -> Double: ...


@runtime_checkable
class Blocks(Doubles, Protocol):
    """A model's stacked blocks of both kinds."""

    @property
    def single(self) -> Single: ...


def run_blocks(
    model: Blocks,
    declared: Blocks,
    streams: Pair,
    rows: tuple[tuple[Rows, Rows], Rows],
    turns: tuple[Pair, Pair],
    shares: Shares,
    *,
    shared: bool,
    remat: Remat,
) -> Float[Array, "batch part_seq embed"]:
    """The image's stream after all blocks.

    `rows` modulate the blocks of two streams (text, image) and those of one; each has a leading dim `layer`, unless
    they are `shared` by all blocks.
    """
    valid, residual = shares.valid(), shares.residual
    turn = tuple(shares.joined(*pair) for pair in zip(*turns, strict=True))
    mask = None if valid is None else everywhere(shares.joined(*valid), streams[1])

    def double(streams: Pair, inputs: Any) -> tuple[Pair, None]:
        block, own = inputs
        block = layout.gather_at_rest(block, declared.double)
        return block(streams, rows[0] if shared else own, turns, valid, residual), None

    def single(x: Array, inputs: Any) -> tuple[Array, None]:
        block, own = inputs
        block = layout.gather_at_rest(block, declared.single)
        return block(x, rows[1] if shared else own, turn, mask, residual), None

    double, single = (rematerialised(body, remat) for body in (double, single))
    own = (None, None) if shared else rows
    streams, _ = lax.scan(double, streams, (model.double, own[0]))
    size = streams[0].shape[1]
    x, _ = lax.scan(single, jnp.concatenate(streams, axis=1), (model.single, own[1]))
    return x[:, size:]


def ends_in_turn(condition: Array, model: Model, ends: tuple[str, ...]) -> tuple[Array, Model]:
    """Both, with gradients of these parts of the model after that of the condition (`layout.in_turn`): it is the last.

    It comes from the modulations of all blocks, and so after all loops.
    """
    whole: Any = model  # a module, and so a dataclass
    condition, those = layout.in_turn(condition, {name: getattr(whole, name) for name in ends}, CONTEXT)
    return condition, dataclasses.replace(whole, **those)


def streams_dtype(model: Doubles, run: Run) -> Any:
    """Dtype of the activations: that of the blocks' weights unless `run` names one."""
    return model.double.image.up.weight.dtype if run.dtype is None else run.dtype
