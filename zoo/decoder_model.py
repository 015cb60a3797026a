"""The layers of the dense decoders: config, attention, mlp, block, the whole model.

Source: the model classes Llama, Mistral, Qwen2 and Qwen3 of transformers 5. They differ in what `Config` says: biases,
norms of q and k per head, a sliding window, tied embeddings, scaling of the rotary frequencies. Shapes inside layers
are one device's. The blocks are stacked, to be run by one `lax.scan`.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shardzoo.errors import fail_if, not_above_zero
from shardzoo.zoo import layout
from shardzoo.zoo.layers import (
    WHOLE_STREAM,
    ColumnLinear,
    Embedding,
    Residual,
    RMSNorm,
    RowLinear,
    gated,
    gather_residual,
    unpacked,
)
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import KV, PIPE, TP, VOCAB
from shardzoo.zoo.rope import Rope, Rotary, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        vocab, embed, layers, heads, kv_heads, head_dim, mlp: sizes; heads * head_dim need not be embed.
        norm_eps: of every RMS norm.
        rope: rotary frequencies.
        qkv_bias, out_bias, mlp_bias: which projections have biases.
        qk_norm: RMS norm over head_dim of each query and key head, before the rotation (Qwen3).
        tied: the output head is the embedding.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None is all.
        sliding_layers: the layers that the window is for; None is all of them.
        max_positions: longest sequence that the model is made for.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float = 1e-5
    rope: Rope = dataclasses.field(default_factory=Rope)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None
    max_positions: int = 131072

    def __post_init__(self):
        sizes = ("vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "max_positions")
        problems = [f"{n}={getattr(self, n)} is not at least 1: change it" for n in sizes if getattr(self, n) < 1]
        if not problems and self.heads % self.kv_heads:
            problems.append(f"heads={self.heads} does not divide by kv_heads={self.kv_heads}: change one of them")
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} is odd (rotary pairs need an even one): change it")
        if self.rope.sections and sum(self.rope.sections) * 2 != self.head_dim:
            pairs = sum(self.rope.sections)
            problems.append(f"head_dim={self.head_dim} is not twice the {pairs} of rope.sections: change one of them")
        problems += not_above_zero(self, "norm_eps")
        if self.sliding_window is not None and self.sliding_window < 1:
            problems.append(f"sliding_window={self.sliding_window} is not at least 1: use None for no window")
        if self.sliding_layers is not None and len(self.sliding_layers) != self.layers:
            given = len(self.sliding_layers)
            problems.append(
                f"layers={self.layers} are not the {given} of sliding_layers: give one entry for each layer"
            )
        fail_if(problems, "decoder config")

    @property
    def windowed(self) -> tuple[bool, ...]:
        """For each layer, whether it has the window."""
        if self.sliding_window is None:
            return (False,) * self.layers
        return self.sliding_layers or (True,) * self.layers


def window_of(config: Config, layer: Int[Array, ""]) -> dict[str, Any]:
    """A layer's window as `attention` takes it: its size is static, a loop over unlike layers says which has it."""
    windowed = config.windowed
    if len(set(windowed)) == 1:
        return {"window": config.sliding_window if windowed[0] else None}
    return {"window": config.sliding_window, "windowed": jnp.asarray(windowed)[layer]}


