"""What every implementation of the gated delta rule receives, and what it returns.

An implementation is a module of this folder with one function:

    run(call, scale, *, parts) -> Result

`reference` and `chunked` are differentiated by JAX as they stand. The kernels (`tpu`, `gpu`) are not: each has

    supports(call, *, parts) -> str | None
        Why it cannot take a call of these shapes and dtypes, forward or backward; None when it can.
    backward(call, scale, change, *, parts) -> Call
        Gradients in the shapes and dtypes of the call, from those of the result.

The arrays of a `Call` all vary over the same mesh axes; whatever an implementation makes itself (loop carries,
`out_shape` of a kernel) has to be given the same type.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import accumulator, varying_like


class Call(NamedTuple):
    """A checked call; value head h = key_head * group + g reads key head h // group.

    q, k and v are in the caller's dtypes, the others in `accumulator(v.dtype)`. Positions that do not count have
    log_decay = beta = 0, which leaves the state as it is.
    """

    q: Float[Array, "batch seq key_heads key_dim"]
    k: Float[Array, "batch seq key_heads key_dim"]
    v: Float[Array, "batch seq key_heads group value_dim"]
    log_decay: Float[Array, "batch seq key_heads group"]
    beta: Float[Array, "batch seq key_heads group"]
    state: Float[Array, "batch key_heads group key_dim value_dim"]


class Result(NamedTuple):
    """Outputs and final state; with `parts` also how both depend on the initial state (None without).

    For an initial state of `state + x` the outputs are `out + reach . x` and the final state is
    `state + transition . x`. All are in `accumulator(v.dtype)`, but without parts the outputs are in v's dtype.
    """

    out: Float[Array, "batch seq key_heads group value_dim"]
    state: Float[Array, "batch key_heads group key_dim value_dim"]
    reach: Float[Array, "batch seq key_heads group key_dim"] | None = None
    transition: Float[Array, "batch key_heads group key_dim key_dim"] | None = None


def wide(call: Call, scale: float) -> Call:
    """The call in `accumulator(v.dtype)` throughout, its queries scaled."""
    dtype = accumulator(call.v.dtype)
    return Call(call.q.astype(dtype) * scale, *(x.astype(dtype) for x in call[1:]))


def result_dtype(call: Call, *, parts: bool) -> jnp.dtype:
    """The dtype of the outputs."""
    return accumulator(call.v.dtype) if parts else call.v.dtype


def with_identity(call: Call) -> Call:
    """The call whose columns hold the parts as well: the rule is linear in (state, values), column by column.

    Beside the values stand zeros, and beside the state the identity: what becomes of it is how all depends on it.
    """
    state = jnp.concatenate([call.state, identity_like(call.state)], axis=-1)
    v = jnp.concatenate([call.v, jnp.zeros((*call.v.shape[:-1], call.k.shape[-1]), call.v.dtype)], axis=-1)
    return call._replace(v=v, state=state)


def cut(out: Array, state: Array, width: int) -> Result:
    """The result with its parts, from outputs and state of a call `with_identity` whose values had this width."""
    return Result(out[..., :width], state[..., :width], out[..., width:], state[..., width:])


def identity_like(
    state: Float[Array, "batch key_heads group key_dim value_dim"],
) -> Float[Array, "batch key_heads group key_dim key_dim"]:
    """The identity in place of each head's state."""
    size = state.shape[-2]
    whole = jnp.broadcast_to(jnp.eye(size, dtype=state.dtype), (*state.shape[:-2], size, size))
    return varying_like(whole, state)


def backward_of(
    plain: Callable[[Call, float, Array, Array], Call], call: Call, scale: float, change: Result, *, parts: bool
) -> Call:
    """Gradients of a call by a kernel's `plain` one without parts, which takes those of outputs and final state."""
    if not parts:
        return plain(call, scale, change.out, change.state)
    whole, pull = jax.vjp(with_identity, call)
    d_out = jnp.concatenate((change.out, change.reach), axis=-1)
    d_state = jnp.concatenate((change.state, change.transition), axis=-1)
    return pull(plain(whole, scale, d_out, d_state))[0]
