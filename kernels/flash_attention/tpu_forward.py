"""Forward pass of attention on TPU: softmax(q . k) . v with running maxima and sums, one pass over the keys.

The grid runs over (batch, head, block of queries, block of keys). For one block of queries the maximum, the sum and
the output are held transposed, queries along lanes, in VMEM. The output is divided by the sum once, at the end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import Extras, accumulator, out_struct
from shardzoo.kernels.flash_attention.tpu_blocks import Call, Edges, Scalar, scalars
from shardzoo.kernels.flash_attention.tpu_tiles import (
    LN2,
    LOWEST,
    dot,
    finish_logits,
    fold,
    folded,
    from_kernel,
    group_of,
    in_steps,
    kernel_shape,
    line_spec,
    loop,
    negated,
    rows_spec,
    tile_mask,
    to_kernel,
    transposed,
    unpack,
    when,
    window,
    without_rows_from,
)
from shardzoo.kernels.outline import body_of

# Rows of queries and of keys that masked code works on between two branches: enough to keep the units busy, few
# enough to leave out much of a block that a band cuts through. Where only the array's end hides keys, nothing is.
_EDGE_ROWS = 512
_TAIL_ROWS = 1024


class _Step:
    """One grid step: block i of queries of head h meets block j of keys."""

    def __init__(self, call: Call, numbers: Any, refs: tuple):
        inputs = unpack(refs, True, True, True, call.segments, call.segments, call.bias is not None, *([True] * 6))
        self.call = call
        self.q, self.k, self.v, self.q_ids, self.kv_ids, self.bias, self.out, self.lse, *scratch = inputs
        self.folded, self.top, self.total, self.sums = scratch
        self.i, self.j = pl.program_id(2), pl.program_id(3)
        self.edges = Edges(call, numbers, pl.program_id(0))

    def run(self) -> None:
        """The whole step."""
        pl.when(self.j == 0)(self.start)
        meet, whole = self.edges.meet(self.i, self.j), self.edges.whole(self.i, self.j)
        if isinstance(whole, bool) and whole:
            when(meet)(self.all_tiles)
        elif isinstance(whole, bool):
            when(meet)(self.edge_tiles)
        else:
            pl.when(jnp.logical_and(meet, whole))(self.all_tiles)
            pl.when(jnp.logical_and(meet, negated(whole)))(self.edge_tiles)
        pl.when(self.j == self.call.kv_blocks - 1)(self.finish)

    @property
    def tiles(self) -> range:
        return range(self.call.blocks.q // self.call.blocks.tile_q)

    def start(self) -> None:
        width, factor = self.call.blocks.tile_q, fold(self.call)
        for t in self.tiles:
            rows = self.q[t * width : (t + 1) * width, :]
            self.folded[t] = transposed(folded(rows, factor))
        self.top[...] = jnp.full_like(self.top, LOWEST)
        self.total[...] = jnp.zeros_like(self.total)
        self.sums[...] = jnp.zeros_like(self.sums)

    def all_tiles(self) -> None:
        tiles, chunks = whole_part(self.call)
        items = [(t, c, False) for t in range(tiles) for c in range(chunks)]
        loop(len(self.tiles) // tiles, lambda a: self.attend(items, a * tiles, 0))

    def edge_tiles(self) -> None:
        """Masked tiles: in a loop, which keeps the program small, over parts that are left out where nothing is seen.

        Where only the end of the array hides keys, its place is known and one tile of keys needs a mask.
        """
        call, blocks = self.call, self.call.blocks
        tiles, chunks, masked = edge_part(call)
        items = [(t, c, masked[c]) for t in range(tiles) for c in range(chunks)]
        rows, keys = tiles * blocks.tile_q, chunks * blocks.tile_kv

        def part(a: Scalar, b: Scalar) -> None:
            row, key = self.i * blocks.q + a * rows, self.j * blocks.kv + b * keys
            seen = self.edges.some_visible(row, rows, key, keys) if call.moving_edges else True
            when(seen)(lambda: self.attend(items, a * tiles, b * chunks))

        parts = blocks.kv // keys if call.moving_edges else 1
        loop(blocks.q // rows, lambda a: loop(parts, lambda b: part(a, b)))

    def attend(self, items: list[tuple[int, int, bool]], tile: Scalar, chunk: Scalar) -> None:
        """Adds tiles (of queries, of keys, whether masked) to the sums; numbers count from `tile` and `chunk`."""
        blocks = self.call.blocks
        last = {t: c for t, c, _ in items}
        held: dict[tuple[str, int], Array] = {}

        def read(name: str, t: int) -> Array:
            return held[name, t] if (name, t) in held else getattr(self, name)[tile + t]

        def write(name: str, t: int, c: int, value: Array) -> None:
            if blocks.registers and c != last[t]:
                held[name, t] = value
            else:
                getattr(self, name)[tile + t] = value

        def logits(t: int, c: int, masked: bool) -> tuple[Array]:
            return (self.logits(tile + t, chunk + c, masked),)

        def softmax(t: int, c: int, masked: bool, x: Array) -> tuple[Array, Array]:
            top = read("top", t)
            new = jnp.maximum(top, jnp.max(x, axis=0, keepdims=True))
            weights, shrink = jnp.exp2(x - new), jnp.exp2(top - new)
            write("top", t, c, new)
            write("total", t, c, shrink * read("total", t) + jnp.sum(weights, axis=0, keepdims=True))
            return weights.astype(self.v.dtype), shrink

        def add(t: int, c: int, masked: bool, weights: Array, shrink: Array) -> tuple:
            v = self.v[window((chunk + c) * blocks.tile_kv, blocks.tile_kv), :]
            if masked and self.call.kv_tail:
                v = without_rows_from(v, self.key_of(chunk + c), self.call.size.kv_len)
            write("sums", t, c, read("sums", t) * shrink + dot(v, weights, 0, 0))
            return ()

        in_steps(items, blocks.ahead, logits, softmax, add)

    def key_of(self, chunk: Scalar) -> Scalar:
        return self.j * self.call.blocks.kv + chunk * self.call.blocks.tile_kv

    def logits(self, tile: Scalar, chunk: Scalar, masked: bool) -> Float[Array, "tile_kv tile_q"]:
        call, blocks = self.call, self.call.blocks
        keys = window(chunk * blocks.tile_kv, blocks.tile_kv)
        rows = window(tile * blocks.tile_q, blocks.tile_q)
        bias = None if self.bias is None else self.bias[rows, keys]
        x, _ = finish_logits(call, dot(self.k[keys, :], self.folded[tile], 1, 0), bias)
        if not masked:
            return x
        ids = (self.q_ids, self.kv_ids) if call.segments else None
        starts = (self.i * blocks.q + tile * blocks.tile_q, self.key_of(chunk))
        return jnp.where(tile_mask(call, self.edges, ids, (rows, keys), starts, False), x, -jnp.inf)

    def finish(self) -> None:
        call, width = self.call, self.call.blocks.tile_q
        for t in self.tiles:
            rows = slice(t * width, (t + 1) * width)
            total = self.total[t]
            some = total > 0
            if call.q_lengths:
                at = self.i * call.blocks.q + t * width
                some &= at + jax.lax.broadcasted_iota(jnp.int32, total.shape, 1) < self.edges.q_end
            safe = jnp.where(some, total, 1.0)
            self.lse[:, rows] = jnp.where(some, self.top[t] * LN2 + jnp.log(safe), -jnp.inf)
            out = jnp.where(some, self.sums[t] * (1.0 / safe), 0.0)
            self.out[rows, :] = out.T.astype(self.out.dtype)


def whole_part(call: Call) -> tuple[int, int]:
    """How many tiles of queries and of keys unmasked code works on in one go."""
    blocks = call.blocks
    chunks = blocks.kv // blocks.tile_kv
    return _part(blocks.q // blocks.tile_q, blocks.written // chunks), chunks


def edge_part(call: Call) -> tuple[int, int, list[bool]]:
    """How many tiles of queries and of keys masked code works on in one go, and which of the latter need a mask."""
    blocks = call.blocks
    tiles, chunks = blocks.q // blocks.tile_q, blocks.kv // blocks.tile_kv
    if call.bias is not None:
        return tiles, chunks, [True] * chunks
    if call.moving_edges:
        chunks = _part(chunks, _EDGE_ROWS // blocks.tile_kv)
        return _part(tiles, _EDGE_ROWS // blocks.tile_q), chunks, [True] * chunks
    valid = call.size.kv_len - (call.kv_blocks - 1) * blocks.kv
    ends = [(c + 1) * blocks.tile_kv for c in range(pl.cdiv(valid, blocks.tile_kv))]
    return _part(tiles, _TAIL_ROWS // blocks.tile_q), len(ends), [valid < end for end in ends]


def _part(whole: int, most: int) -> int:
    """The largest divisor of `whole` that is at most `most`, and at least 1."""
    return next(n for n in range(max(1, min(most, whole)), 0, -1) if whole % n == 0)


def _kernel(numbers: Any, *refs: Any, call: Call) -> None:
    _Step(call, numbers, refs).run()


def run(
    call: Call,
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
) -> tuple[Float[Array, "batch q_len heads head_dim"], Float[Array, "batch heads q_len"]]:
    """The output in q's dtype and its log-sum-exp (natural, float32)."""
    size, blocks = call.size, call.blocks

    def q_at(b: Array, h: Array, i: Array, j: Array, numbers: Any) -> tuple:
        return b, i, h

    def kv_at(b: Array, h: Array, i: Array, j: Array, numbers: Any) -> tuple:
        return b, _near(call, numbers, b, i, j), group_of(call, h)

    def q_ids_at(*at: Any) -> tuple:
        return at[0], q_at(*at)[1], 0

    def kv_ids_at(*at: Any) -> tuple:
        return at[0], kv_at(*at)[1], 0

    def bias_at(b: Array, h: Array, i: Array, j: Array, numbers: Any) -> tuple:
        batch, heads = call.bias
        return b if batch > 1 else 0, h if heads > 1 else 0, i, _near(call, numbers, b, i, j)

    specs = [rows_spec(call, blocks.q, q_at), rows_spec(call, blocks.kv, kv_at), rows_spec(call, blocks.kv, kv_at)]
    arrays = [to_kernel(x, call.packed) for x in (q, k, v)]
    if call.segments:
        specs += [line_spec(blocks.q, q_ids_at), line_spec(blocks.kv, kv_ids_at)]
        arrays += [x.astype(jnp.int32)[:, None, None, :] for x in (extras.q_segment_ids, extras.kv_segment_ids)]
    if call.bias is not None:
        specs.append(pl.BlockSpec((None, None, blocks.q, blocks.kv), bias_at))
        arrays.append(extras.bias)
    tiles, wide = blocks.q // blocks.tile_q, blocks.tile_q
    like_q, like_k = row_bytes(call, q.dtype.itemsize)
    out, lse = pl.pallas_call(
        body_of(functools.partial(_kernel, call=call)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(size.batch, size.heads, call.q_blocks, call.kv_blocks),
            in_specs=specs,
            out_specs=[rows_spec(call, blocks.q, q_at), line_spec(blocks.q, q_at)],
            scratch_shapes=[
                pltpu.VMEM((tiles, size.head_dim, wide), q.dtype),
                pltpu.VMEM((tiles, 1, wide), jnp.float32),
                pltpu.VMEM((tiles, 1, wide), jnp.float32),
                pltpu.VMEM((tiles, size.head_dim, wide), jnp.float32),
            ],
        ),
        out_shape=[
            out_struct(kernel_shape(call, size.q_len, size.heads), q.dtype, q),
            out_struct((size.batch, size.heads, 1, size.q_len), accumulator(q.dtype), q),
        ],
        # A block of the output is written after the last use of its queries: it takes their place, unless they are
        # needed after the call. Whole blocks only, as the interpreter asks.
        input_output_aliases={1: 0} if size.q_len % blocks.q == 0 else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost(call, 2, 2 * like_q + 2 * call.q_blocks * size.group * like_k),
        name="attention_forward",
    )(scalars(call, extras), *arrays)
    return from_kernel(out, size.heads, call.packed), lse[:, :, 0]


