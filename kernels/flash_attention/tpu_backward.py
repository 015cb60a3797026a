"""Backward pass of attention on TPU: dq, dk and dv from one pass over the pairs, five matrix products a pair.

The grid runs over (batch, KV head, block of keys, block of queries of each head that reads the KV head). dk and dv of
a block of keys add up in VMEM. dq of a block of queries gets one contribution from every block of keys, each time
the grid comes round to it: in between it waits in one float32 array in HBM, in the size of dq, from where it is
fetched one step ahead. No partial result per block of keys is ever stored.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import Extras, out_struct
from shardzoo.kernels.flash_attention.tpu_blocks import Call, Edges, Scalar, Truth, scalars
from shardzoo.kernels.flash_attention.tpu_forward import cost, row_bytes
from shardzoo.kernels.flash_attention.tpu_tiles import (
    LOG2E,
    NOWHERE,
    dot,
    finish_logits,
    fold,
    folded,
    from_kernel,
    in_steps,
    kernel_shape,
    line_spec,
    negated,
    rows_spec,
    tile_mask,
    to_kernel,
    transposed,
    unpack,
    when,
    without_rows_from,
)
from shardzoo.kernels.outline import body_of

# Blocks of dq in VMEM: being read for the next step, being added to, being written after the last.
_SLOTS = 3
# dq of all heads of a KV head stays in VMEM up to this size, and never goes through HBM.
_RESIDENT_BYTES = 4 * 2**20


def softmax_gradient(
    call: Call, logits: Array, tanh: Array | None, d_weights: Array, lse: Array, delta: Array, seen: Array | None
) -> tuple[Float[Array, "tile_kv tile_q"], Float[Array, "tile_kv tile_q"], Float[Array, "tile_kv tile_q"]]:
    """Weights, and the gradients of logits after and before the soft cap (the same without one)."""
    weights = jnp.exp2(logits - lse)
    d_logits = weights * (d_weights - delta)
    if seen is not None:
        weights, d_logits = jnp.where(seen, weights, 0.0), jnp.where(seen, d_logits, 0.0)
    before = d_logits if tanh is None else d_logits * (1.0 - tanh * tanh)
    if tanh is not None and seen is not None:
        before = jnp.where(seen, before, 0.0)
    return weights, d_logits, before


class _Step:
    """One grid step: block j of keys meets block i of queries of head h."""

    def __init__(self, call: Call, numbers: Any, refs: tuple):
        refs = unpack(refs, *([True] * 6), call.segments, call.segments, call.bias is not None, *([True] * 10))
        self.call = call
        self.q, self.k, self.v, self.d_out, self.lse, self.delta, self.q_ids, self.kv_ids, self.bias, *rest = refs
        self.dq, self.dk, self.dv, self.dq_store, *scratch = rest
        self.folded, self.k_transposed, self.dk_sum, self.dv_sum, self.dq_sum, self.signals = scratch
        self.b, self.kv_head, self.j, self.n = (pl.program_id(axis) for axis in range(4))
        self.edges = Edges(call, numbers, self.b)
        self.visits = call.q_blocks * call.size.group
        self.i = self.block_of(self.n)
        self.resident = resident(call)
        self.slot = self.n if self.resident else jax.lax.rem(self.j * self.visits + self.n, _SLOTS)

    def run(self) -> None:
        """The whole step."""
        pl.when(self.n == 0)(self.start_keys)
        if self.resident:
            pl.when(self.j == 0)(self.clear)
        else:
            self.begin_transfers()
        meet, whole = self.edges.meet(self.i, self.j), self.whole()
        if isinstance(whole, bool):
            when(meet)(functools.partial(self.add_pairs, not whole))
        else:
            pl.when(jnp.logical_and(meet, whole))(functools.partial(self.add_pairs, False))
            pl.when(jnp.logical_and(meet, negated(whole)))(functools.partial(self.add_pairs, True))
        pl.when(self.j == self.call.kv_blocks - 1)(self.finish_queries)
        if not self.resident:
            self.end_transfers()
        pl.when(self.n == self.visits - 1)(self.finish_keys)

    def whole(self) -> Truth:
        """Whether no pair of the step needs a mask: queries that are no one's are told by their lse alone."""
        whole = self.edges.whole(self.i, self.j)
        if not self.call.q_tail:
            return whole
        inner = self.i < self.call.q_blocks - 1
        return inner if whole is True else False if whole is False else jnp.logical_and(whole, inner)

    def block_of(self, n: Scalar) -> Scalar:
        """The block of queries of visit n to a block of keys; heads follow one another."""
        return n if self.call.size.group == 1 else jax.lax.rem(n, self.call.q_blocks)

    # --- dq's way through HBM ---

    def clear(self) -> None:
        self.dq_sum[self.slot] = jnp.zeros(self.dq_sum.shape[1:], jnp.float32)

    def reads(self, j: Scalar, n: Scalar) -> Array:
        """Whether a step goes on with a dq that an earlier block of keys has begun."""
        first, stop = self.edges.kv_blocks(self.block_of(n))
        needed = (j < stop) | (j == self.call.kv_blocks - 1)
        return (j > first) & (stop > first) & needed

    def writes(self, j: Scalar, n: Scalar) -> Array:
        """Whether a later block of keys goes on with the dq of a step."""
        first, stop = self.edges.kv_blocks(self.block_of(n))
        return (first <= j) & (j < stop) & (j < self.call.kv_blocks - 1)

    def moved(self, by: int) -> tuple[Scalar, Scalar]:
        """Block of keys and visit of the step `by` steps later (earlier if negative)."""
        n = self.n + by
        over, under = n >= self.visits, n < 0
        j = self.j + over.astype(jnp.int32) - under.astype(jnp.int32)
        return j, jnp.where(over, n - self.visits, jnp.where(under, n + self.visits, n))

    def transfer(self, n: Scalar, slot: Scalar, inward: bool) -> Any:
        """The copy of the dq of visit n between HBM and a slot of VMEM."""
        row = (self.b * self.call.size.kv_heads + self.kv_head) * self.visits + n
        ends = (self.dq_store.at[row], self.dq_sum.at[slot])
        return pltpu.make_async_copy(*(ends if inward else ends[::-1]), self.signals.at[int(inward), slot])

    def begin_transfers(self) -> None:
        """Waits for this step's dq and starts to fetch the next one.

        The slot for the next one is free once the write begun two steps ago is over. All writes before that were
        waited for as well, and with more than _SLOTS visits the block to fetch is one of theirs.
        """
        reads = self.reads(self.j, self.n)
        pl.when(reads)(lambda: self.transfer(self.n, self.slot, True).wait())
        pl.when(jnp.logical_not(reads))(self.clear)
        j, n = self.moved(-2)
        free = jax.lax.rem(self.slot + 1, _SLOTS)
        pl.when((j >= 0) & self.writes(j, n))(lambda: self.transfer(n, free, False).wait())
        next_j, next_n = self.moved(1)
        ahead = (next_j < self.call.kv_blocks) & self.reads(next_j, next_n)
        pl.when(ahead)(lambda: self.transfer(next_n, free, True).start())

    def end_transfers(self) -> None:
        """Starts to write this step's dq; the last block of keys writes nothing, so none is left at the end."""
        pl.when(self.writes(self.j, self.n))(lambda: self.transfer(self.n, self.slot, False).start())

    # --- the pairs ---

    def start_keys(self) -> None:
        call, height = self.call, self.call.blocks.tile_kv
        for c in range(call.blocks.kv // height):
            k = self.k[c * height : (c + 1) * height, :]
            if call.kv_tail:
                k = without_rows_from(k, self.j * call.blocks.kv + c * height, call.size.kv_len)
            self.k_transposed[c] = transposed(k)
        self.dk_sum[...] = jnp.zeros_like(self.dk_sum)
        self.dv_sum[...] = jnp.zeros_like(self.dv_sum)

    def rows(self, ref: Any, t: int, masked: bool) -> Array:
        """Tile t of the queries' rows in a ref, zeros beyond the end of the array."""
        width = self.call.blocks.tile_q
        rows = ref[t * width : (t + 1) * width, :]
        if masked and self.call.q_tail:
            return without_rows_from(rows, self.i * self.call.blocks.q + t * width, self.call.size.q_len)
        return rows

    def add_pairs(self, masked: bool) -> None:
        blocks = self.call.blocks
        tiles, chunks = range(blocks.q // blocks.tile_q), range(blocks.kv // blocks.tile_kv)

        def fold_queries(t: int) -> None:
            self.folded[t] = folded(self.rows(self.q, t, masked), fold(self.call))

        def products(t: int, c: int) -> tuple[Array, Array]:
            if c == 0:
                fold_queries(t)
            keys = slice(c * blocks.tile_kv, (c + 1) * blocks.tile_kv)
            d_weights = dot(self.v[keys, :], self.rows(self.d_out, t, masked), 1, 1)
            return dot(self.k[keys, :], self.folded[t], 1, 1), d_weights

        def gradient(t: int, c: int, x: Array, d_weights: Array) -> tuple[Array, Array]:
            return self.gradient(t, c, x, d_weights, masked)

        def add(t: int, c: int, weights: Array, d_logits: Array) -> tuple:
            self.dv_sum[c] += dot(weights, self.rows(self.d_out, t, masked), 1, 0)
            self.dk_sum[c] += dot(d_logits, self.rows(self.q, t, masked), 1, 0)
            self.dq_sum[self.slot, t] += dot(self.k_transposed[c], d_logits, 1, 0)
            return ()

        in_steps([(t, c) for t in tiles for c in chunks], blocks.ahead, products, gradient, add)

    def gradient(self, t: int, c: int, x: Array, d_weights: Array, masked: bool) -> tuple[Array, Array]:
        call, blocks = self.call, self.call.blocks
        rows = slice(t * blocks.tile_q, (t + 1) * blocks.tile_q)
        keys = slice(c * blocks.tile_kv, (c + 1) * blocks.tile_kv)
        logits, tanh = finish_logits(call, x, None if self.bias is None else self.bias[rows, keys])
        seen = None
        if masked:
            ids = (self.q_ids, self.kv_ids) if call.segments else None
            starts = (self.i * blocks.q + t * blocks.tile_q, self.j * blocks.kv + c * blocks.tile_kv)
            seen = tile_mask(call, self.edges, ids, (rows, keys), starts, call.q_tail)
        lse, delta = self.lse[:, rows], self.delta[:, rows]
        weights, _, before_cap = softmax_gradient(call, logits, tanh, d_weights, lse, delta, seen)
        return weights.astype(self.q.dtype), before_cap.astype(self.q.dtype)

    def finish_queries(self) -> None:
        width = self.call.blocks.tile_q
        for t in range(self.call.blocks.q // width):
            dq = self.dq_sum[self.slot, t].T * self.call.options.scale
            self.dq[t * width : (t + 1) * width, :] = dq.astype(self.dq.dtype)

    def finish_keys(self) -> None:
        height = self.call.blocks.tile_kv
        for c in range(self.call.blocks.kv // height):
            keys = slice(c * height, (c + 1) * height)
            self.dk[keys, :] = (self.dk_sum[c] * self.call.options.scale).astype(self.dk.dtype)
            self.dv[keys, :] = self.dv_sum[c].astype(self.dv.dtype)


def resident(call: Call) -> bool:
    """Whether dq of all visits stays in VMEM: it fits, or there are too few visits to fetch ahead."""
    visits = call.q_blocks * call.size.group
    return visits <= _SLOTS or 4 * visits * call.blocks.q * call.size.head_dim <= _RESIDENT_BYTES


def _kernel(numbers: Any, *refs: Any, call: Call) -> None:
    _Step(call, numbers, refs).run()


def row_terms(
    call: Call, out: Array, lse: Array, d_out: Array, d_lse: Array
) -> tuple[Float[Array, "batch heads 1 padded"], Float[Array, "batch heads 1 padded"]]:
    """Per query: the base-2 lse and the sum that the gradient of the softmax subtracts, padded to whole blocks."""
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2) - d_lse
    nowhere = jnp.isneginf(lse)
    lse = jnp.where(nowhere, NOWHERE, lse * LOG2E)
    delta = jnp.where(nowhere, 0.0, delta)
    pad = ((0, 0), (0, 0), (0, call.q_blocks * call.blocks.q - call.size.q_len))
    return jnp.pad(lse, pad, constant_values=NOWHERE)[:, :, None], jnp.pad(delta, pad)[:, :, None]


def run(
    call: Call,
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    d_out: Float[Array, "batch q_len heads head_dim"],
    lse: Float[Array, "batch heads 1 padded"],
    delta: Float[Array, "batch heads 1 padded"],
) -> tuple[
    Float[Array, "batch q_len heads head_dim"],
    Float[Array, "batch kv_len kv_heads head_dim"],
    Float[Array, "batch kv_len kv_heads head_dim"],
]:
    """dq, dk and dv; lse and delta as `row_terms` makes them for the same call."""
    size, blocks = call.size, call.blocks
    visits = call.q_blocks * size.group

    def head_and_block(kv_head: Scalar, n: Scalar) -> tuple[Scalar, Scalar]:
        if size.group == 1:
            return kv_head, n
        return kv_head * size.group + jax.lax.div(n, call.q_blocks), jax.lax.rem(n, call.q_blocks)

    def q_at(b: Array, kv_head: Array, j: Array, n: Array, numbers: Any) -> tuple:
        head, i = head_and_block(kv_head, n)
        return b, _near(call, numbers, b, i, j), head

    def kv_at(b: Array, kv_head: Array, j: Array, n: Array, numbers: Any) -> tuple:
        return b, j, kv_head

    def dq_at(b: Array, kv_head: Array, j: Array, n: Array, numbers: Any) -> tuple:
        # Written in the last round only; until then the first block stays in place, so that none is sent off early.
        head, i = head_and_block(kv_head, jnp.where(j == call.kv_blocks - 1, n, 0))
        return b, i, head

    def ids_at(at: Any) -> Any:
        return lambda *args: (args[0], at(*args)[1], 0)

    def bias_at(*args: Any) -> tuple:
        b, i, head = q_at(*args)
        batch, heads = call.bias
        return b if batch > 1 else 0, head if heads > 1 else 0, i, args[2]

    rows, keys = rows_spec(call, blocks.q, q_at), rows_spec(call, blocks.kv, kv_at)
    line = line_spec(blocks.q, q_at)
    specs = [rows, keys, keys, rows, line, line]
    arrays = [*(to_kernel(x, call.packed) for x in (q, k, v, d_out)), lse, delta]
    if call.segments:
        specs += [line_spec(blocks.q, ids_at(q_at)), line_spec(blocks.kv, ids_at(kv_at))]
        arrays += [x.astype(jnp.int32)[:, None, None, :] for x in (extras.q_segment_ids, extras.kv_segment_ids)]
    if call.bias is not None:
        specs.append(pl.BlockSpec((None, None, blocks.q, blocks.kv), bias_at))
        arrays.append(extras.bias)
    tiles, chunks, wide = blocks.q // blocks.tile_q, blocks.kv // blocks.tile_kv, size.head_dim
    kept = resident(call)
    like_q, like_k = row_bytes(call, q.dtype.itemsize)
    stored_bytes = 0 if kept else 8 * size.batch * size.heads * size.q_len * size.head_dim
    stored = (1 if kept else size.batch * size.kv_heads * visits, tiles, wide, blocks.tile_q)
    kv_shape = kernel_shape(call, size.kv_len, size.kv_heads)
    dq, dk, dv, _ = pl.pallas_call(
        body_of(functools.partial(_kernel, call=call)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(size.batch, size.kv_heads, call.kv_blocks, visits),
            in_specs=specs,
            out_specs=[
                rows_spec(call, blocks.q, dq_at),
                keys,
                keys,
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            scratch_shapes=[
                pltpu.VMEM((tiles, blocks.tile_q, wide), q.dtype),
                pltpu.VMEM((chunks, wide, blocks.tile_kv), k.dtype),
                pltpu.VMEM((chunks, blocks.tile_kv, wide), jnp.float32),
                pltpu.VMEM((chunks, blocks.tile_kv, wide), jnp.float32),
                pltpu.VMEM((visits if kept else _SLOTS, tiles, wide, blocks.tile_q), jnp.float32),
                pltpu.SemaphoreType.DMA((2, _SLOTS)),
            ],
        ),
        out_shape=[
            out_struct(kernel_shape(call, size.q_len, size.heads), q.dtype, q),
            out_struct(kv_shape, k.dtype, q),
            out_struct(kv_shape, v.dtype, q),
            out_struct(stored, jnp.float32, q),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
        cost_estimate=cost(call, 5, 4 * like_k + like_q + call.kv_blocks * (2 * like_q + stored_bytes)),
        name="attention_backward",
    )(scalars(call, extras), *arrays)
    dq = from_kernel(dq, size.heads, call.packed)
    return dq, from_kernel(dk, size.kv_heads, call.packed), from_kernel(dv, size.kv_heads, call.packed)


def _near(call: Call, numbers: Any, b: Scalar, i: Scalar, j: Scalar) -> Scalar:
    """Query block i, or the nearest that sees key block j: a step with nothing to do then fetches nothing."""
    edges = Edges(call, numbers, b)
    if edges.meet(i, j) is True:
        return i
    first, stop = edges.q_blocks(j)
    return jnp.clip(jnp.clip(i, first, jnp.maximum(stop - 1, first)), 0, call.q_blocks - 1)
