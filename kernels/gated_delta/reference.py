"""The definition of the gated delta rule, token by token: what the other implementations are tested against."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import varying_like
from shardzoo.kernels.gated_delta.options import Call, Result


def run(call: Call, *, parts: bool) -> Result:
    """One step of the recurrence for each token.

    The parts are columns of values that are zero, beside a state that is the identity there: the rule is linear in
    (state, values), column by column.
    """
    state, v, width = call.state, call.v, call.v.shape[-1]
    if parts:
        state = jnp.concatenate([state, identity_like(state)], axis=-1)
        v = jnp.concatenate([v, jnp.zeros((*v.shape[:-1], call.k.shape[-1]), v.dtype)], axis=-1)
    by_token = [jnp.moveaxis(x, 1, 0) for x in (call.q, call.k, v, call.log_decay, call.beta)]
    state, out = lax.scan(_step, state, by_token)
    out = jnp.moveaxis(out, 0, 1)
    if not parts:
        return Result(out, state)
    return Result(out[..., :width], state[..., :width], out[..., width:], state[..., width:])


def _step(
    state: Float[Array, "batch key_heads group key_dim columns"], token: list[Array]
) -> tuple[Array, Float[Array, "batch key_heads group columns"]]:
    """Decay, subtract what the state predicts for this key, add the rest times beta, read with the query."""
    q, k, v, log_decay, beta = token
    state = state * jnp.exp(log_decay)[..., None, None]
    predicted = jnp.einsum("bhgkv,bhk->bhgv", state, k, precision=lax.Precision.HIGHEST)
    change = (v - predicted) * beta[..., None]
    state = state + k[:, :, None, :, None] * change[..., None, :]
    return state, jnp.einsum("bhgkv,bhk->bhgv", state, q, precision=lax.Precision.HIGHEST)


def identity_like(
    state: Float[Array, "batch key_heads group key_dim value_dim"],
) -> Float[Array, "batch key_heads group key_dim key_dim"]:
    """The identity in place of each head's state."""
    size = state.shape[-2]
    whole = jnp.broadcast_to(jnp.eye(size, dtype=state.dtype), (*state.shape[:-2], size, size))
    return varying_like(whole, state)
