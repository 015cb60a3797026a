"""Text encoders of the T5 kind: UMT5 (Wan) and T5 v1.1 (FLUX.1) from one file.

Source: UMT5EncoderModel and T5EncoderModel of transformers 5, and the encoder of the Wan2.1 repository, which is UMT5.
The two differ in where the biases by distance come from: UMT5 has a table in every block, T5 one for all of them.
Attention is not scaled by 1 / sqrt(head_dim), no layer has a bias, and gated GELU is the tanh form.

Mesh axes: the batch over `data`, the sequence over `context`, heads, mlp and vocabulary over the tensor axes; `pipe`
must be 1. Shapes inside layers are one device's. The blocks are stacked and run by one `lax.scan`.

Memory: attention takes its bias as an array of (heads on a device) x queries x keys, made for one block at a time, and
making it takes as much again twice or three times. For 512 tokens and 64 heads it has 32 MiB in bfloat16; with 4,096
tokens and 8 heads on a device a program for TPU v5e needs 1.05 GiB besides the weights, with 16,384 tokens 16 times as
much. It shrinks with the tensor and context degrees.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, jaxtyped

from shardzoo.errors import fail_if, not_above_zero
from shardzoo.zoo import layout
from shardzoo.zoo.attention import attention
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.in_place import block_at
from shardzoo.zoo.language_model import no_tokens, pad, sequence_positions
from shardzoo.zoo.layers import (
    ColumnLinear,
    Embedding,
    Leaf,
    Residual,
    RMSNorm,
    RowLinear,
    check_residual,
    gated,
    gather_residual,
)
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import CONTEXT, DATA, TP
from shardzoo.zoo.remat import Remat, check_remat, rematerialised

Host = Array | np.ndarray  # what the public functions take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        vocab, embed, layers, heads, head_dim, mlp: sizes; heads * head_dim need not be embed.
        buckets: classes of distances from a query to a key, half of them for keys before it, half for keys after.
        max_distance: distance from which all are of the last class of their side.
        shared_bias: one table of biases for all blocks (T5) rather than one in each (UMT5).
        norm_eps: of every RMS norm.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    head_dim: int
    mlp: int
    buckets: int = 32
    max_distance: int = 128
    shared_bias: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self):
        sizes = ("vocab", "embed", "layers", "heads", "head_dim", "mlp")
        problems = [f"{n}={getattr(self, n)} is not at least 1: change it" for n in sizes if getattr(self, n) < 1]
        if self.buckets < 4:
            problems.append(f"buckets={self.buckets} is not at least 4 (two for each side): change it")
        if self.max_distance <= self.buckets // 4:
            problems.append(
                f"max_distance={self.max_distance} is not above the {self.buckets // 4} distances that have a bucket of"
                f" their own (buckets={self.buckets} / 4): change one of them"
            )
        problems += not_above_zero(self, "norm_eps")
        fail_if(problems, "t5 config")


def buckets_of(config: Config, distances: np.ndarray) -> np.ndarray:
    """The bucket of each distance (position of the key minus that of the query), float32 logarithms as in the source.

    Distances below a quarter of the buckets have their own, larger ones share buckets evenly in their logarithm.
    """
    side = config.buckets // 2
    exact = side // 2
    size = np.abs(distances)
    ratio = np.log(np.maximum(size, exact).astype(np.float32) / np.float32(exact))
    steps = ratio / np.float32(math.log(config.max_distance / exact)) * np.float32(side - exact)
    far = np.minimum(exact + steps.astype(np.int64), side - 1)
    return np.where(size < exact, size, far) + np.where(distances > 0, side, 0)


class DistanceBias(eqx.Module):
    """What is added to the logits of attention, by bucket of the distance and by head; heads split. No collective."""

    weight: Float[Leaf, "bucket heads"]

    @classmethod
    def declare(cls, c: Config) -> "DistanceBias":
        return cls(Param("bucket heads", (c.buckets, c.heads), {"heads": TP}))

    def __call__(self, buckets: np.ndarray) -> Float[Array, "heads distances"]:
        return self.weight[buckets].T


class Attention(eqx.Module):
    """Self-attention of all tokens to all: x whole in embed, heads split; output whole again.

    `qkv[B, S, 3, H_TP, D] = x[B, S, E] . W[3, H_TP, D, E]`, `y[B, S, E] = psum_TP(o[B, S, H_TP, D] . Wo[E, H_TP, D])`.
    """

    qkv: ColumnLinear
    out: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "Attention":
        heads = (c.heads, c.head_dim)
        return cls(
            qkv=ColumnLinear(Param("block heads head_dim embed", (3, *heads, c.embed), {"heads": TP})),
            out=RowLinear(Param("embed heads head_dim", (c.embed, *heads), {"heads": TP})),
        )

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        bias: Float[Array, "heads distances"],
        lengths: Int[Array, " batch"] | None,
        mask: Bool[Array, "batch context_seq"] | None,
        residual: Residual,
    ) -> Float[Array, "batch part_seq embed"]:
        qkv = self.qkv(x)
        attended = attention(
            qkv[:, :, 0], qkv[:, :, 1:], scale=1.0, lengths=lengths, key_mask=mask, distance_bias=bias
        )  # fmt: skip
        return self.out(attended, residual)


class Mlp(eqx.Module):
    """y = down(gelu(gate x) * up x); x and y whole, the mlp dim split over the tensor axes."""

    gate_up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "Mlp":
        return cls(
            gate_up=ColumnLinear(Param("block mlp embed", (2, c.mlp, c.embed), {"mlp": TP})),
            down=RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP})),
        )

    def __call__(self, x: Float[Array, "batch seq embed"], residual: Residual) -> Float[Array, "batch part_seq embed"]:
        return self.down(gated(jax.nn.gelu, self.gate_up(x)), residual)


class Block(eqx.Module):
    """One layer: attention and MLP, each after a norm and added to the stream.

    Collectives, besides those of `attention`, all over the tensor axes: with the "whole" residual two all-reduces;
    with "seq" two all-gathers and two reduce-scatters.
    """

    attn_norm: RMSNorm
    attn: Attention
    mlp_norm: RMSNorm
    mlp: Mlp
    bias: DistanceBias | None

    @classmethod
    def declare(cls, c: Config) -> "Block":
        def norm() -> RMSNorm:
            return RMSNorm(Param("embed", (c.embed,)), eps=c.norm_eps)

        bias = None if c.shared_bias else DistanceBias.declare(c)
        return cls(attn_norm=norm(), attn=Attention.declare(c), mlp_norm=norm(), mlp=Mlp.declare(c), bias=bias)

    def __call__(
        self,
        x: Float[Array, "batch part_seq embed"],
        bias: Float[Array, "heads distances"],
        lengths: Int[Array, " batch"] | None,
        mask: Bool[Array, "batch seq"] | None,
        residual: Residual,
    ) -> Float[Array, "batch part_seq embed"]:
        x = x + self.attn(gather_residual(self.attn_norm(x), residual), bias, lengths, mask, residual)
        return x + self.mlp(gather_residual(self.mlp_norm(x), residual), residual)


class Encoder(eqx.Module):
    """Embedding, stacked blocks, final norm; `bias` is the table of all blocks where they share one."""

    embed: Embedding
    blocks: Block
    norm: RMSNorm
    bias: DistanceBias | None
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Encoder":
        return cls(
            embed=Embedding(Param("vocab embed", (c.vocab, c.embed), {"vocab": TP})),
            blocks=layout.stack(Block.declare(c), c.layers),
            norm=RMSNorm(Param("embed", (c.embed,)), eps=c.norm_eps),
            bias=DistanceBias.declare(c) if c.shared_bias else None,
            config=c,
        )


def declare(config: Config, dtype: Any = np.float32) -> Encoder:
    """The declared encoder with every weight in `dtype`."""
    return layout.astype(Encoder.declare(config), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How `forward` runs; the options are explained there."""

    residual: Residual
    remat: Remat
    dtype: Any
    zero_padding: bool
    in_place: bool


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self,
        model: Encoder,
        ids: Int[Host, "batch seq"],
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
    ) -> Float[Array, "batch out_seq embed"]: ...


