"""The bodies of the Pallas kernels for NVIDIA GPUs (Triton back end), and what they share.

Every kernel works on one tile of queries and one of keys at a time, in registers. Logits are kept in base 2:
log2(e) is folded into the scale, so that a weight is one exp2. A tile is masked only if the band, a length, a
segment or the end of the keys cuts through it; tiles that nobody sees are not visited.

A kernel receives a dict of references; optional arrays are missing from it. Sizes that Triton needs as powers
of two (tiles, head_dim) are rounded up: what lies beyond the array is read as 0 and not written.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from shardzoo.kernels.flash_attention.options import Options, Sizes

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@dataclass(frozen=True)
class Spec:
    """What is known when a kernel is traced: sizes, options, tile sizes, head_dim rounded up, and the first two
    dims of the bias."""

    size: Sizes
    options: Options
    q: int
    kv: int
    head_dim: int
    bias: tuple[int, int] | None


@dataclass(frozen=True)
class Bounds:
    """Tiles [first, last) hold something visible; of those, [inner_first, inner_last) need no mask."""

    first: Array | int
    inner_first: Array | int
    inner_last: Array | int
    last: Array | int

    def loop(self, body: Callable, carry):
        """body(masked, tile, carry) over all tiles that hold something visible."""
        spans = (
            (True, self.first, self.inner_first),
            (False, self.inner_first, self.inner_last),
            (True, self.inner_last, self.last),
        )
        for masked, first, last in spans:
            if isinstance(first, int) and isinstance(last, int) and first >= last:
                continue
            carry = lax.fori_loop(first, last, lambda tile, carry, masked=masked: body(masked, tile, carry), carry)
        return carry


def _least(*values: Array | int) -> Array | int:
    """The minimum, a number if all are numbers."""
    return min(values) if all(isinstance(v, int) for v in values) else _fold(jnp.minimum, values)


def _most(*values: Array | int) -> Array | int:
    """The maximum, a number if all are numbers."""
    return max(values) if all(isinstance(v, int) for v in values) else _fold(jnp.maximum, values)


def _fold(f: Callable, values: tuple[Array | int, ...]) -> Array:
    total = jnp.int32(values[0])
    for v in values[1:]:
        total = f(total, jnp.int32(v))
    return total


def _tiles_up(n: Array | int, tile: int) -> Array | int:
    """n / tile rounded up, for n >= 0."""
    return -(-n // tile) if isinstance(n, int) else lax.div(n + (tile - 1), jnp.int32(tile))


def _tiles_down(n: Array | int, tile: int) -> Array | int:
    """n / tile rounded down, for n >= 0."""
    return n // tile if isinstance(n, int) else lax.div(n, jnp.int32(tile))


def _only_if(condition: Array, n: Array | int) -> Array:
    """n where the condition holds, else 0; a select between two numbers does not lower to Triton's IR."""
    return condition.astype(jnp.int32) * n


@dataclass(frozen=True)
class Row:
    """The scalars of one row of the batch, None where there is no such option."""

    offset: Array | int
    q_length: Array | None
    kv_length: Array | None

    @staticmethod
    def read(spec: Spec, x: dict, at: Array | int = 0) -> "Row":
        """From the references; lengths at index `at` of their blocks."""
        options = spec.options
        offset = x["q_offset"][0] if options.q_offset is None else options.q_offset
        lengths = (x[n][at] if n in x else None for n in ("q_lengths", "kv_lengths"))
        return Row(offset, *lengths)


def _valid(length: int, given: Array | None) -> Array | int:
    """How many entries count: all, or the row's own number of them."""
    return length if given is None else _most(0, _least(length, given))


