"""What every implementation of the gated delta rule receives, and what it returns.

An implementation is a module of this folder (`reference`, `chunked`) with one function:

    run(call, *, parts) -> Result

It is differentiated by JAX as it stands. The arrays of a `Call` are in `accumulator(v.dtype)` and all vary over the
same mesh axes; whatever an implementation makes itself (loop carries) has to be given the same type.
"""

from typing import NamedTuple

from jaxtyping import Array, Float


class Call(NamedTuple):
    """A checked call; value head h = key_head * group + g reads key head h // group, and the queries are scaled.

    Positions that do not count have log_decay = beta = 0, which leaves the state as it is.
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
    `state + transition . x`.
    """

    out: Float[Array, "batch seq key_heads group value_dim"]
    state: Float[Array, "batch key_heads group key_dim value_dim"]
    reach: Float[Array, "batch seq key_heads group key_dim"] | None = None
    transition: Float[Array, "batch key_heads group key_dim key_dim"] | None = None
