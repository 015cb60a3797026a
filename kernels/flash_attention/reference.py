"""The definition of attention in plain array operations: what the other implementations are tested against.

It holds all q_len x kv_len logits at once. float32 inside, float64 for float64 input.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from shardzoo.kernels.flash_attention.options import Extras, Options, Shaped, accumulator, offset_of, sizes


def supports(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    extras: Extras,
    options: Options,
) -> str | None:
    """Takes every call."""
    return None


def visible(q_len: int, kv_len: int, extras: Extras, options: Options) -> Bool[Array, "batch q_len kv_len"]:
    """Which key each query may see, from band, lengths and segments; the batch is 1 if no row differs."""
    rows = jnp.arange(q_len)[:, None]
    keys = jnp.arange(kv_len)[None, :]
    distance = keys - (rows + offset_of(extras, options))
    seen = jnp.ones((1, q_len, kv_len), bool)
    if options.after is not None:
        seen &= distance <= options.after
    if options.before is not None:
        seen &= distance >= -options.before
    if extras.q_lengths is not None:
        seen &= rows < extras.q_lengths[:, None, None]
    if extras.kv_lengths is not None:
        seen &= keys < extras.kv_lengths[:, None, None]
    if extras.q_segment_ids is not None:
        seen &= extras.q_segment_ids[:, :, None] == extras.kv_segment_ids[:, None, :]
    return seen


def forward(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    options: Options,
) -> tuple[Float[Array, "batch q_len heads head_dim"], Float[Array, "batch heads q_len"]]:
    """softmax(bias + cap(scale * q . k)) . v over the visible keys, and the log of the softmax's denominator."""
    size, dtype = sizes(q, k), accumulator(q.dtype)
    grouped = q.astype(dtype).reshape(size.batch, size.q_len, size.kv_heads, size.group, size.head_dim)
    logits = jnp.einsum("bqkgd,btkd->bkgqt", grouped, k.astype(dtype), precision=lax.Precision.HIGHEST)
    logits = logits.reshape(size.batch, size.heads, size.q_len, size.kv_len) * options.scale
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    if extras.bias is not None:
        logits = logits + extras.bias.astype(dtype)
    logits = jnp.where(visible(size.q_len, size.kv_len, extras, options)[:, None], logits, -jnp.inf)
    # A row with no key has a maximum of -inf, and -inf - -inf is NaN: it is measured from 0 instead.
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total == 0, 1, total)
    weights = (weights / safe).reshape(size.batch, size.kv_heads, size.group, size.q_len, size.kv_len)
    out = jnp.einsum("bkgqt,btkd->bqkgd", weights, v.astype(dtype), precision=lax.Precision.HIGHEST)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(safe) + top)[..., 0]
    return out.reshape(q.shape).astype(q.dtype), lse


def backward(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    options: Options,
    out: Float[Array, "batch q_len heads head_dim"],
    lse: Float[Array, "batch heads q_len"],
    d_out: Float[Array, "batch q_len heads head_dim"],
    d_lse: Float[Array, "batch heads q_len"],
) -> tuple[Array, Array, Array, Array | None]:
    """The gradient that JAX derives from the definition."""

    def definition(q: Array, k: Array, v: Array, bias: Array | None) -> tuple[Array, Array]:
        return forward(q, k, v, extras._replace(bias=bias), options)

    _, pull = jax.vjp(definition, q, k, v, extras.bias)
    return pull((d_out, d_lse))
