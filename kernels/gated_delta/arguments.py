"""Checks the arguments of a call and brings them to the form that implementations receive."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array

from shardzoo.errors import fail_if
from shardzoo.kernels.flash_attention.options import accumulator, manual_axes, varying_over
from shardzoo.kernels.gated_delta.options import Call


def prepare(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    state: Array | None,
    mask: Array | None,
) -> Call:
    """The checked call: gates in float32 at least, heads grouped by their key head, masked tokens made idle.

    Raises:
        InputError: arguments that contradict each other, all of them in one message.
    """
    fail_if(_problems(q, k, v, log_decay, beta, state, mask), "gated_delta")
    dtype, (batch, seq, key_heads, key_dim) = accumulator(v.dtype), q.shape
    grouped = (batch, seq, key_heads, v.shape[2] // key_heads)
    log_decay, beta = (x.astype(dtype) for x in (log_decay, beta))
    if mask is not None:
        log_decay, beta = (jnp.where(mask[..., None], x, 0) for x in (log_decay, beta))
    shape = (batch, *grouped[2:], key_dim, v.shape[3])
    call = Call(
        q=q,
        k=k,
        v=v.reshape(*grouped, v.shape[3]),
        log_decay=log_decay.reshape(grouped),
        beta=beta.reshape(grouped),
        state=jnp.zeros(shape, dtype) if state is None else state.astype(dtype).reshape(shape),
    )
    axes = frozenset().union(*(manual_axes(x) for x in jax.tree.leaves(call)))
    return varying_over(call, axes)


def _problems(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array | None, mask: Array | None
) -> Iterator[str]:
    if any(x.ndim != 4 for x in (q, k, v)):
        shapes = ", ".join(str(x.shape) for x in (q, k, v))
        yield f"q, k, v: shapes {shapes} must each be (batch, length, heads, head_dim): add the missing dims"
        return
    batch, seq, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    if k.shape != q.shape:
        yield f"q, k: shapes {q.shape} and {k.shape} differ: give one key for each query"
    if v.shape[:2] != (batch, seq):
        yield f"v: batch and length {v.shape[:2]} are not the {(batch, seq)} of q: give one value for each token"
    if key_heads == 0 or heads % key_heads:
        yield f"v: heads={heads} does not divide by the key_heads={key_heads} of q and k: change one of them"
    wanted = {
        "log_decay": (log_decay, (batch, seq, heads)),
        "beta": (beta, (batch, seq, heads)),
        "state": (state, (batch, heads, key_dim, value_dim)),
        "mask": (mask, (batch, seq)),
    }
    for name, (x, shape) in wanted.items():
        if x is not None and x.shape != shape:
            yield f"{name}: shape {x.shape} must be {shape}: reshape it"