def _near(call: Call, numbers: Any, b: Scalar, i: Scalar, j: Scalar) -> Scalar:
    """Key block j, or the nearest that query block i sees: a step with nothing to do then fetches nothing."""
    edges = Edges(call, numbers, b)
    if edges.meet(i, j) is True:
        return j
    first, stop = edges.kv_blocks(i)
    return jnp.clip(jnp.clip(j, first, jnp.maximum(stop - 1, first)), 0, call.kv_blocks - 1)


def cost(call: Call, products: int, moved: int) -> pl.CostEstimate:
    """What a pass costs: `products` matrix products over the pairs that a band leaves, `moved` bytes of traffic."""
    size, options = call.size, call.options
    offset = size.kv_len - size.q_len if options.q_offset is None else options.q_offset
    at = np.arange(size.q_len) + offset
    first = np.zeros_like(at) if options.before is None else np.clip(at - options.before, 0, size.kv_len)
    stop = np.full_like(at, size.kv_len) if options.after is None else np.clip(at + options.after + 1, 0, size.kv_len)
    pairs = size.batch * size.heads * int(np.maximum(stop - first, 0).sum())
    return pl.CostEstimate(flops=2 * products * pairs * size.head_dim, transcendentals=pairs, bytes_accessed=moved)


def row_bytes(call: Call, itemsize: int) -> tuple[int, int]:
    """The size of an array like q and of one like k."""
    size = call.size
    row = size.batch * size.head_dim * itemsize
    return row * size.heads * size.q_len, row * size.kv_heads * size.kv_len