def key_bounds(spec: Spec, row: Row, tile: Array, segments: bool) -> Bounds:
    """The key tiles that query tile `tile` sees."""
    options, size = spec.options, spec.size
    first_query = tile * spec.q
    last_query = _least(first_query + (spec.q - 1), size.q_len - 1)
    queries, keys = _valid(size.q_len, row.q_length), _valid(size.kv_len, row.kv_length)
    low, high, inner_low, inner_high = 0, keys, 0, keys
    if options.after is not None:
        high = _least(high, last_query + row.offset + options.after + 1)
        inner_high = _least(inner_high, first_query + row.offset + options.after + 1)
    if options.before is not None:
        low = _most(low, first_query + row.offset - options.before)
        inner_low = _most(inner_low, last_query + row.offset - options.before)
    if row.q_length is not None:
        high = _only_if(first_query < queries, high)
        inner_high = _only_if(last_query < queries, inner_high)
    return _bounds(low, high, inner_low, 0 if segments else inner_high, spec.kv)


def query_bounds(spec: Spec, row: Row, tile: Array, segments: bool) -> Bounds:
    """The query tiles that see anything of key tile `tile`."""
    options, size = spec.options, spec.size
    first_key = tile * spec.kv
    last_key = _least(first_key + (spec.kv - 1), size.kv_len - 1)
    queries, keys = _valid(size.q_len, row.q_length), _valid(size.kv_len, row.kv_length)
    # The last tile of queries may reach beyond the end: what it reads there is 0 and adds nothing.
    inner_end = -(-size.q_len // spec.q) * spec.q if row.q_length is None else queries
    low, high, inner_low, inner_high = 0, queries, 0, inner_end
    if options.after is not None:
        low = _most(low, first_key - row.offset - options.after)
        inner_low = _most(inner_low, last_key - row.offset - options.after)
    if options.before is not None:
        high = _least(high, last_key - row.offset + options.before + 1)
        inner_high = _least(inner_high, first_key - row.offset + options.before + 1)
    if row.kv_length is not None or size.kv_len % spec.kv:
        high = _only_if(first_key < keys, high)
        inner_high = _only_if(first_key + spec.kv <= keys, inner_high)
    return _bounds(low, high, inner_low, 0 if segments else inner_high, spec.q)


def _bounds(low: Array | int, high: Array | int, inner_low: Array | int, inner_high: Array | int, tile: int) -> Bounds:
    """Positions to tiles: all that are touched, and of those the ones that lie within the inner positions."""
    first, last = _tiles_down(_most(low, 0), tile), _tiles_up(_most(high, 0), tile)
    last = _most(first, last)
    inner_first = _least(_most(first, _tiles_up(_most(inner_low, 0), tile)), last)
    inner_last = _least(_most(inner_first, _tiles_down(_most(inner_high, 0), tile)), last)
    return Bounds(first, inner_first, inner_last, last)


def read_tile(
    spec: Spec,
    ref,
    start: Array | int,
    rows: int,
    length: Array | int | None,
    *,
    row: tuple[Array, ...] = (),
    head: tuple[Array, ...] = (),
) -> Array:
    """Entries [start, start + rows) of ref (*row, length, *head, head_dim), with 0 from `length` on.

    length None: all of them exist.
    """
    whole = spec.size.head_dim == spec.head_dim
    mask = None if whole else (jnp.arange(spec.head_dim) < spec.size.head_dim)[None, :]
    if length is not None:
        inside = (start + jnp.arange(rows) < length)[:, None]
        mask = inside if mask is None else inside & mask
    if mask is not None:
        mask = jnp.broadcast_to(mask, (rows, spec.head_dim))
    at = ref.at[(*row, pl.ds(start, rows), *head, pl.ds(0, spec.head_dim))]
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0.0)


def write_tile(spec: Spec, ref, start: Array, rows: int, length: int, x: Array) -> None:
    """Writes a tile of which row 0 is row `start` of an array `length` long to the tile's own block."""
    mask = (start + jnp.arange(rows) < length)[:, None] & (jnp.arange(spec.head_dim) < spec.size.head_dim)[None, :]
    plgpu.store(ref.at[pl.ds(0, rows), pl.ds(0, spec.head_dim)], x.astype(ref.dtype), mask=mask)


