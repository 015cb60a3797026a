"""How the blockwise version cuts a call into tiles, and which of its tiles hold a visible key."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from shardzoo.kernels.flash_attention.options import Extras, Options, Sizes, offset_of

# A number where a loop has one turn only or has been unrolled, else a traced scalar.
Index = int | Int[Array, ""]

# A tile's logits of one KV head are 1 MiB in float32, which one core's cache holds.
ROWS = 512
TILE_LOGITS = ROWS * ROWS
# Forwards on a CPU, where no smaller tile could be skipped: XLA shares each product and each pass over the logits out
# among the cores by itself, which pays for more than 1 MiB, and all of up to 2,048 keys need no running maximum.
UNSKIPPED_LOGITS = 4 * TILE_LOGITS
# Tiles of several heads and rows of the batch make one step where more units work on it than two cores.
CORES_PER_TILE = 2
ACCELERATOR_LOGITS = 2**25


@dataclass(frozen=True)
class Tiles:
    """Sizes of one step: rows of the batch, KV heads, queries of each head, keys. They divide batch and kv_heads.

    Lengths need not divide: the last tile then ends at the length and overlaps the one before it, and whoever
    adds up over tiles masks the part that has been seen.
    """

    batch: int
    kv_heads: int
    q: int
    kv: int


def tile_sizes(size: Sizes, step_logits: int, tile_logits: int = TILE_LOGITS) -> Tiles:
    """Tiles of this many logits of one KV head, near to square in rows (queries of a group) and keys.

    Longer in one where the other is short, and in the keys where square ones hold less.

    A step takes as many KV heads, and then rows of the batch, as `step_logits` has room for: results do not
    depend on that number.
    """
    q = even_tile(size.q_len, max(1, ROWS // size.group))
    kv = even_tile(size.kv_len, max(ROWS, tile_logits // (size.group * q)))
    q = even_tile(size.q_len, max(q, min(tile_logits // (size.group * kv), 2 * ROWS // size.group)))
    left = max(1, step_logits // (size.group * q * kv))
    kv_heads = largest_divisor(size.kv_heads, left)
    batch = largest_divisor(size.batch, left // kv_heads) if kv_heads == size.kv_heads else 1
    return Tiles(batch, kv_heads, q, kv)


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit`."""
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= limit)


