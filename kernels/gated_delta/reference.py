"""The definition of the gated delta rule, token by token: what the other implementations are tested against."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.choice import known_platform
from shardzoo.kernels.gated_delta.options import Call, Result, cut, result_dtype, wide, with_identity


def run(call: Call, scale: float, *, parts: bool) -> Result:
    """One step of the recurrence for each token."""
    dtype, width = result_dtype(call, parts=parts), call.v.shape[-1]
    call = wide(with_identity(call) if parts else call, scale)
    by_token = [jnp.moveaxis(x, 1, 0) for x in (call.q, call.k, call.v, call.log_decay, call.beta)]
    step = _one_token if call.v.shape[1] == 1 and known_platform() == "cpu" else _step
    state, out = lax.scan(step, call.state, by_token)
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


def _one_token(
    state: Float[Array, "batch key_heads group key_dim columns"], token: list[Array]
) -> tuple[Array, Float[Array, "batch key_heads group columns"]]:
    """`_step` with one product, of key and query with the state as it lies.

    For each of the two products of a vector and a state that is being made XLA for CPUs makes it once more, transposed:
    a tenth of a decode step. The query reads the new state as the old one and what is added to it.
    """
    q, k, v, log_decay, beta = token
    decay = jnp.exp(log_decay)[..., None, None]
    pair = jnp.broadcast_to(jnp.stack([k, q], axis=-2)[:, :, None], (*state.shape[:3], 2, k.shape[-1]))
    read = jnp.matmul(pair, state, precision=lax.Precision.HIGHEST) * decay
    change = (v - read[..., 0, :]) * beta[..., None]
    new = state * decay + k[:, :, None, :, None] * change[..., None, :]
    return new, read[..., 1, :] + jnp.sum(q * k, axis=-1)[:, :, None, None] * change
