"""Attention over a mesh: heads over the tensor axes, the sequence over `context`.

Everything here runs inside a `shard_map`. Self-attention enters and leaves with the sequence split over `context`; the
head counts decide how the keys meet the queries (`exchange`):

* **ulysses**: the degree divides this device's query heads. One all-to-all turns (seq split, all heads) into (all seq,
  heads split) for q, one does so for k and v together, one brings the output back. KV heads that the degree does not
  divide are first repeated, as often as is needed for each device to get the ones its query heads read.
* **gather**: it does not. k and v are all-gathered along the sequence, q stays where it is and knows its position.

Lengths are global valid lengths; positions beyond them are padding that never reaches a result.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from shardzoo.kernels.flash_attention import flash_attention, merge
from shardzoo.zoo.mesh import CONTEXT

SEQ, HEADS = 1, 2


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How keys meet queries over `context` for given head counts of one device.

    `kv_index` lists the KV heads to send, in order of their destination, where they must be repeated for "ulysses";
    None sends them as they are.
    """

    kind: Literal["local", "ulysses", "gather"]
    kv_index: tuple[int, ...] | None = None


def exchange(heads: int, kv_heads: int, degree: int) -> Exchange:
    """The exchange for `heads` query and `kv_heads` KV heads on a device and `degree` devices along `context`."""
    if degree == 1:
        return Exchange("local")
    if heads % degree:
        return Exchange("gather")
    if kv_heads % degree == 0:
        return Exchange("ulysses")
    reads = np.arange(heads).reshape(degree, -1) // (heads // kv_heads)  # the KV head that each query head reads
    distinct = [np.unique(row) for row in reads]
    share = len(distinct[0])
    even = all(len(d) == share for d in distinct) and reads.shape[1] % share == 0
    paired = even and all(
        np.array_equal(np.repeat(d, reads.shape[1] // share), row) for d, row in zip(distinct, reads, strict=True)
    )
    index = np.concatenate(distinct) if paired else reads.reshape(-1)
    return Exchange("ulysses", tuple(int(i) for i in index))


def split_heads(x: Float[Array, "batch seq ..."], heads_dim: int = HEADS) -> Float[Array, "batch all_seq ..."]:
    """All-to-all over `context`: a whole sequence of this device's share of the heads."""
    return lax.all_to_all(x, CONTEXT, split_axis=heads_dim, concat_axis=SEQ, tiled=True)


def split_seq(
    x: Float[Array, "batch all_seq heads head_dim"],
) -> Float[Array, "batch seq all_heads head_dim"]:
    """All-to-all over `context`: all heads of this device's share of the sequence."""
    return lax.all_to_all(x, CONTEXT, split_axis=SEQ, concat_axis=HEADS, tiled=True)


def attention(
    q: Float[Array, "batch seq heads head_dim"],
    kv: Float[Array, "batch seq two kv_heads head_dim"],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    lengths: Int[Array, " batch"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    key_mask: Bool[Array, "batch seq"] | None = None,
    bias: Float[Array, "one heads all_q all_kv"] | None = None,
    distance_bias: Float[Array, "heads distances"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Self-attention of a sequence that is split over `context`.

    `lengths` are valid lengths of the whole sequence; `segment_ids` are split like it, and so is `key_mask`, which
    hides keys from all queries but no query, and stands in place of `segment_ids`; `bias` is whole in both lengths and
    holds this device's heads. `distance_bias` is a bias that depends on the distance from query to key alone, in place
    of `bias`: entry d + all_seq - 1 is that of keys d places after the query. It is spread over queries and keys here,
    for the heads or the queries that this device works on. Rows beyond `lengths` come out as zeros. float32 inside.

    Collectives: "ulysses" three all-to-all (q; k and v; output); "gather" one all-gather (k and v); each one more
    all-gather for `segment_ids` or `key_mask`.
    """
    degree = lax.axis_size(CONTEXT)
    plan = exchange(q.shape[HEADS], kv.shape[3], degree)
    options = dict(causal=causal, window=window, scale=scale, soft_cap=soft_cap)
    kv_ids = segment_ids if key_mask is None else jnp.where(key_mask, 0, -1)
    if kv_ids is not None and degree > 1:
        kv_ids = lax.all_gather(kv_ids, CONTEXT, axis=SEQ, tiled=True)
    if plan.kind == "gather":
        q_ids = segment_ids if key_mask is None else jnp.zeros_like(key_mask, jnp.int32)
        bias = _distances_here(distance_bias, q.shape[SEQ]) if bias is None else _mine(bias, q.shape[SEQ], axis=2)
        return _gathered(q, kv, lengths, q_ids, kv_ids, bias, options)
    if plan.kind == "ulysses":
        kv = kv if plan.kv_index is None else kv[:, :, :, np.asarray(plan.kv_index)]
        q, kv = split_heads(q), split_heads(kv, heads_dim=3)
        bias = None if bias is None else _mine(bias, q.shape[HEADS], axis=1)
        distance_bias = None if distance_bias is None else _mine(distance_bias, q.shape[HEADS], axis=0)
    bias = bias if distance_bias is None else by_distance(distance_bias, q.shape[SEQ])
    q_ids = kv_ids if key_mask is None or kv_ids is None else jnp.zeros_like(kv_ids)
    out = flash_attention(
        q, kv[:, :, 0], kv[:, :, 1], q_offset=0, q_lengths=lengths, kv_lengths=lengths,
        q_segment_ids=q_ids, kv_segment_ids=kv_ids, bias=bias, **options,
    )  # fmt: skip
    return split_seq(out) if plan.kind == "ulysses" else out


def _mine(x: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, lax.axis_index(CONTEXT) * size, size, axis)


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


def _distances_here(values: Float[Array, "heads distances"] | None, seq: int) -> Array | None:
    """The bias of this device's queries, of which there are `seq`, to all keys."""
    if values is None:
        return None
    keys = (values.shape[1] + 1) // 2
    first = keys - seq * (lax.axis_index(CONTEXT) + 1)
    return by_distance(lax.dynamic_slice_in_dim(values, first, seq + keys - 1, axis=1), seq)


def _gathered(q, kv, lengths, q_ids, kv_ids, bias, options) -> Array:
    """This device's queries against all keys, at their own positions."""
    seq = q.shape[SEQ]
    start = lax.axis_index(CONTEXT) * seq
    kv = lax.all_gather(kv, CONTEXT, axis=SEQ, tiled=True)
    q_lengths = None if lengths is None else jnp.clip(lengths - start, 0, seq)
    return flash_attention(
        q, kv[:, :, 0], kv[:, :, 1], q_offset=start, q_lengths=q_lengths, kv_lengths=lengths,
        q_segment_ids=q_ids, kv_segment_ids=kv_ids, bias=bias, **options,
    )  # fmt: skip


def cross_attention(
    q: Float[Array, "batch seq heads head_dim"],
    kv: Float[Array, "batch kv_seq two kv_heads head_dim"],
    *,
    scale: float | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention to keys that are whole on every device of `context` (a prompt): no collective."""
    return flash_attention(q, kv[:, :, 0], kv[:, :, 1], scale=scale, kv_lengths=kv_lengths)


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
