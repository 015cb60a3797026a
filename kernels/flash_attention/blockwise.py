"""Attention tile by tile in plain XLA operations: every platform, every option, memory linear in the length.

A loop over (rows of the batch, KV heads), inside it one over query tiles, inside that one over the key tiles
that the query tile sees anything of. The forward pass keeps a running maximum and sum per query; the
backward pass computes the weights again from the log-sum-exp and adds up dk, dv (and dbias) tile by tile.
Everything is in `accumulator(q.dtype)`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import Extras, Options, Shaped, Sizes, accumulator, sizes, varying_like
from shardzoo.kernels.flash_attention.tiles import (
    Index,
    Tiles,
    backward_tiles,
    count,
    forward_tiles,
    live_range,
    start,
    tile_mask,
)


def supports(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    extras: Extras,
    options: Options,
) -> str | None:
    """Takes every call."""
    return None


class _Call(NamedTuple):
    """The arrays as given, and how they are cut."""

    q: Array
    k: Array
    v: Array
    bias: Array | None
    extras: Extras
    options: Options
    size: Sizes
    tiles: Tiles

    @property
    def dtype(self) -> jnp.dtype:
        return accumulator(self.q.dtype)


class _Step(NamedTuple):
    """Where a step is: first row of the batch, first KV head, index of the query tile."""

    row: Index
    head: Index
    q_index: Index


def _loop(first: Index, last: Index, body: Callable, carry):
    """`lax.fori_loop`, without a loop where there is only one turn."""
    if isinstance(first, int) and isinstance(last, int) and last - first == 1:
        return body(first, carry)
    return lax.fori_loop(first, last, body, carry)


def _for_each_head(call: _Call, body: Callable[[Index, Index, object], object], carry):
    """Runs body(row, head, carry) over all chunks of the batch and of the KV heads."""
    rows, heads = call.tiles.batch, call.tiles.kv_heads
    per_row = call.size.kv_heads // heads

    def turn(n: Index, carry):
        return body(n // per_row * rows, n % per_row * heads, carry)

    return _loop(0, call.size.batch // rows * per_row, turn, carry)


def _q_corner(call: _Call, step: _Step) -> tuple[Index, ...]:
    """Where the step's queries start in an array like q."""
    return step.row, start(step.q_index, call.size.q_len, call.tiles.q), step.head * call.size.group, 0


def _q_tile(call: _Call, x: Array, step: _Step) -> Float[Array, "rows kv_heads group_q head_dim"]:
    """The step's queries of x (laid out as call.q), in the accumulator's dtype, a group's queries one after another."""
    tiles, size = call.tiles, call.size
    shape = (tiles.batch, tiles.q, tiles.kv_heads * size.group, size.head_dim)
    x = lax.dynamic_slice(x, _q_corner(call, step), shape).astype(call.dtype)
    x = x.reshape(tiles.batch, tiles.q, tiles.kv_heads, size.group, size.head_dim).transpose(0, 2, 3, 1, 4)
    return x.reshape(tiles.batch, tiles.kv_heads, size.group * tiles.q, size.head_dim)


def _put_q_tile(call: _Call, into: Array, step: _Step, x: Array, *, add: bool) -> Array:
    """Writes a tile made by `_q_tile` back to where it came from."""
    tiles, size = call.tiles, call.size
    x = x.reshape(tiles.batch, tiles.kv_heads, size.group, tiles.q, size.head_dim).transpose(0, 3, 1, 2, 4)
    x = x.reshape(tiles.batch, tiles.q, tiles.kv_heads * size.group, size.head_dim).astype(into.dtype)
    corner = _q_corner(call, step)
    return lax.dynamic_update_slice(into, x + lax.dynamic_slice(into, corner, x.shape) if add else x, corner)


