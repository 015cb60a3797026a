"""Attention over a mesh: heads over the tensor axes, the sequence over `context`.

Everything here runs inside a `shard_map`. Self-attention enters and leaves with the sequence split over `context`; the
head counts decide how the keys meet the queries (`exchange`). The degree falls apart into heads x rows:

* **heads**: the largest part that divides this device's query heads, over groups of neighbours (Ulysses). One
  all-to-all turns (part of the sequence, all heads) into (the group's sequence, part of the heads) for q, one does so
  for k and v together, one brings the output back. KV heads that this part does not divide are first repeated, as often
  as is needed for each device to get the ones its query heads read.
* **rows**: the rest, over the groups. k and v, of the heads that a device then has, are all-gathered along the
  sequence; q stays where it is and knows its position.

Lengths are global valid lengths; positions beyond them are padding that never reaches a result.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from shardzoo.kernels.flash_attention import flash_attention, merge
from shardzoo.zoo.layers import unpacked
from shardzoo.zoo.mesh import CONTEXT

SEQ, HEADS = 1, 2


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How keys meet queries over `context` for given head counts of one device.

    `heads` x `rows` is the degree. `kv_index` lists the KV heads to send, in order of their destination, where they
    must be repeated to be split over `heads`; None sends them as they are.
    """

    heads: int
    rows: int
    kv_index: tuple[int, ...] | None = None

    @property
    def neighbours(self) -> list[list[int]] | None:
        """The groups of devices along `context` that split heads; None is all of them."""
        return None if self.rows == 1 else [[g * self.heads + i for i in range(self.heads)] for g in range(self.rows)]

    @property
    def peers(self) -> list[list[int]] | None:
        """The groups of devices that have the same heads of other parts of the sequence; None is all of them."""
        return None if self.heads == 1 else [[g * self.heads + i for g in range(self.rows)] for i in range(self.heads)]

    def swap(self, parts: Float[Array, "batch ways seq *pair width"]) -> Float[Array, "batch ways seq *pair width"]:
        """All-to-all among neighbours: part i goes to neighbour i, and what that one sends here takes its place.

        Parts are on a dim of their own outside of those of a TPU's tiles: sent as they lie.
        """
        if self.heads == 1:
            return parts
        return lax.all_to_all(parts, CONTEXT, 1, 1, tiled=True, axis_index_groups=self.neighbours)

    def split_heads(
        self, x: Float[Array, "batch seq *pair heads head_dim"]
    ) -> Float[Array, "batch more_seq *pair fewer_heads head_dim"]:
        """All-to-all among neighbours: their sequence of this device's share of the heads.

        Here and on the way back a device's heads are one dim, as a TPU pads a few heads to whole tiles.
        """
        if self.heads == 1:
            return x
        batch, seq, *pair, heads, head_dim = x.shape
        share = heads // self.heads
        parts = x.reshape(batch, seq, *pair, self.heads, share * head_dim)
        parts = self.swap(jnp.moveaxis(parts, -2, 1))
        return parts.reshape(batch, self.heads * seq, *pair, share, head_dim)

    def split_seq(
        self, x: Float[Array, "batch more_seq heads head_dim"]
    ) -> Float[Array, "batch seq more_heads head_dim"]:
        """All-to-all among neighbours, back: all heads of this device's share of the sequence."""
        if self.heads == 1:
            return x
        batch, seq, heads, head_dim = x.shape
        parts = self.swap(x.reshape(batch, self.heads, seq // self.heads, heads * head_dim))
        return jnp.moveaxis(parts, 1, 2).reshape(batch, seq // self.heads, self.heads * heads, head_dim)

    def gather_seq(self, x: Float[Array, "batch more_seq ..."]) -> Float[Array, "batch all_seq ..."]:
        """All-gather among peers: the whole sequence."""
        if self.rows == 1:
            return x
        return lax.all_gather(x, CONTEXT, axis=SEQ, tiled=True, axis_index_groups=self.peers)


def exchange(heads: int, kv_heads: int, degree: int) -> Exchange:
    """The exchange for `heads` query and `kv_heads` KV heads on a device and `degree` devices along `context`."""
    ways = math.gcd(heads, degree)
    if kv_heads % ways == 0:
        return Exchange(ways, degree // ways)
    reads = np.arange(heads).reshape(ways, -1) // (heads // kv_heads)  # the KV head that each query head reads
    distinct = [np.unique(row) for row in reads]
    share = len(distinct[0])
    even = all(len(d) == share for d in distinct) and reads.shape[1] % share == 0
    paired = even and all(
        np.array_equal(np.repeat(d, reads.shape[1] // share), row) for d, row in zip(distinct, reads, strict=True)
    )
    index = np.concatenate(distinct) if paired else reads.reshape(-1)
    return Exchange(ways, degree // ways, tuple(int(i) for i in index))


def attention(
    q: Float[Array, "batch seq heads head_dim"],
    kv: Float[Array, "batch seq two kv_heads head_dim"],
    *,
    causal: bool = False,
    window: int | None = None,
    windowed: Bool[Array, ""] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    lengths: Int[Array, " batch"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    key_mask: Bool[Array, "batch seq"] | None = None,
    bias: Float[Array, "one heads all_q all_kv"] | None = None,
    distance_bias: Float[Array, "heads distances"] | None = None,
    exchanged: Exchange | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Self-attention of a sequence that is split over `context`.

    `lengths` are valid lengths of the whole sequence; `segment_ids` are split like it, and so is `key_mask`, which
    hides keys from all queries but no query, and stands in place of `segment_ids`; `bias` is whole in both lengths and
    holds this device's heads. `distance_bias` is a bias that depends on the distance from query to key alone, in place
    of `bias`: entry d + all_seq - 1 is that of keys d places after the query. It is spread over queries and keys here,
    for the heads or the queries that this device works on. Rows beyond `lengths` come out as zeros. float32 inside.
    `windowed` says of a layer in a loop whether it has the window (None: it has): a branch that holds no collective.
    `exchanged` is the exchange whose `swap` has brought q, k and v here, piece by piece; the caller sends the result
    back by it.

    Collectives: where heads are split three all-to-all (q; k and v; output), where rows are one all-gather (k and v);
    one more all-gather for `segment_ids` or `key_mask`.
    """
    plan = exchanged or exchange(q.shape[HEADS], kv.shape[3], lax.axis_size(CONTEXT))
    kv_ids = segment_ids if key_mask is None else jnp.where(key_mask, 0, -1)
    if kv_ids is not None and plan.heads * plan.rows > 1:
        kv_ids = lax.all_gather(kv_ids, CONTEXT, axis=SEQ, tiled=True)
    if exchanged is None:
        kv = kv if plan.kv_index is None else kv[:, :, :, np.asarray(plan.kv_index)]
        q, kv = plan.split_heads(q), plan.split_heads(kv)
    kv = plan.gather_seq(kv)
    here = _Here(plan, heads=q.shape[HEADS], rows=q.shape[SEQ])
    if distance_bias is not None:
        bias = here.by_distance(distance_bias)
    elif bias is not None:
        bias = here.of_rows(here.of_heads(bias, axis=1), axis=2)
    attend = functools.partial(
        flash_attention, q, *unpacked(kv), q_offset=here.first, bias=bias,
        q_lengths=here.lengths(lengths), kv_lengths=lengths,
        q_segment_ids=here.query_ids(kv_ids, hidden=key_mask is not None), kv_segment_ids=kv_ids,
        causal=causal, scale=scale, soft_cap=soft_cap,
    )  # fmt: skip
    if windowed is None:
        out = attend(window=window)
    else:
        out = lax.cond(windowed, lambda: attend(window=window), lambda: attend(window=None))
    return plan.split_seq(out) if exchanged is None else out


@dataclasses.dataclass(frozen=True)
class _Here:
    """What this device works on after an exchange: so many heads, so many rows of queries."""

    plan: Exchange
    heads: int
    rows: int

    @property
    def first(self) -> Int[Array, ""] | int:
        """Position of the first query."""
        return 0 if self.plan.rows == 1 else lax.axis_index(CONTEXT) // self.plan.heads * self.rows

    def of_heads(self, x: Array, axis: int) -> Array:
        """The part of x, which has all heads of the tensor axes' share."""
        if self.plan.heads == 1:
            return x
        first = lax.axis_index(CONTEXT) % self.plan.heads * self.heads
        return lax.dynamic_slice_in_dim(x, first, self.heads, axis)

    def of_rows(self, x: Array, axis: int) -> Array:
        """The part of x, which has all positions."""
        return x if self.plan.rows == 1 else lax.dynamic_slice_in_dim(x, self.first, self.rows, axis)

    def lengths(self, lengths: Int[Array, " batch"] | None) -> Int[Array, " batch"] | None:
        """How many of the queries are valid."""
        if lengths is None or self.plan.rows == 1:
            return lengths
        return jnp.clip(lengths - self.first, 0, self.rows)

    def query_ids(self, ids: Int[Array, "batch all_seq"] | None, *, hidden: bool) -> Int[Array, "batch rows"] | None:
        """Segments of the queries, from those of all keys; with `hidden` keys, no query is hidden."""
        if ids is None:
            return None
        return self.of_rows(jnp.zeros_like(ids) if hidden else ids, axis=SEQ)

    def by_distance(self, values: Float[Array, "all_heads distances"]) -> Float[Array, "one heads rows keys"]:
        """The bias of the queries to all keys."""
        values = self.of_heads(values, axis=0)
        if self.plan.rows > 1:
            keys = (values.shape[1] + 1) // 2
            first = keys - self.rows - self.first
            values = lax.dynamic_slice_in_dim(values, first, self.rows + keys - 1, axis=1)
        return by_distance(values, self.rows)


def by_distance(values: Float[Array, "heads distances"], queries: int) -> Float[Array, "one heads queries keys"]:
    """The bias of this many queries and as many keys as the distances reach.

    Entry (i, j) is values[queries - 1 - i + j]. The rows of such a matrix are one sequence, shifted by one from row to
    row: copies of it with one entry more, read with rows of the old length. No gather, and no scatter in the backward
    pass; twice the result in memory.
    """
    heads, distances = values.shape
    copies = jnp.broadcast_to(jnp.pad(values, ((0, 0), (0, 1)))[:, None], (heads, queries, distances + 1))
    shifted = copies.reshape(heads, -1)[:, : queries * distances].reshape(heads, queries, distances)
    return shifted[None, :, :, queries - 1 :]


def cross_attention(
    q: Float[Array, "batch seq heads head_dim"],
    kv: Float[Array, "batch kv_seq two kv_heads head_dim"],
    *,
    scale: float | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention to keys that are whole on every device of `context` (a prompt): no collective."""
    return flash_attention(q, *unpacked(kv), scale=scale, kv_lengths=kv_lengths)


def cached_attention(
    q: Float[Array, "batch one heads head_dim"],
    k: Float[Array, "batch slots kv_heads head_dim"],
    v: Float[Array, "batch slots kv_heads head_dim"],
    visible: Int[Array, "batch slots"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "batch one heads head_dim"]:
    """One new query per row, the same on every device of `context`, against cache slots that are split over it.

    `visible` is 0 for slots that the row may read and -1 elsewhere. Each device attends to its own slots; the partial
    results are merged by their log-sum-exps: one all-gather over `context` of heads x (head_dim + 1) numbers per row.
    """
    own = jnp.zeros(q.shape[:2], jnp.int32)
    args = dict(q_segment_ids=own, kv_segment_ids=visible, scale=scale, soft_cap=soft_cap)
    if lax.axis_size(CONTEXT) == 1:
        return lax.psum(flash_attention(q, k, v, **args), CONTEXT)  # of one device: tells the type, moves nothing
    out, lse = flash_attention(q, k, v, return_lse=True, **args)
    packed = jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1)
    parts = lax.all_gather(packed, CONTEXT, axis=0, to="invarying")
    merged, _ = merge(list(parts[..., :-1]), list(parts[..., -1]))
    return merged.astype(q.dtype)
