"""What every implementation of flash attention receives: static options and the optional arrays.

An implementation is a module of this folder (`reference`, `blockwise`, `tpu`, `gpu`) with three functions:

    supports(q, k, v, extras, options) -> str | None
        Why it cannot take a call with these shapes and dtypes (arrays, tracers or ShapeDtypeStructs),
        forward or backward; None when it can.
    forward(q, k, v, extras, options) -> (out, lse)
        out (batch, q_len, heads, head_dim) in q's dtype; lse (batch, heads, q_len) in `accumulator(q.dtype)`.
    backward(q, k, v, extras, options, out, lse, d_out, d_lse) -> (dq, dk, dv, dbias)
        Cotangents in the shape and dtype of q, k, v and extras.bias; dbias is None without a bias, or if nobody asks
        for it. lse and d_lse are (batch, heads, q_len).

The one custom_vjp is in `attend.py`: it calls these two, so an implementation holds no differentiation rule
of its own. The arrays that arrive all vary over the same mesh axes, those of `manual_axes(q)`; whatever an
implementation makes itself (loop carries, `out_shape` of a kernel) has to be given the same type:
see `manual_axes`, `varying_like` and `out_struct`.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

T = TypeVar("T")
# An array, or a stand-in for one where only shape and dtype matter.
Shaped = Array | jax.ShapeDtypeStruct


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options known when the call is traced; hashable.

    Query i stands at key position p = i + q_offset and sees the keys p - before <= j <= p + after; None is
    unlimited. `causal` has become after=0 and `window=w` before=w-1 (and after=w-1 if not causal). A band
    that hides nothing has become None.

    q_offset is None when `Extras.q_offset` holds it, and 0 when there is no band to place.
    The logits are bias + cap(scale * q . k), with cap(x) = soft_cap * tanh(x / soft_cap).
    bias_gradient False: nobody asks for dbias; `backward` may return None for it.
    """

    scale: float
    before: int | None = None
    after: int | None = None
    soft_cap: float | None = None
    q_offset: int | None = 0
    bias_gradient: bool = True

    @property
    def banded(self) -> bool:
        """Whether the positions of query and key decide anything."""
        return self.before is not None or self.after is not None


class Extras(NamedTuple):
    """The optional arrays of a call, None where not given.

    q_offset () int32; q_lengths, kv_lengths (batch,) int32; q_segment_ids (batch, q_len) and kv_segment_ids
    (batch, kv_len) int32, both or neither; bias (1 or batch, 1 or heads, q_len, kv_len), may hold -inf.
    """

    q_offset: Int[Array, ""] | None = None
    q_lengths: Int[Array, " batch"] | None = None
    kv_lengths: Int[Array, " batch"] | None = None
    q_segment_ids: Int[Array, "batch q_len"] | None = None
    kv_segment_ids: Int[Array, "batch kv_len"] | None = None
    bias: Float[Array, "bias_batch bias_heads q_len kv_len"] | None = None


def offset_of(extras: Extras, options: Options) -> int | Int[Array, ""]:
    """The position of the first query relative to the first key: a number where it is known, else an array."""
    return extras.q_offset if options.q_offset is None else options.q_offset


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that logits, sums and lse are held in: float32, or float64 for float64 input."""
    return np.promote_types(np.float32, dtype)


def manual_axes(x: Array) -> frozenset[str]:
    """The mesh axes of the enclosing shard_map that `x` varies over; empty outside one."""
    return jax.typeof(x).manual_axis_type.varying


def varying_over(tree: T, axes: frozenset[str]) -> T:
    """The tree with every array made to vary over `axes` as well; its transpose sums gradients over those added."""

    def widen(x: Array) -> Array:
        missing = tuple(sorted(axes - manual_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(widen, tree)


def varying_like(tree: T, like: Array) -> T:
    """The tree with every array made to vary over the mesh axes that `like` varies over: for loop carries."""
    return varying_over(tree, manual_axes(like))


def out_struct(shape: tuple[int, ...], dtype: DTypeLike, like: Array) -> jax.ShapeDtypeStruct:
    """The out_shape of a Pallas call whose result varies over the same mesh axes as `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


class Sizes(NamedTuple):
    """The sizes of a call; `group` query heads read one KV head."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    group: int
    head_dim: int


def sizes(q: Shaped, k: Shaped) -> Sizes:
    """The sizes of a call, from q (batch, q_len, heads, head_dim) and k (batch, kv_len, kv_heads, head_dim)."""
    batch, q_len, heads, head_dim = q.shape
    _, kv_len, kv_heads, _ = k.shape
    return Sizes(batch, q_len, kv_len, heads, kv_heads, heads // kv_heads, head_dim)