def _kv_tile(call: _Call, x: Array, step: _Step, kv_index: Index) -> Float[Array, "rows kv_heads kv head_dim"]:
    """The step's keys or values of tile kv_index, in the accumulator's dtype.

    Heads before keys: XLA for CPUs multiplies by such keys as they are, by keys before heads after a transposition to
    (head_dim, kv) in every step, which takes as long as half the product.
    """
    tiles, size = call.tiles, call.size
    shape = (tiles.batch, tiles.kv, tiles.kv_heads, size.head_dim)
    corner = (step.row, start(kv_index, size.kv_len, tiles.kv), step.head, 0)
    return lax.dynamic_slice(x, corner, shape).astype(call.dtype).swapaxes(1, 2)


def _row_tile(call: _Call, x: Array, step: _Step) -> Float[Array, "rows kv_heads group_q 1"]:
    """The step's queries of a number per query, x (batch, kv_heads, group, q_len)."""
    tiles, size = call.tiles, call.size
    first = start(step.q_index, size.q_len, tiles.q)
    x = lax.dynamic_slice(x, (step.row, step.head, 0, first), (tiles.batch, tiles.kv_heads, size.group, tiles.q))
    return x.reshape(tiles.batch, tiles.kv_heads, size.group * tiles.q, 1)


def _bias_part(call: _Call, step: _Step, kv_index: Index) -> tuple[tuple, tuple[int, ...]]:
    """Start and shape of the step's part of the bias (1 or batch, 1 or heads, q_len, kv_len)."""
    tiles, size, (rows, heads) = call.tiles, call.size, call.bias.shape[:2]
    corner = (
        step.row if rows > 1 else 0,
        step.head * size.group if heads > 1 else 0,
        start(step.q_index, size.q_len, tiles.q),
        start(kv_index, size.kv_len, tiles.kv),
    )
    return corner, (min(tiles.batch, rows), min(tiles.kv_heads * size.group, heads), tiles.q, tiles.kv)


def _dot(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)


def _logits(
    call: _Call, step: _Step, kv_index: Index, q: Array, k: Array, *, each_query_once: bool
) -> tuple[Float[Array, "rows kv_heads group_q kv"], Array | None]:
    """Masked logits of scaled queries, and what the soft cap's derivative needs: tanh of the capped logits."""
    tiles, size, options = call.tiles, call.size, call.options
    logits = _dot("bhrd,bhtd->bhrt", q, k)
    bent = None
    if options.soft_cap is not None:
        bent = jnp.tanh(logits / options.soft_cap)
        logits = options.soft_cap * bent
    mask = tile_mask(
        size, tiles, call.extras, options, step.row, step.q_index, kv_index, each_query_once=each_query_once
    )
    whole = logits.reshape(tiles.batch, tiles.kv_heads * size.group, tiles.q, tiles.kv)
    if call.bias is not None:
        whole = whole + lax.dynamic_slice(call.bias, *_bias_part(call, step, kv_index)).astype(call.dtype)
    if mask is not None:
        whole = jnp.where(mask[:, None], whole, -jnp.inf)
    return whole.reshape(logits.shape), bent


def forward(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    options: Options,
) -> tuple[Float[Array, "batch q_len heads head_dim"], Float[Array, "batch heads q_len"]]:
    """Output and log-sum-exp; see `options`."""
    size = sizes(q, k)
    tiles = forward_tiles(size, extras, options)
    call = _Call(q, k, v, extras.bias, extras, options, size, tiles)

    def head(row: Index, head: Index, carry):
        def queries(q_index: Index, carry):
            out, lse = carry
            step = _Step(row, head, q_index)
            tile, tile_lse = _forward_tile(call, step)
            first = start(q_index, size.q_len, tiles.q)
            tile_lse = tile_lse.reshape(tiles.batch, tiles.kv_heads, size.group, tiles.q)
            lse = lax.dynamic_update_slice(lse, tile_lse, (row, head, 0, first))
            return _put_q_tile(call, out, step, tile, add=False), lse

        return _loop(0, count(size.q_len, tiles.q), queries, carry)

    lse = jnp.zeros((size.batch, size.kv_heads, size.group, size.q_len), call.dtype)
    out, lse = _for_each_head(call, head, varying_like((jnp.zeros(q.shape, q.dtype), lse), q))
    return out, lse.reshape(size.batch, size.heads, size.q_len)


