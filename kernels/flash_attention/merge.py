"""Joining attention over several shards of the keys into attention over all of them."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from shardzoo.errors import fail_if
from shardzoo.kernels.flash_attention.options import accumulator


def merge(
    outs: Sequence[Float[Array, "batch q_len heads head_dim"]],
    lses: Sequence[Float[Array, "batch q_len heads"]],
) -> tuple[Float[Array, "batch q_len heads head_dim"], Float[Array, "batch q_len heads"]]:
    """The result over the union of disjoint key shards, from each shard's output and log-sum-exp.

    The weights are exp(lse_i - lse), computed in float32 or wider. A row that no shard has a key for stays
    zero with lse = -inf, and its gradient is zero. The output has the dtype of the shards' outputs; pass
    float32 outputs when many shards are merged one after another.

    Raises:
        InputError: no shard is given, or not one lse per output.
    """
    uneven = f"merge: outs={len(outs)} lses={len(lses)} must be equal and at least 1: give one lse per output"
    fail_if([uneven] if len(outs) != len(lses) or not outs else [], "merge")
    shards = jnp.stack([lse.astype(accumulator(lse.dtype)) for lse in lses])
    top = jnp.max(shards, axis=0)
    # A shard or a row without keys has lse = -inf; its weight is set, not computed, so that neither the
    # value nor the gradient passes through -inf - -inf.
    empty = jnp.isneginf(shards)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, shards - top)))
    total = weights.sum(0)
    safe = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(safe) + top)
    parts = [out.astype(weights.dtype) * (w / safe)[..., None] for out, w in zip(outs, weights, strict=True)]
    return sum(parts[1:], parts[0]).astype(outs[0].dtype), lse