def read_vector(ref, start: Array | int, n: int, length: Array | int, *where: Array | int) -> Array:
    """Entries [start, start + n) of ref (*where, length), with 0 from `length` on."""
    return plgpu.load(ref.at[(*where, pl.ds(start, n))], mask=start + jnp.arange(n) < length, other=0)


@dataclass(frozen=True)
class Tile:
    """Where a tile of logits is. queries and keys are the positions, (n, 1) and (1, m) or the reverse, so that all
    that is made of them has the orientation of the logits; so have q_ids and kv_ids, and the bias (None if none)."""

    queries: Array
    keys: Array
    q_ids: Array | None = None
    kv_ids: Array | None = None
    bias: Array | None = None


def logits(spec: Spec, row: Row, tile: Tile, product: Array, masked: bool) -> tuple[Array, Array | None]:
    """Logits in base 2 from q . k, -inf where a key is hidden, and the tanh of the soft cap."""
    options, bent = spec.options, None
    if options.soft_cap is None:
        x = product * (options.scale * LOG2E)
    else:
        bent = jnp.tanh(product * (options.scale / options.soft_cap))
        x = bent * (options.soft_cap * LOG2E)
    if tile.bias is not None:
        x += tile.bias * LOG2E
    if masked:
        x = jnp.where(seen(spec, row, tile), x, -jnp.inf)
    return x, bent


def seen(spec: Spec, row: Row, tile: Tile) -> Array:
    """Which keys of a tile each query sees."""
    options = spec.options
    mask = tile.keys < _valid(spec.size.kv_len, row.kv_length)
    if row.q_length is not None:
        mask &= tile.queries < row.q_length
    if options.banded:
        distance = tile.keys - tile.queries - row.offset
    if options.after is not None:
        mask &= distance <= options.after
    if options.before is not None:
        mask &= distance >= -options.before
    if tile.q_ids is not None:
        mask &= tile.q_ids == tile.kv_ids
    return mask