def _forward_tile(call: _Call, step: _Step) -> tuple[Array, Array]:
    """Output (rows, kv_heads, group_q, head_dim) and lse (.., 1) of a query tile."""
    q = _q_tile(call, call.q, step) * call.options.scale

    def found(kv_index: Index, top: Array | None = None) -> tuple[Array, Array, Array, Array]:
        """The maximum with this tile's keys, what weights are measured from, their sum and that of the values."""
        k, v = (_kv_tile(call, x, step, kv_index) for x in (call.k, call.v))
        logits, _ = _logits(call, step, kv_index, q, k, each_query_once=False)
        own = logits.max(-1, keepdims=True)
        top = own if top is None else jnp.maximum(top, own)
        # Until a query has seen a key its maximum is -inf; it is measured from 0, since -inf - -inf is NaN.
        level = jnp.where(jnp.isneginf(top), 0, top)
        weights = jnp.exp(logits - level)
        return top, level, weights.sum(-1, keepdims=True), _dot("bhrt,bhtd->bhrd", weights, v)

    def keys(kv_index: Index, carry):
        top, total, out = carry
        new_top, level, own_total, own_out = found(kv_index, top)
        kept = jnp.exp(top - level)
        return new_top, total * kept + own_total, out * kept + own_out

    first, last = live_range(call.size, call.tiles, call.extras, call.options, step.row, step.q_index)
    if count(call.size.kv_len, call.tiles.kv) == 1:
        top, _, total, out = found(0)
    else:
        column = jnp.zeros((*q.shape[:-1], 1), call.dtype)
        carry = varying_like((column - jnp.inf, column, jnp.zeros(q.shape, call.dtype)), call.q)
        top, total, out = _loop(first, last, keys, carry)
    safe = jnp.where(total == 0, 1, total)
    return out / safe, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))


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
    """dq, dk, dv and dbias (None without a bias); see `options`."""
    size = sizes(q, k)
    tiles = backward_tiles(size)
    call = _Call(q, k, v, extras.bias, extras, options, size, tiles)
    per_query = (size.batch, size.kv_heads, size.group, size.q_len)
    given = _Given(out, d_out, *(x.reshape(per_query) for x in (lse, d_lse)))

    def head(row: Index, head: Index, carry):
        dq, dk, dv, dbias = carry
        shape = (tiles.batch, tiles.kv_heads, size.head_dim, size.kv_len)
        sums = varying_like((jnp.zeros(shape, call.dtype), jnp.zeros(shape, call.dtype)), q)

        def queries(q_index: Index, carry):
            dq, *sums = carry
            step = _Step(row, head, q_index)
            tile, sums = _backward_tile(call, given, step, tuple(sums))
            return _put_q_tile(call, dq, step, tile, add=size.q_len % tiles.q != 0), *sums

        dq, dk_part, dv_part, dbias = _loop(0, count(size.q_len, tiles.q), queries, (dq, *sums, dbias))
        dk = lax.dynamic_update_slice(dk, dk_part.transpose(0, 3, 1, 2).astype(k.dtype), (row, 0, head, 0))
        dv = lax.dynamic_update_slice(dv, dv_part.transpose(0, 3, 1, 2).astype(v.dtype), (row, 0, head, 0))
        return dq, dk, dv, dbias

    zeros = [jnp.zeros(x.shape, x.dtype) for x in (q, k, v)]
    wanted = call.bias is not None and options.bias_gradient
    dbias = jnp.zeros(call.bias.shape, call.dtype) if wanted else None
    dq, dk, dv, dbias = _for_each_head(call, head, varying_like((*zeros, dbias), q))
    if dbias is not None:
        dbias = dbias.astype(extras.bias.dtype)
    return dq, dk, dv, dbias


