"""The gated delta rule chunk by chunk in plain XLA operations: every platform, work on matrices, state in float32.

Within a chunk of tokens i, with decays a_i = exp(log_decay_i), d_ij = a_{j+1} ... a_i (1 on the diagonal, 0 above) and
p_i = a_1 ... a_i, and with S the state before the chunk,

    L_ij = beta_i (k_i . k_j) d_ij for j < i        what a token overwrites of those before it
    x = (I + L)^-1 (beta (v - p (k . S)))           what each token adds to the state
    out = p (q . S) + ((q . k) d) x
    S' = p_last S + (k d_last)^T x

so that the state is read and written once a chunk. Sums of log decays start anew at each token (`_decays`): none is
the difference of two others, so a token that wipes the state out costs those after it no digits, and no exponent is
above 0. The backward pass computes each chunk again from the state before it: it keeps one state a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.choice import known_platform
from shardzoo.kernels.gated_delta.inverse import unit_lower_inverse
from shardzoo.kernels.gated_delta.options import Call, Result, identity_like, result_dtype, wide

CHUNK = 64  # tokens
_FORGETS = -1e30  # log of a decay that leaves nothing, which as many as a chunk's can be added of


class _State(NamedTuple):
    """The state, and with parts what the initial state has become: a matrix for each head."""

    state: Float[Array, "batch key_heads group key_dim value_dim"]
    transition: Float[Array, "batch key_heads group key_dim key_dim"] | None


class _Chunk(NamedTuple):
    """The arrays of one chunk as products take them."""

    q: Float[Array, "batch key_heads chunk key_dim"]
    k: Float[Array, "batch key_heads chunk key_dim"]
    v: Float[Array, "batch key_heads group chunk value_dim"]
    log_decay: Float[Array, "batch key_heads group chunk"]
    beta: Float[Array, "batch key_heads group chunk"]


def run(call: Call, scale: float, *, parts: bool) -> Result:
    """A scan over the chunks; the last one is filled up with tokens that change nothing."""
    dtype, call = result_dtype(call, parts=parts), wide(call, scale)
    seq = call.v.shape[1]
    chunk = min(CHUNK, 1 << max(seq - 1, 0).bit_length())
    by_chunk = [_cut(x, chunk) for x in (call.q, call.k, call.v, call.log_decay, call.beta)]
    first = _State(call.state, identity_like(call.state) if parts else None)
    body = jax.checkpoint(_one_chunk, prevent_cse=False)
    last, (out, reach) = lax.scan(body, first, by_chunk)
    reach = None if reach is None else _join(reach, seq)
    return Result(_join(out, seq).astype(dtype), last.state, reach, last.transition)


def _cut(x: Float[Array, "batch seq ..."], chunk: int) -> Float[Array, "chunks batch chunk ..."]:
    extra = -x.shape[1] % chunk
    x = jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)]) if extra else x
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // chunk, chunk, *x.shape[2:]), 1, 0)


def _join(x: Float[Array, "chunks batch chunk ..."], seq: int) -> Float[Array, "batch seq ..."]:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :seq]


def _product(formula: str, *arrays: Array) -> Array:
    return jnp.einsum(formula, *arrays, precision=lax.Precision.HIGHEST)


def _decays(log_decay: Float[Array, "*lead chunk"]) -> Float[Array, "*lead chunk chunk"]:
    """d_ij: the decay from after token j to token i, 0 for j > i. Each is the exponential of a sum of its own.

    On CPUs the sums are a product by ones and zeros, which -inf has no place in: running sums are not vectorised there.
    """
    size = log_decay.shape[-1]
    below = np.tri(size, size, -1, bool)
    until = below | np.eye(size, dtype=bool)
    if known_platform() == "cpu":
        terms = jnp.where(until, jnp.maximum(log_decay, _FORGETS)[..., None, :], 0)
        sums = _product("...it,tj->...ij", terms, jnp.asarray(below, log_decay.dtype))
    else:
        sums = jnp.cumsum(jnp.where(below, log_decay[..., :, None], 0), axis=-2)
    return jnp.exp(jnp.where(until, sums, -jnp.inf))


def _one_chunk(before: _State, arrays: list[Array]) -> tuple[_State, tuple[Array, Array | None]]:
    """The state after a chunk, its outputs, and with parts what they read of the initial state."""
    q, k, v, log_decay, beta = arrays
    c = _Chunk(
        jnp.moveaxis(q, 1, 2),
        jnp.moveaxis(k, 1, 2),
        jnp.moveaxis(v, 1, 3),
        jnp.moveaxis(log_decay, 1, 3),
        jnp.moveaxis(beta, 1, 3),
    )
    decays, since = _decays(c.log_decay), jnp.exp(jnp.cumsum(c.log_decay, axis=-1))
    overlap = _product("bhik,bhjk->bhij", c.k, c.k)[:, :, None]
    solve = unit_lower_inverse(c.beta[..., None] * overlap * decays)
    look = _product("bhik,bhjk->bhij", c.q, c.k)[:, :, None] * decays

    def advance(state: Array, values: Array | None) -> tuple[Array, Array]:
        read = since[..., None] * _product("bhik,bhgkv->bhgiv", c.k, state)
        wanted = -read if values is None else values - read
        added = _product("bhgij,bhgjv->bhgiv", solve, c.beta[..., None] * wanted)
        out = since[..., None] * _product("bhik,bhgkv->bhgiv", c.q, state)
        out = out + _product("bhgij,bhgjv->bhgiv", look, added)
        kept = since[..., -1, None, None] * state
        put = _product("bhjk,bhgjv->bhgkv", c.k, decays[..., -1, :, None] * added)
        return kept + put, jnp.moveaxis(out, 3, 1)

    state, out = advance(before.state, c.v)
    if before.transition is None:
        return _State(state, None), (out, None)
    transition, reach = advance(before.transition, None)
    return _State(state, transition), (out, reach)
