"""The definition of the gated delta rule, token by token: what the other implementations are tested against."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardzoo.kernels.gated_delta.options import Call, Result, cut, result_dtype, wide, with_identity


def run(call: Call, scale: float, *, parts: bool) -> Result:
    """One step of the recurrence for each token."""
    dtype, width = result_dtype(call, parts=parts), call.v.shape[-1]
    call = wide(with_identity(call) if parts else call, scale)
    by_token = [jnp.moveaxis(x, 1, 0) for x in (call.q, call.k, call.v, call.log_decay, call.beta)]
    state, out = lax.scan(_step, call.state, by_token)
    out = jnp.moveaxis(out, 0, 1).astype(dtype)
    return cut(out, state, width) if parts else Result(out, state)


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