class _Given(NamedTuple):
    """What the backward pass is given: out, d_out as call.q, lse, d_lse (batch, kv_heads, group, q_len)."""

    out: Array
    d_out: Array
    lse: Array
    d_lse: Array


def _backward_tile(
    call: _Call, given: _Given, step: _Step, sums: tuple[Array, Array, Array | None]
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    """dq of a query tile, and the sums dk, dv (rows, kv_heads, head_dim, kv_len) and dbias with its part added."""
    size, tiles = call.size, call.tiles
    q = _q_tile(call, call.q, step) * call.options.scale
    d_out = _q_tile(call, given.d_out, step)
    lse = _row_tile(call, given.lse, step)
    # A query without keys has no weights to differentiate, whatever cotangent its lse of -inf was given.
    empty = jnp.isneginf(lse)
    lse = jnp.where(empty, 0, lse)
    delta = (d_out * _q_tile(call, given.out, step)).sum(-1, keepdims=True)
    delta = jnp.where(empty, 0, delta - _row_tile(call, given.d_lse, step))
    # Turned once for all key tiles: products summed over the rows of both operands take XLA for CPUs two to four times
    # as long. The barrier keeps it from writing the turned ones into the products as just such sums.
    q_turned, d_out_turned = lax.optimization_barrier((q.swapaxes(2, 3), d_out.swapaxes(2, 3)))

    def keys(kv_index: Index, carry):
        dq, dk, dv, dbias = carry
        k, v = (_kv_tile(call, x, step, kv_index) for x in (call.k, call.v))
        logits, bent = _logits(call, step, kv_index, q, k, each_query_once=True)
        weights = jnp.exp(logits - lse)
        d_logits = weights * (_dot("bhrd,bhtd->bhrt", d_out, v) - delta)
        if dbias is not None:
            dbias = _add_bias_part(call, step, kv_index, dbias, d_logits)
        if bent is not None:
            d_logits = d_logits * (1 - bent * bent)
        first = start(kv_index, size.kv_len, tiles.kv)
        dv = _add_keys(dv, first, _dot("bhdr,bhrt->bhdt", d_out_turned, weights))
        dk = _add_keys(dk, first, _dot("bhdr,bhrt->bhdt", q_turned, d_logits))
        return dq + _dot("bhrt,bhtd->bhrd", d_logits, k), dk, dv, dbias

    first, last = live_range(size, tiles, call.extras, call.options, step.row, step.q_index)
    dq = varying_like(jnp.zeros(q.shape, call.dtype), call.q)
    dq, *sums = _loop(first, last, keys, (dq, *sums))
    return dq * call.options.scale, tuple(sums)


def _add_keys(total: Array, first: Index, part: Array) -> Array:
    """Adds a key tile's part to the sum over all keys (dim 3)."""
    seen = lax.dynamic_slice_in_dim(total, first, part.shape[3], 3)
    return lax.dynamic_update_slice_in_dim(total, seen + part, first, 3)


def _add_bias_part(call: _Call, step: _Step, kv_index: Index, dbias: Array, d_logits: Array) -> Array:
    """Adds the tile's gradient, summed over the dims that share a bias, to where the bias was read."""
    size, tiles = call.size, call.tiles
    whole = d_logits.reshape(tiles.batch, tiles.kv_heads * size.group, tiles.q, tiles.kv)
    corner, shape = _bias_part(call, step, kv_index)
    shared = tuple(n for n in range(2) if shape[n] == 1 and whole.shape[n] > 1)
    part = whole.sum(shared, keepdims=True)
    return lax.dynamic_update_slice(dbias, lax.dynamic_slice(dbias, corner, shape) + part, corner)