def dot(x: Array, y: Array, trans_b: bool = False) -> Array:
    """A product summed in float32; float32 operands are multiplied as such, not rounded to TF32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return plgpu.dot(x, y, trans_b=trans_b, precision=precision)


def read_bias(spec: Spec, ref, q_start: Array | int, kv_start: Array | int, inside: Array, *where) -> Array:
    """The bias of a tile in float32, (q, kv); 0 outside of the array."""
    at = ref.at[(*where, pl.ds(q_start, spec.q), pl.ds(kv_start, spec.kv))]
    return plgpu.load(at, mask=inside, other=0.0).astype(jnp.float32)


def _inside(spec: Spec, q_first: Array, kv_first: Array) -> Array:
    """Which entries of a tile at these positions exist."""
    queries = q_first + jnp.arange(spec.q)
    keys = kv_first + jnp.arange(spec.kv)
    return (queries < spec.size.q_len)[:, None] & (keys < spec.size.kv_len)[None, :]


def _row_tile(spec: Spec, x: dict, tile: Array, j: Array, q_ids: Array | None) -> tuple[Tile, Array]:
    """Tile j of the keys for a kernel that owns query tile `tile`, queries down; and where its keys start."""
    kv_first, q_first = j * spec.kv, tile * spec.q
    kv_ids = bias = None
    if q_ids is not None:
        kv_ids = read_vector(x["kv_segment_ids"], kv_first, spec.kv, spec.size.kv_len)[None, :]
    if "bias" in x:
        bias = read_bias(spec, x["bias"], 0, kv_first, _inside(spec, q_first, kv_first))
    queries, keys = (q_first + jnp.arange(spec.q))[:, None], (kv_first + jnp.arange(spec.kv))[None, :]
    return Tile(queries, keys, None if q_ids is None else q_ids[:, None], kv_ids, bias), kv_first


def _own_q_ids(spec: Spec, x: dict, tile: Array) -> Array | None:
    if "q_segment_ids" not in x:
        return None
    return read_vector(x["q_segment_ids"], 0, spec.q, spec.size.q_len - tile * spec.q)


def forward_kernel(spec: Spec, x: dict, out_ref, lse_ref) -> None:
    """Output and lse of one query tile of one head."""
    tile = pl.program_id(0)
    row = Row.read(spec, x)
    left = spec.size.q_len - tile * spec.q
    q = read_tile(spec, x["q"], 0, spec.q, left)
    q_ids = _own_q_ids(spec, x, tile)

    def keys(masked: bool, j: Array, carry: tuple) -> tuple:
        top, total, out = carry
        at, start = _row_tile(spec, x, tile, j, q_ids)
        length = spec.size.kv_len if masked else None
        k = read_tile(spec, x["k"], start, spec.kv, length)
        s, _ = logits(spec, row, at, dot(q, k, trans_b=True), masked)
        new_top = jnp.maximum(top, s.max(-1))
        # Until a query has seen a key its maximum is -inf; it is measured from 0, since -inf - -inf is NaN.
        level = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp2(s - level[:, None])
        kept = jnp.exp2(top - level)
        v = read_tile(spec, x["v"], start, spec.kv, length)
        out = out * kept[:, None] + dot(weights.astype(v.dtype), v)
        return new_top, total * kept + weights.sum(-1), out

    zeros = jnp.zeros((spec.q,), jnp.float32)
    carry = zeros - jnp.inf, zeros, jnp.zeros((spec.q, spec.head_dim), jnp.float32)
    top, total, out = key_bounds(spec, row, tile, q_ids is not None).loop(keys, carry)
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, (top + jnp.log2(safe)) * LN2)
    write_tile(spec, out_ref, tile * spec.q, spec.q, spec.size.q_len, out / safe[:, None])
    plgpu.store(lse_ref.at[pl.ds(0, spec.q)], lse, mask=jnp.arange(spec.q) < left)


def dq_kernel(spec: Spec, x: dict, dq_ref) -> None:
    """dq of one query tile of one head."""
    tile = pl.program_id(0)
    row = Row.read(spec, x)
    left = spec.size.q_len - tile * spec.q
    q, d_out = (read_tile(spec, x[n], 0, spec.q, left) for n in ("q", "d_out"))
    lse, delta = (read_vector(x[n], 0, spec.q, left)[:, None] for n in ("lse", "delta"))
    q_ids = _own_q_ids(spec, x, tile)

    def keys(masked: bool, j: Array, dq: Array) -> Array:
        at, start = _row_tile(spec, x, tile, j, q_ids)
        length = spec.size.kv_len if masked else None
        k, v = (read_tile(spec, x[n], start, spec.kv, length) for n in ("k", "v"))
        s, bent = logits(spec, row, at, dot(q, k, trans_b=True), masked)
        ds = jnp.exp2(s - lse * LOG2E) * (dot(d_out, v, trans_b=True) - delta)
        if bent is not None:
            ds *= 1 - bent * bent
        return dq + dot(ds.astype(k.dtype), k)

    dq = jnp.zeros((spec.q, spec.head_dim), jnp.float32)
    dq = key_bounds(spec, row, tile, q_ids is not None).loop(keys, dq)
    write_tile(spec, dq_ref, tile * spec.q, spec.q, spec.size.q_len, dq * spec.options.scale)


def dkv_kernel(spec: Spec, x: dict, dk_ref, dv_ref) -> None:
    """dk and dv of one key tile of one KV head, over all query heads that read it; keys down, queries across."""
    tile = pl.program_id(0)
    row = Row.read(spec, x)
    size, first = spec.size, tile * spec.kv
    left = size.kv_len - first
    k, v = (read_tile(spec, x[n], 0, spec.kv, left) for n in ("k", "v"))
    kv_ids = read_vector(x["kv_segment_ids"], 0, spec.kv, left)[:, None] if "kv_segment_ids" in x else None
    keys = (first + jnp.arange(spec.kv))[:, None]

    def queries(g: Array, masked: bool, i: Array, carry: tuple) -> tuple:
        dk, dv = carry
        start = i * spec.q
        q, d_out = (read_tile(spec, x[n], start, spec.q, size.q_len, head=(g,)) for n in ("q", "d_out"))
        lse, delta = (read_vector(x[n], start, spec.q, size.q_len, g)[None, :] for n in ("lse", "delta"))
        q_ids = bias = None
        if kv_ids is not None:
            q_ids = read_vector(x["q_segment_ids"], start, spec.q, size.q_len)[None, :]
        if "bias" in x:
            of_head = lax.rem(g, jnp.int32(size.group if spec.bias[1] > 1 else 1))
            bias = read_bias(spec, x["bias"], start, 0, _inside(spec, start, first), of_head).T
        at = Tile((start + jnp.arange(spec.q))[None, :], keys, q_ids, kv_ids, bias)
        s, bent = logits(spec, row, at, dot(k, q, trans_b=True), masked)
        weights = jnp.exp2(s - lse * LOG2E)
        dv += dot(weights.astype(d_out.dtype), d_out)
        ds = weights * (dot(v, d_out, trans_b=True) - delta)
        if bent is not None:
            ds *= 1 - bent * bent
        return dk + dot(ds.astype(q.dtype), q), dv

    bounds = query_bounds(spec, row, tile, kv_ids is not None)
    zeros = jnp.zeros((spec.kv, spec.head_dim), jnp.float32)

    def head(g: Array, carry: tuple) -> tuple:
        return bounds.loop(lambda masked, i, carry: queries(g, masked, i, carry), carry)

    dk, dv = lax.fori_loop(0, size.group, head, (zeros, zeros))
    write_tile(spec, dk_ref, first, spec.kv, size.kv_len, dk * spec.options.scale)
    write_tile(spec, dv_ref, first, spec.kv, size.kv_len, dv)


def dbias_kernel(spec: Spec, x: dict, dbias_ref) -> None:
    """The gradient of one tile of the bias, over all rows of the batch and heads that share it, one after another."""
    size, (bias_batch, bias_heads) = spec.size, spec.bias
    i, j, which = (pl.program_id(n) for n in range(3))
    q_first, kv_first = i * spec.q, j * spec.kv
    q_left, kv_left = size.q_len - q_first, size.kv_len - kv_first
    inside = _inside(spec, q_first, kv_first)
    positions = (q_first + jnp.arange(spec.q))[:, None], (kv_first + jnp.arange(spec.kv))[None, :]
    bias = read_bias(spec, x["bias"], 0, 0, inside)
    heads = size.heads if bias_heads == 1 else 1
    rows = size.batch if bias_batch == 1 else 1

    def add(n: Array, total: Array) -> Array:
        b = _tiles_down(n, heads) if bias_batch == 1 else _tiles_down(which, bias_heads)
        h = lax.rem(n, jnp.int32(heads)) if bias_heads == 1 else lax.rem(which, jnp.int32(bias_heads))
        g = _tiles_down(h, size.group)
        ids = None, None
        if "q_segment_ids" in x:
            q_ids = read_vector(x["q_segment_ids"], 0, spec.q, q_left, b)[:, None]
            ids = q_ids, read_vector(x["kv_segment_ids"], 0, spec.kv, kv_left, b)[None, :]
        q, d_out = (read_tile(spec, x[n], 0, spec.q, q_left, row=(b,), head=(h,)) for n in ("q", "d_out"))
        k, v = (read_tile(spec, x[n], 0, spec.kv, kv_left, row=(b,), head=(g,)) for n in ("k", "v"))
        lse, delta = (read_vector(x[n], 0, spec.q, q_left, b, h)[:, None] for n in ("lse", "delta"))
        tile = Tile(*positions, *ids, bias)
        s, _ = logits(spec, Row.read(spec, x, b), tile, dot(q, k, trans_b=True), masked=True)
        return total + jnp.exp2(s - lse * LOG2E) * (dot(d_out, v, trans_b=True) - delta)

    total = lax.fori_loop(0, rows * heads, add, jnp.zeros((spec.q, spec.kv), jnp.float32))
    plgpu.store(dbias_ref.at[pl.ds(0, spec.q), pl.ds(0, spec.kv)], total.astype(dbias_ref.dtype), mask=inside)