class Attention(eqx.Module):
    """Projections and norms round an attention: x whole in embed -> q, kv split by heads; output whole again.

    `q[B, S, H_TP, D] = x[B, S, E] . Wq[H_TP, D, E]`, `kv[B, S, 2, K_kv, D]` likewise;
    `y[B, S, E] = psum_TP(o[B, S, H_TP, D] . Wo[E, H_TP, D])`.
    """

    q: ColumnLinear
    kv: ColumnLinear
    out: RowLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    @classmethod
    def declare(cls, c: Config) -> "Attention":
        heads, kv = (c.heads, c.head_dim), (2, c.kv_heads, c.head_dim)
        q_bias = Param("heads head_dim", heads, {"heads": TP}) if c.qkv_bias else None
        kv_bias = Param("block kv_heads head_dim", kv, {"kv_heads": KV}) if c.qkv_bias else None
        out_bias = Param("embed", (c.embed,)) if c.out_bias else None

        def norm() -> RMSNorm | None:
            return RMSNorm(Param("head_dim", (c.head_dim,)), eps=c.norm_eps) if c.qk_norm else None

        return cls(
            q=ColumnLinear(Param("heads head_dim embed", (*heads, c.embed), {"heads": TP}), q_bias),
            kv=ColumnLinear(Param("block kv_heads head_dim embed", (*kv, c.embed), {"kv_heads": KV}), kv_bias),
            out=RowLinear(Param("embed heads head_dim", (c.embed, *heads), {"heads": TP}), out_bias),
            q_norm=norm(),
            k_norm=norm(),
        )

    def project(
        self, x: Float[Array, "batch seq embed"], turn: Rotary
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq two kv_heads head_dim"]]:
        q, (k, v) = self.q(x, unrounded=True), unpacked(self.kv(x, unrounded=True))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        return rotate(q, turn).astype(x.dtype), jnp.stack([rotate(k, turn), v], axis=2).astype(x.dtype)


class Mlp(eqx.Module):
    """y = down(silu(gate x) * up x); x and y whole, the mlp dim split over the tensor axes."""

    gate_up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "Mlp":
        up_bias = Param("block mlp", (2, c.mlp), {"mlp": TP}) if c.mlp_bias else None
        down_bias = Param("embed", (c.embed,)) if c.mlp_bias else None
        return cls(
            gate_up=ColumnLinear(Param("block mlp embed", (2, c.mlp, c.embed), {"mlp": TP}), up_bias),
            down=RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}), down_bias),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], residual: Residual = WHOLE_STREAM
    ) -> Float[Array, "batch part_seq embed"]:
        return self.down(gated(jax.nn.silu, self.gate_up(x, unrounded=True)).astype(x.dtype), residual)


class Block(eqx.Module):
    """One layer, in two halves round the attention, so that a cache can stand between them.

    Collectives of a block, besides those of `attention`, all over the tensor axes: with the "whole" residual two
    all-reduces; with "seq" two all-gathers and two reduce-scatters.
    """

    attn_norm: RMSNorm
    attn: Attention
    mlp_norm: RMSNorm
    mlp: Mlp

    @classmethod
    def declare(cls, c: Config) -> "Block":
        def norm() -> RMSNorm:
            return RMSNorm(Param("embed", (c.embed,)), eps=c.norm_eps)

        return cls(attn_norm=norm(), attn=Attention.declare(c), mlp_norm=norm(), mlp=Mlp.declare(c))

    def project(
        self, x: Float[Array, "batch part_seq embed"], turn: Rotary, residual: Residual = WHOLE_STREAM
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq two kv_heads head_dim"]]:
        """Queries, and keys and values, from the stream."""
        return self.attn.project(gather_residual(self.attn_norm(x), residual), turn)

    def finish(
        self,
        x: Float[Array, "batch part_seq embed"],
        attended: Float[Array, "batch seq heads head_dim"],
        residual: Residual = WHOLE_STREAM,
    ) -> Float[Array, "batch part_seq embed"]:
        """The stream after this block, from what the queries got."""
        x = x + self.attn.out(attended, residual)
        return x + self.mlp(gather_residual(self.mlp_norm(x), residual), residual)


class Decoder(eqx.Module):
    """Embedding, stacked blocks, final norm and head (None when tied)."""

    embed: Embedding
    blocks: Block
    norm: RMSNorm
    head: Embedding | None
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Decoder":
        def table() -> Embedding:
            return Embedding(Param("vocab embed", (c.vocab, c.embed), {"vocab": VOCAB}), axis=VOCAB)

        return cls(
            embed=table(),
            blocks=layout.stack(Block.declare(c), c.layers, PIPE),
            norm=RMSNorm(Param("embed", (c.embed,)), eps=c.norm_eps),
            head=None if c.tied else table(),
            config=c,
        )

    def logits(
        self, x: Float[Array, "batch part_seq embed"], residual: Residual = WHOLE_STREAM
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of this device's part of the vocabulary, from the normed stream."""
        return (self.embed if self.head is None else self.head).logits(gather_residual(x, residual))
