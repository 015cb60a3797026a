"""Gradient of the bias on TPU: d_logits, summed over the batch rows and heads that share a bias.

A pass of its own: the shared rows and heads have to come one after another for their sum to stay in VMEM, while the
pass for dq, dk and dv needs them in another order. It makes the logits again, two matrix products a pair.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import Extras, out_struct
from shardzoo.kernels.flash_attention.tpu_backward import softmax_gradient
from shardzoo.kernels.flash_attention.tpu_blocks import Call, Edges, Scalar, scalars
from shardzoo.kernels.flash_attention.tpu_forward import cost, row_bytes
from shardzoo.kernels.flash_attention.tpu_tiles import (
    dot,
    finish_logits,
    fold,
    folded,
    group_of,
    line_spec,
    rows_spec,
    tile_mask,
    to_kernel,
    unpack,
    when,
)
from shardzoo.kernels.outline import body_of


def _shared(call: Call, outer: tuple[Scalar, Scalar], shared: Scalar) -> tuple[Scalar, Scalar]:
    """The batch row and head of number `shared` among those that share the bias at `outer` = (row, head)."""
    batch, heads = call.bias
    per_row = 1 if heads > 1 else call.size.heads
    row = outer[0] if batch > 1 else jax.lax.div(shared, per_row)
    head = outer[1] if heads > 1 else jax.lax.rem(shared, per_row)
    return row, head


def _kernel(numbers: Any, *refs: Any, call: Call) -> None:
    refs = unpack(refs, *([True] * 7), call.segments, call.segments, True, True)
    q, k, v, d_out, lse, delta, bias, q_ids, kv_ids, d_bias, total = refs
    i, j, shared = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    row, _ = _shared(call, (pl.program_id(0), pl.program_id(1)), shared)
    edges = Edges(call, numbers, row)

    @pl.when(shared == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @when(edges.meet(i, j))
    def _() -> None:
        logits, tanh = finish_logits(call, dot(k[...], folded(q[...], fold(call)), 1, 1), bias[...])
        ids = (q_ids, kv_ids) if call.segments else None
        starts = (i * call.blocks.q, j * call.blocks.kv)
        seen = tile_mask(call, edges, ids, (slice(None), slice(None)), starts, True)
        d_weights = dot(v[...], d_out[...], 1, 1)
        _, d_logits, _ = softmax_gradient(call, logits, tanh, d_weights, lse[...], delta[...], seen)
        total[...] += d_logits

    @pl.when(shared == pl.num_programs(4) - 1)
    def _() -> None:
        d_bias[...] = total[...].T.astype(d_bias.dtype)


def run(
    call: Call,
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    d_out: Float[Array, "batch q_len heads head_dim"],
    lse: Float[Array, "batch heads 1 padded"],
    delta: Float[Array, "batch heads 1 padded"],
) -> Float[Array, "bias_batch bias_heads q_len kv_len"]:
    """The bias's gradient in its own shape and dtype; lse and delta as `row_terms` makes them for the same call."""
    size, blocks, (batch, heads) = call.size, call.blocks, call.bias

    def q_at(b: Array, h: Array, i: Array, j: Array, shared: Array, numbers: Any) -> tuple:
        row, head = _shared(call, (b, h), shared)
        return row, i, head

    def kv_at(b: Array, h: Array, i: Array, j: Array, shared: Array, numbers: Any) -> tuple:
        row, head = _shared(call, (b, h), shared)
        return row, j, group_of(call, head)

    def ids_at(at: Any) -> Any:
        return lambda *args: (*at(*args)[:2], 0)

    rows, keys = rows_spec(call, blocks.q, q_at), rows_spec(call, blocks.kv, kv_at)
    line = line_spec(blocks.q, q_at)
    pairs = pl.BlockSpec((None, None, blocks.q, blocks.kv), lambda b, h, i, j, shared, numbers: (b, h, i, j))
    specs = [rows, keys, keys, rows, line, line, pairs]
    arrays = [*(to_kernel(x, call.packed) for x in (q, k, v, d_out)), lse, delta, extras.bias]
    if call.segments:
        specs += [line_spec(blocks.q, ids_at(q_at)), line_spec(blocks.kv, ids_at(kv_at))]
        arrays += [x.astype(jnp.int32)[:, None, None, :] for x in (extras.q_segment_ids, extras.kv_segment_ids)]
    like_q, like_k = row_bytes(call, q.dtype.itemsize)
    bias_bytes = 2 * extras.bias.size * extras.bias.dtype.itemsize
    shared = size.batch // batch * (size.heads // heads)
    return pl.pallas_call(
        body_of(functools.partial(_kernel, call=call)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, call.q_blocks, call.kv_blocks, shared),
            in_specs=specs,
            out_specs=pairs,
            scratch_shapes=[pltpu.VMEM((blocks.kv, blocks.q), jnp.float32)],
        ),
        out_shape=out_struct(extras.bias.shape, extras.bias.dtype, q),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=cost(call, 2, 2 * (call.kv_blocks * like_q + call.q_blocks * size.group * like_k) + bias_bytes),
        name="attention_bias_gradient",
    )(scalars(call, extras), *arrays)