def even_tile(length: int, target: int) -> int:
    """A tile of about `target` that divides the length if one is near, else one whose last tile overlaps least."""
    if length <= target:
        return length
    near = [n for n in range(target, target * 5 // 8, -1) if length % n == 0]
    near += [n for n in range(target + 1, target * 5 // 4) if length % n == 0]
    tiles = -(-length // target)
    return near[0] if near else -(-length // tiles)


def count(length: int, tile: int) -> int:
    """The number of tiles that cover the length."""
    return -(-length // tile)


def start(index: int | Int[Array, "..."], length: int, tile: int) -> int | Int[Array, "..."]:
    """Where tile `index` starts: the last one ends at the length."""
    if length % tile == 0:
        return index * tile
    return jnp.minimum(index * tile, length - tile)


def segment_ranges(ids: Int[Array, "batch length"], tile: int) -> tuple[Int[Array, "batch tiles"], ...]:
    """The least and the greatest id in each tile."""
    length = ids.shape[1]
    starts = start(jnp.arange(count(length, tile)), length, tile)
    tiled = ids[:, starts[:, None] + jnp.arange(tile)[None]]
    return tiled.min(-1), tiled.max(-1)


def live_range(
    size: Sizes, tiles: Tiles, extras: Extras, options: Options, row: Index, q_index: Index
) -> tuple[Index, Index]:
    """The first and one past the last key tile that a query tile may see anything of.

    `row` is the first row of the batch in the step, `q_index` the query tile. Tiles in between may be hidden
    as well (the masks see to those); for a band, for lengths and for packed sequences there are none.
    """
    tests = list(_live_tests(size, tiles, extras, options, row, q_index))
    total = count(size.kv_len, tiles.kv)
    if not tests or total == 1:
        return 0, total
    live = jnp.ones((total,), bool)
    for test in tests:
        live &= test
    first, last = jnp.argmax(live), total - jnp.argmax(live[::-1])
    return jnp.where(live.any(), first, 0), jnp.where(live.any(), last, 0)


def _live_tests(
    size: Sizes, tiles: Tiles, extras: Extras, options: Options, row: Index, q_index: Index
) -> Iterator[Bool[Array, "..."]]:
    """Conditions on each key tile (or on all of them) for the query tile to see anything of it."""

    def rows(x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, row, tiles.batch, 0)

    first_query = start(q_index, size.q_len, tiles.q)
    first_key = start(jnp.arange(count(size.kv_len, tiles.kv)), size.kv_len, tiles.kv)
    position = first_query + offset_of(extras, options)
    if options.after is not None:
        yield first_key <= position + tiles.q - 1 + options.after
    if options.before is not None:
        yield first_key + tiles.kv - 1 >= position - options.before
    if extras.kv_lengths is not None:
        yield first_key < rows(extras.kv_lengths).max()
    if extras.q_lengths is not None:
        yield first_query < rows(extras.q_lengths).max()
    if extras.q_segment_ids is not None:
        q_least, q_most = (rows(x)[:, q_index, None] for x in segment_ranges(extras.q_segment_ids, tiles.q))
        kv_least, kv_most = (rows(x) for x in segment_ranges(extras.kv_segment_ids, tiles.kv))
        yield ((kv_least <= q_most) & (kv_most >= q_least)).any(0)


def tile_mask(
    size: Sizes,
    tiles: Tiles,
    extras: Extras,
    options: Options,
    row: Index,
    q_index: Index,
    kv_index: Index,
    *,
    each_query_once: bool,
) -> Bool[Array, "#rows #q #kv"] | None:
    """Which keys of the tile each query sees; None when no option and no overlap can hide any.

    `each_query_once` also hides everything from queries that the tile before has held: for sums over queries.
    """
    terms = list(_mask_terms(size, tiles, extras, options, row, q_index, kv_index))
    if each_query_once and size.q_len % tiles.q:
        queries = start(q_index, size.q_len, tiles.q) + jnp.arange(tiles.q)
        terms.append((queries >= q_index * tiles.q)[None, :, None])
    if not terms:
        return None
    mask = terms[0]
    for term in terms[1:]:
        mask &= term
    return mask


def _mask_terms(
    size: Sizes,
    tiles: Tiles,
    extras: Extras,
    options: Options,
    row: Index,
    q_index: Index,
    kv_index: Index,
) -> Iterator[Bool[Array, "#rows #q #kv"]]:
    def rows(x: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, row, tiles.batch, 0)

    first_query = start(q_index, size.q_len, tiles.q)
    first_key = start(kv_index, size.kv_len, tiles.kv)
    queries = (first_query + jnp.arange(tiles.q))[None, :, None]
    keys = (first_key + jnp.arange(tiles.kv))[None, None, :]
    distance = keys - queries - offset_of(extras, options)
    if size.kv_len % tiles.kv:
        yield keys >= kv_index * tiles.kv
    if options.after is not None:
        yield distance <= options.after
    if options.before is not None:
        yield distance >= -options.before
    if extras.q_lengths is not None:
        yield queries < rows(extras.q_lengths)[:, None, None]
    if extras.kv_lengths is not None:
        yield keys < rows(extras.kv_lengths)[:, None, None]
    if extras.q_segment_ids is not None:
        q_ids = lax.dynamic_slice_in_dim(rows(extras.q_segment_ids), first_query, tiles.q, 1)
        kv_ids = lax.dynamic_slice_in_dim(rows(extras.kv_segment_ids), first_key, tiles.kv, 1)
        yield q_ids[:, :, None] == kv_ids[:, None, :]


def forward_tiles(size: Sizes, extras: Extras, options: Options) -> Tiles:
    """Those of the forward pass, on the platform that is traced for."""
    skips = options.banded or extras.q_segment_ids is not None
    return tile_sizes(size, _step_logits(), UNSKIPPED_LOGITS if _on_cpu() and not skips else TILE_LOGITS)


def backward_tiles(size: Sizes) -> Tiles:
    """Those of the backward pass, on the platform that is traced for."""
    return tile_sizes(size, _step_logits())


def _on_cpu() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) == "cpu"


def _step_logits() -> int:
    """How many logits one step holds on the platform that is traced for."""
    return TILE_LOGITS * max(1, (os.cpu_count() or 1) // CORES_PER_TILE) if _on_cpu() else ACCELERATOR_LOGITS