def forward(
    declared: Encoder,
    mesh: Mesh | AbstractMesh,
    *,
    zero_padded_to: int | None = None,
    residual: Residual = "whole",
    remat: Remat = False,
    dtype: Any = None,
    in_place: bool = False,
) -> Forward:
    """The pure function `f(model, ids, *, lengths, mask)`: jit it, or call it inside a jitted function.

    It returns the normed stream [batch, seq, embed], split like batch and seq. Any batch and length will do: both are
    padded to what the mesh needs, and the result is cut back.

    f's arguments, beside the live model and the token ids:
        lengths: valid prefix of each row (rows padded on the right); results beyond it mean nothing.
        mask: True for tokens that all others see, for padding on any side; results on padding are those of the
            transformers library, whose queries on padding see all visible tokens. A row with none of them attends to
            nothing. Not with `lengths`.
        Without either all ids are tokens, also those of padding, which is how FLUX.1 calls its T5.

    Args:
        zero_padded_to: what Wan's transformer takes: results on padding are zero, and zeros follow until the sequence
            has this length (512 for Wan).
        residual: "seq" splits the stream between blocks along the sequence over the tensor axes as well.
        remat: compute each block again in the backward pass rather than keep its activations: all of it, or what a
            policy says (`remat.py`).
        dtype: of the activations; None is that of the weights.
        in_place: read the weights where they lie, without a gradient: faster on a CPU in 16-bit floats (`in_place.py`).

    Raises:
        InputError: the mesh does not fit the declaration; an unknown residual; from f, no ids, more of them than
            `zero_padded_to`, or both of lengths and mask.
    """
    layout.audit(declared, mesh)
    check_residual("t5.forward", residual)
    check_remat("t5.forward", remat)
    run = Run(
        residual=residual,
        remat=remat,
        dtype=float_dtype("t5.forward", dtype),
        zero_padding=zero_padded_to is not None,
        in_place=in_place,
    )
    seq_ways = mesh.shape[CONTEXT] * (1 if residual == "whole" else mesh.shape[TP[0]] * mesh.shape[TP[1]])
    sequence = {"ids": P(DATA, CONTEXT), "mask": P(DATA, CONTEXT), "lengths": P(DATA)}

    @jaxtyped(typechecker=beartype)
    def f(
        model: Encoder,
        ids: Int[Host, "batch seq"],
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
    ) -> Float[Array, "batch out_seq embed"]:
        batch, seq = ids.shape
        fail_if([*no_tokens(ids), *_problems(seq, zero_padded_to, lengths, mask)], "t5.forward")
        if lengths is None and mask is None and seq % seq_ways:
            lengths = jnp.full(batch, seq, jnp.int32)
        given = {"ids": ids, "lengths": lengths, "mask": mask}
        arrays = {k: pad(jnp.asarray(v), mesh.shape[DATA], seq_ways) for k, v in given.items() if v is not None}
        shard = layout.sharded(
            lambda model, arrays: _forward(model, declared, run, **arrays),
            mesh,
            (layout.specs(declared), {k: sequence[k] for k in arrays}),
            P(DATA, CONTEXT) if residual == "whole" else P(DATA, (CONTEXT, *TP)),
        )
        out = shard(model, arrays)[:batch, :seq]
        return out if zero_padded_to is None else jnp.pad(out, ((0, 0), (0, zero_padded_to - seq), (0, 0)))

    return f


