"""What the image encoder and the text encoder of CLIP are both made of: blocks over tokens that are never split.

Source: `modeling_clip.py` of transformers 5. Mesh axes: the batch over `data`, heads and mlp over the tensor axes.
Tokens are few (257 of an image, 77 of a text), so that every device of `context` computes the same. Shapes are one
device's.
"""

import dataclasses
from typing import Literal, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from shardzoo.errors import InputError, not_above_zero
from shardzoo.kernels.flash_attention import flash_attention
from shardzoo.zoo import layout
from shardzoo.zoo.layers import ColumnLinear, LayerNorm, RowLinear, exact_gelu, in_float32, unpacked
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import CONTEXT, DATA, TP

ACTIVATIONS = ("gelu", "quick_gelu")
Activation = Literal["gelu", "quick_gelu"]
Tree = TypeVar("Tree")


@runtime_checkable
class Sizes(Protocol):
    """What a config says of its blocks; embed divides by heads."""

    @property
    def embed(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def norm_eps(self) -> float: ...


def size_problems(c: Sizes, sizes: tuple[str, ...]) -> list[str]:
    """What is wrong with a config: sizes below 1, heads that do not divide, an eps of 0, an unknown activation."""
    problems = [f"{n}={getattr(c, n)} is not at least 1: change it" for n in sizes if getattr(c, n) < 1]
    if not problems and c.embed % c.heads:
        problems.append(f"embed={c.embed} does not divide by heads={c.heads}: change one of them")
    problems += not_above_zero(c, "norm_eps")
    if c.activation not in ACTIVATIONS:
        problems.append(f"activation={c.activation!r} is unknown: use 'gelu' or 'quick_gelu'")
    return problems


def blocks_to_run(name: str, hidden_state: int | str, named: tuple[str, ...], layers: int) -> int:
    """How many blocks a hidden state needs, counted as transformers does; those in `named` need all.

    Raises:
        InputError: there is no such hidden state.
    """
    if hidden_state in named:
        return layers
    if not isinstance(hidden_state, int) or not -layers - 1 <= hidden_state <= layers:
        raise InputError(
            f"{name}: hidden_state={hidden_state} is not one of the {layers + 1}:"
            f" use {-layers - 1} to {layers}, or {' or '.join(map(repr, named))}"
        )
    return hidden_state if hidden_state >= 0 else layers + 1 + hidden_state


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x * sigmoid(1.702 x)."""
    return x * jax.nn.sigmoid(1.702 * x)


class Attention(eqx.Module):
    """Attention of tokens to all others, or with `causal` to none after them: x whole in embed, heads split.

    `qkv[B, S, 3, H_TP, D] = x[B, S, E] . W[3, H_TP, D, E] + b[3, H_TP, D]`;
    `y[B, S, E] = psum_TP(o[B, S, H_TP, D] . Wo[E, H_TP, D]) + bo[E]`.
    """

    qkv: ColumnLinear
    out: RowLinear
    causal: bool = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Sizes, *, causal: bool = False) -> "Attention":
        heads = (c.heads, c.embed // c.heads)
        return cls(
            qkv=ColumnLinear(
                Param("block heads head_dim embed", (3, *heads, c.embed), {"heads": TP}),
                Param("block heads head_dim", (3, *heads), {"heads": TP}),
            ),
            out=RowLinear(Param("embed heads head_dim", (c.embed, *heads), {"heads": TP}), Param("embed", (c.embed,))),
            causal=causal,
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], mask: Bool[Array, "batch seq"] | None = None
    ) -> Float[Array, "batch seq embed"]:
        """`mask` is False for tokens that none sees; they see the others."""
        qkv = self.qkv(x)
        keys = None if mask is None else jnp.where(mask, 0, -1)
        queries = None if keys is None else jnp.zeros_like(keys)
        q, k, v = unpacked(qkv)
        return self.out(
            flash_attention(q, k, v, causal=self.causal, q_segment_ids=queries, kv_segment_ids=keys)
        )  # fmt: skip


class Mlp(eqx.Module):
    """y = down(activation(up x)), both with biases; x and y whole, the mlp dim split over the tensor axes."""

    up: ColumnLinear
    down: RowLinear
    activation: Activation = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Sizes) -> "Mlp":
        return cls(
            up=ColumnLinear(Param("mlp embed", (c.mlp, c.embed), {"mlp": TP}), Param("mlp", (c.mlp,), {"mlp": TP})),
            down=RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}), Param("embed", (c.embed,))),
            activation=c.activation,
        )

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        activation = quick_gelu if self.activation == "quick_gelu" else exact_gelu
        return self.down(in_float32(activation, self.up(x)))


def declare_norm(c: Sizes) -> LayerNorm:
    return LayerNorm(Param("embed", (c.embed,)), Param("embed", (c.embed,)), eps=c.norm_eps)


class Block(eqx.Module):
    """One layer: attention and MLP, each after a norm and added to the stream.

    Collectives: two all-reduces over the tensor axes.
    """

    attn_norm: LayerNorm
    attn: Attention
    mlp_norm: LayerNorm
    mlp: Mlp

    @classmethod
    def declare(cls, c: Sizes, *, causal: bool = False) -> "Block":
        return cls(
            attn_norm=declare_norm(c),
            attn=Attention.declare(c, causal=causal),
            mlp_norm=declare_norm(c),
            mlp=Mlp.declare(c),
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], mask: Bool[Array, "batch seq"] | None = None
    ) -> Float[Array, "batch seq embed"]:
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


def run_blocks(
    blocks: Block,
    declared: Block,
    x: Float[Array, "batch seq embed"],
    *,
    run: int,
    of: int,
    mask: Bool[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq embed"]:
    """The stream after the first `run` of `of` stacked blocks."""

    def body(x, inputs):
        block, index = inputs
        block = gathered(block, declared)
        # Blocks that are not run are skipped in place: to cut them off would copy all others.
        return block(x, mask) if run == of else lax.cond(index < run, lambda: block(x, mask), lambda: x), None

    return lax.scan(body, x, (blocks, jnp.arange(of)))[0]


def gathered(live: Tree, declared: Tree) -> Tree:
    """Weights gathered from a split at rest: they act on what differs along `data` and is the same along `context`."""
    for axis, to in ((DATA, "varying"), (CONTEXT, "invarying")):
        split = jax.tree.map(
            lambda p, axis=axis: dataclasses.replace(p, rest={d: a for d, a in p.rest.items() if a == axis}), declared
        )
        live = layout.gather_at_rest(live, split, to=to)
    return live
