"""Sizes and layouts of the TPU kernels of the gated delta rule: what of the arrays a grid step sees."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from shardzoo.kernels.gated_delta.options import Call
from shardzoo.kernels.gated_delta.tpu_chunk import CHUNK, LANES

Pass = Literal["forward", "backward"]
# Tokens and key heads of a grid step: what is worked on together hides each other's latencies, and needs memory.
TOGETHER: dict[Pass, tuple[int, int]] = {"forward": (256, 2), "backward": (256, 1)}
# Value heads of a step that works on several key heads, or on blocks of this many tokens; in float32 half as many.
MOST_HEADS = 6


class Arrays(NamedTuple):
    """A call as the kernels take it: heads side by side in lanes, filled up with zeros to whole lanes.

    gates holds, for the value heads of a grid step, a row of log decays each and then a row of betas each.
    """

    q: Float[Array, "batch seq key_lanes"]
    k: Float[Array, "batch seq key_lanes"]
    v: Float[Array, "batch seq value_lanes"]
    gates: Float[Array, "batch head_blocks rows tokens"]
    state: Float[Array, "batch heads key_dim value_dim"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known when a kernel is traced; key_dim and value_dim are whole lanes."""

    batch: int
    seq: int
    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    tokens: int  # of a grid step
    together: int  # key heads of a grid step
    scale: float
    low: bool  # operands of products are rounded to bfloat16

    @property
    def chunks(self) -> int:
        """Chunks of a grid step."""
        return self.tokens // CHUNK

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.seq, self.tokens)

    @property
    def tail(self) -> bool:
        """Whether the last block reaches beyond the arrays."""
        return self.seq % self.tokens > 0

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.key_heads // self.together, self.blocks

    @property
    def heads(self) -> int:
        """Value heads of a grid step."""
        return self.together * self.group

    def rounded(self, x: Array) -> Array:
        """What a product will make of this operand anyway, in the space that this takes."""
        return x.astype(jnp.bfloat16) if self.low else x

    def cost(self, x: Arrays, products: int, moved: int) -> pl.CostEstimate:
        """`products` of CHUNK x CHUNK x key_dim a chunk and value head beside the inverse; `moved` beside reading x."""
        chunks = self.batch * self.key_heads * self.group * self.blocks * self.chunks
        one = CHUNK * CHUNK * max(self.key_dim, self.value_dim)
        inverse = 2 * (CHUNK.bit_length() - 2) * CHUNK**3
        read = sum(a.size * a.dtype.itemsize for a in x)
        return pl.CostEstimate(
            flops=2 * chunks * (products * one + inverse),
            transcendentals=chunks * CHUNK * (CHUNK + LANES),
            bytes_accessed=read + moved,
        )


def plan_of(step: Pass, call: Call, scale: float) -> Plan:
    """The plan of a call: short sequences take one block of as many chunks as they need."""
    batch, seq, key_heads, group, value_dim = call.v.shape
    key_dim, value_dim = whole_lanes(call.k.shape[-1]), whole_lanes(value_dim)
    tokens, together = TOGETHER[step]
    low = call.v.dtype == jnp.bfloat16
    most = MOST_HEADS if low else MOST_HEADS // 2
    if max(key_dim, value_dim) > LANES or group > most:
        tokens, together = max(CHUNK, tokens // 2), 1
    together = min(together, max(1, most // group))
    return Plan(
        batch=batch,
        seq=seq,
        key_heads=key_heads,
        group=group,
        key_dim=key_dim,
        value_dim=value_dim,
        tokens=min(tokens, pl.cdiv(seq, CHUNK) * CHUNK),
        together=next(n for n in range(min(together, key_heads), 0, -1) if key_heads % n == 0),
        scale=scale,
        low=low,
    )


def whole_lanes(width: int) -> int:
    """The width filled up to whole lanes."""
    return pl.cdiv(width, LANES) * LANES


def arrays_of(plan: Plan, call: Call) -> Arrays:
    """The call's arrays in the kernels' layout."""
    dtype = jnp.bfloat16 if plan.low else jnp.float32
    by_step = (plan.batch, plan.seq, plan.grid[1], plan.heads)
    gates = jnp.concatenate([x.astype(jnp.float32).reshape(by_step) for x in (call.log_decay, call.beta)], axis=-1)
    extra = plan.blocks * plan.tokens - plan.seq
    return Arrays(
        q=lanes_of(call.q.astype(dtype), plan.key_dim),
        k=lanes_of(call.k.astype(dtype), plan.key_dim),
        v=lanes_of(call.v.astype(dtype), plan.value_dim),
        gates=jnp.pad(jnp.moveaxis(gates, 1, 3), [(0, 0)] * 3 + [(0, extra)]),
        state=state_of(plan, call.state),
    )


def lanes_of(x: Float[Array, "batch seq *heads dim"], width: int) -> Float[Array, "batch seq lanes"]:
    """Heads side by side, each filled up to `width`."""
    if x.shape[-1] != width:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    return x.reshape(*x.shape[:2], -1)


def from_lanes(x: Float[Array, "batch seq lanes"], like: jax.ShapeDtypeStruct | Array) -> Array:
    """The inverse of `lanes_of`."""
    return x.reshape(*like.shape[:-1], -1)[..., : like.shape[-1]]


def state_of(plan: Plan, state: Array) -> Array:
    """A state filled up with zeros."""
    more = [(0, plan.key_dim - state.shape[-2]), (0, plan.value_dim - state.shape[-1])]
    return jnp.pad(state.astype(jnp.float32), [(0, 0)] * 3 + more).reshape(plan.batch, -1, plan.key_dim, plan.value_dim)


class Specs(NamedTuple):
    """Blocks of the arrays for a grid (batch, key head, block of tokens)."""

    keys: pl.BlockSpec
    values: pl.BlockSpec
    gates: pl.BlockSpec
    state: pl.BlockSpec
    states: pl.BlockSpec  # one for each block of tokens


def block_specs(plan: Plan, *, backwards: bool = False) -> Specs:
    """`backwards`: from the last block of tokens to the first."""

    def at(n: Array) -> Array:
        return plan.blocks - 1 - n if backwards else n

    keys, values = (plan.tokens, plan.together * plan.key_dim), (plan.tokens, plan.heads * plan.value_dim)
    return Specs(
        keys=pl.BlockSpec((None, *keys), lambda b, h, n: (b, at(n), h)),
        values=pl.BlockSpec((None, *values), lambda b, h, n: (b, at(n), h)),
        gates=pl.BlockSpec((None, None, 2 * plan.heads, plan.tokens), lambda b, h, n: (b, h, 0, at(n))),
        state=pl.BlockSpec((None, plan.heads, plan.key_dim, plan.value_dim), lambda b, h, n: (b, h, 0, 0)),
        states=pl.BlockSpec(
            (None, None, plan.heads, plan.key_dim, plan.value_dim), lambda b, h, n: (b, at(n), h, 0, 0)
        ),
    )