def _problems(seq: int, zero_padded_to: int | None, lengths: Host | None, mask: Host | None) -> Iterator[str]:
    if lengths is not None and mask is not None:
        yield "lengths and mask were both given: give one of them"
    if zero_padded_to is not None and seq > zero_padded_to:
        yield f"seq={seq} is more than zero_padded_to={zero_padded_to}: truncate the text when tokenizing"


def _forward(
    model: Encoder,
    declared: Encoder,
    run: Run,
    *,
    ids: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"] | None = None,
    mask: Bool[Array, "batch seq"] | None = None,
) -> Float[Array, "batch part_seq embed"]:
    """One device's share of the result."""
    config = model.config
    embed, norm, table = layout.gather_at_rest(
        (model.embed, model.norm, model.bias), (declared.embed, declared.norm, declared.bias)
    )
    keys = ids.shape[1] * lax.axis_size(CONTEXT)
    buckets = buckets_of(config, np.arange(1 - keys, keys))
    x = embed(ids, run.dtype, run.residual, in_place=run.in_place)
    shared = None if table is None else table(buckets)

    def body(x, inputs):
        block, layer = inputs
        block = block_at(model.blocks, layer) if run.in_place else block
        block = layout.gather_at_rest(block, declared.blocks)
        bias = block.bias(buckets) if shared is None else shared
        return block(x, bias, lengths, mask, run.residual), None

    body = rematerialised(body, run.remat)
    x, _ = lax.scan(body, x, (None if run.in_place else model.blocks, jnp.arange(config.layers)))
    x = norm(x)
    return _zero_padding(x, ids.shape[1], lengths, mask, run.residual) if run.zero_padding else x


def _zero_padding(
    x: Float[Array, "batch part_seq embed"],
    seq: int,
    lengths: Int[Array, " batch"] | None,
    mask: Bool[Array, "batch seq"] | None,
    residual: Residual,
) -> Float[Array, "batch part_seq embed"]:
    """x with zeros where there is no token; `seq` is this device's share over `context` alone."""
    if lengths is None and mask is None:
        return x
    seen = sequence_positions(seq) < lengths[:, None] if mask is None else mask
    if residual == "seq":
        seen = lax.dynamic_slice_in_dim(seen, lax.axis_index(TP) * x.shape[1], x.shape[1], axis=1)
    return jnp.where(seen[..., None], x, 0)


PRESETS = {
    "umt5-xxl": Config(vocab=256384, embed=4096, layers=24, heads=64, head_dim=64, mlp=10240),
    "t5-v1.1-xxl": Config(vocab=32128, embed=4096, layers=24, heads=64, head_dim=64, mlp=10240, shared_bias=True),
}


def trace(declared: Encoder, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """States of whole texts, as `Family.trace` says."""
    return forward(declared, mesh, **run), (jax.ShapeDtypeStruct((sizes.batch, sizes.tokens), jnp.int32),)


register(Family(name="t5", config=Config, declare=declare, presets=PRESETS, trace=trace))
