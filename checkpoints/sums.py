"""A checksum of a leaf that does not depend on how the leaf is split, so it can be taken on the devices that hold it.

Each element's bits are read as 16-bit words (8-bit for one-byte dtypes), widened to uint32, and summed modulo 2**32
with weights `f(row) * g(column, word)`. Rows count the leading dims, columns the trailing ones (`tail`). All weights
are odd, so a change of one bit always changes both sums; they are pseudo-random, so values in the wrong place do too.
Sums of disjoint blocks add up, whoever takes them: numpy while writing, or a device after restoring.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Shaped, UInt, UInt32

from shardzoo.checkpoints import pages
from shardzoo.zoo.layout import HOST

SEEDS = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))  # (row, column) weights of the two sums
TAIL = 128  # columns: at least this many where the leaf has them
PIECE = 1 << 22  # elements that numpy sums at a time
TILE = 1 << 19  # words widened at a time, so that they stay in cache
FEW = 64  # rows: from here on it takes a third less time to sum along them first
SUB_BYTE = {
    np.dtype(ml_dtypes.int2): 2,
    np.dtype(ml_dtypes.int4): 4,
    np.dtype(ml_dtypes.float4_e2m1fn): 4,
}  # bits

Sums = tuple[int, int]


def add(a: Sums, b: Sums) -> Sums:
    """The checksum of two disjoint blocks of one leaf together."""
    return (a[0] + b[0]) & 0xFFFFFFFF, (a[1] + b[1]) & 0xFFFFFFFF


def text(sums: Sums) -> str:
    """The checksum as 16 hexadecimal digits."""
    return f"{sums[0]:08x}{sums[1]:08x}"


def tail(shape: tuple[int, ...]) -> int:
    """How many trailing dims make a column: as few as give `TAIL` columns, at least one."""
    count = min(1, len(shape))
    while count < len(shape) and math.prod(shape[-count:]) < TAIL:
        count += 1
    return count


def _mix(x, seed: int, numbers):
    """Odd pseudo-random uint32 weights of the uint32 indices `x`; `numbers` is numpy or jax.numpy."""
    u32 = numbers.uint32
    x = (x ^ u32(seed)) * u32(0x9E3779B1)
    x = (x ^ (x >> u32(16))) * u32(0x85EBCA6B)
    x = (x ^ (x >> u32(13))) * u32(0xC2B2AE35)
    return (x ^ (x >> u32(16))) | u32(1)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[d + 1 :]) & 0xFFFFFFFF for d in range(len(shape))]


def of_block(
    block: Shaped[np.ndarray, "..."], start: tuple[int, ...], shape: tuple[int, ...], room: pages.Room | None = None
) -> Sums:
    """The checksum of one block of a leaf of global `shape`; `start` is where the block begins in each dim.

    Words are widened in `room`, which callers with many blocks keep from one to the next.
    """
    if block.size == 0:
        return 0, 0
    room = room or pages.Room()
    if block.size > PIECE:
        d = next(d for d, n in enumerate(block.shape) if n > 1)
        rows = max(1, PIECE // (block.size // block.shape[d]))
        total = (0, 0)
        for at in range(0, block.shape[d], rows):
            part = block[(slice(None),) * d + (slice(at, at + rows),)]
            total = add(total, of_block(part, (*start[:d], start[d] + at, *start[d + 1 :]), shape, room))
        return total
    return _of_piece(np.ascontiguousarray(block).reshape(block.shape), start, shape, room)


def _of_piece(
    block: Shaped[np.ndarray, "..."], start: tuple[int, ...], shape: tuple[int, ...], room: pages.Room
) -> Sums:
    if block.dtype in SUB_BYTE:
        block = block.view(np.uint8) & np.uint8((1 << SUB_BYTE[block.dtype]) - 1)
    words = np.dtype("u1") if block.dtype.itemsize == 1 else np.dtype("u2")
    per_item = block.dtype.itemsize // words.itemsize
    k = len(shape) - tail(shape)
    columns = math.prod(block.shape[k:]) * per_item
    flat = block.reshape(-1).view(words).reshape(-1, columns)
    weights = [
        (
            _weights(start[:k], block.shape[:k], shape[:k], row_seed, 0),
            _weights(start[k:], block.shape[k:], shape[k:], column_seed, per_item),
        )
        for row_seed, column_seed in SEEDS
    ]
    sums = [0, 0]
    step = max(1, min(TILE // columns, len(flat)))
    words_of_step = room.of(step * columns * 4).view(np.uint32).reshape(step, columns)
    for at in range(0, len(flat), step):
        wide = words_of_step[: len(flat) - at]
        np.copyto(wide, flat[at : at + step])  # once for both sums
        for which, (f, g) in enumerate(weights):
            f = f[at : at + step]
            if len(f) < FEW:
                sums[which] += int(np.dot(np.einsum("rc,c->r", wide, g), f))
            else:
                sums[which] += int(np.dot(np.einsum("r,rc->c", f, wide), g))
    return sums[0] & 0xFFFFFFFF, sums[1] & 0xFFFFFFFF


def _word_weights(count: int, seed: int) -> UInt32[np.ndarray, " count"]:
    return _mix(np.arange(count, dtype=np.uint32) + np.uint32(1 << 31), seed, np)


@functools.lru_cache(maxsize=64)
def _weights(start, sizes, shape, seed: int, words: int) -> UInt32[np.ndarray, " n"]:
    """Weights of a box of indices in C order, each followed by its words where there are any."""
    index = np.zeros((1,) * len(sizes), np.uint32)
    for d, (at, n, stride) in enumerate(zip(start, sizes, _strides(shape), strict=True)):
        steps = (np.arange(at, at + n, dtype=np.uint64) * np.uint64(stride)).astype(np.uint32)
        index = index + steps.reshape([-1 if e == d else 1 for e in range(len(sizes))])
    weights = _mix(index.reshape(-1), seed, np)
    if words:
        weights = (weights[:, None] * _word_weights(words, seed)).reshape(-1)
    weights.setflags(write=False)
    return weights


def of_array(leaf: Array) -> Sums:
    """The checksum of what this process holds of `leaf`, each element once: sum over processes for the whole.

    Computed under jit on the device that holds each shard; nothing but the two sums leaves it.
    """
    mine = [s for s in leaf.addressable_shards if s.replica_id == 0 and s.data.size]
    pending = [
        _of_shard(part, start, shape=leaf.shape)
        for s in mine
        for part, start in _on_device(s.data, _start(s.index, leaf.ndim))
    ]
    total = (0, 0)
    for sums in pending:
        first, second = np.asarray(sums)
        total = add(total, (int(first), int(second)))
    return total


def _start(index: tuple[slice, ...], ndim: int) -> UInt32[np.ndarray, " ndim"]:
    return np.array([s.start or 0 for s in index], np.uint32).reshape(ndim)


def _on_device(
    shard: Shaped[Array, "..."], start: UInt32[np.ndarray, " ndim"]
) -> Iterator[tuple[Shaped[Array, "..."], UInt32[np.ndarray, " ndim"]]]:
    """A shard and where it begins; one in host memory comes to its device in parts, as it may not have room for all."""
    if shard.sharding.memory_kind != HOST or shard.ndim == 0:
        yield shard, start
        return
    host = np.asarray(shard)
    for row in range(host.shape[0]):
        first = start.copy()
        first[0] += np.uint32(row)
        yield jax.device_put(host[row : row + 1], next(iter(shard.devices()))), first


@functools.partial(jax.jit, static_argnames="shape")
def _of_shard(
    shard: Shaped[Array, "..."], start: UInt32[Array, " ndim"], *, shape: tuple[int, ...]
) -> UInt[Array, "2"]:
    """The checksum of one shard that begins at `start` in a leaf of global `shape`."""
    k = len(shape) - tail(shape)
    strides = _strides(shape[:k]) + _strides(shape[k:])
    index = [
        (jax.lax.broadcasted_iota(jnp.uint32, shard.shape, d) + start[d]) * jnp.uint32(strides[d])
        for d in range(shard.ndim)
    ]
    zero = jnp.zeros(shard.shape, jnp.uint32)
    row, column = sum(index[:k], zero), sum(index[k:], zero)
    words = _words(shard)
    sums = []
    for row_seed, column_seed in SEEDS:
        of_word = _word_weights(len(words), column_seed)
        value = sum((w * jnp.uint32(m) for w, m in zip(words, of_word, strict=True)), zero)
        weight = _mix(row, row_seed, jnp) * _mix(column, column_seed, jnp)
        sums.append(jnp.sum(value * weight, dtype=jnp.uint32))
    return jnp.stack(sums)


def _words(shard: Shaped[Array, "..."]) -> list[UInt32[Array, "..."]]:
    """The 16-bit words (8-bit for one-byte dtypes) of each element, lowest first, each widened to uint32."""
    bits = SUB_BYTE.get(np.dtype(shard.dtype))
    if bits:
        return [jax.lax.bitcast_convert_type(shard, {2: jnp.uint2, 4: jnp.uint4}[bits]).astype(jnp.uint32)]
    if shard.dtype == jnp.bool_:
        return [shard.astype(jnp.uint32)]
    if shard.dtype == jnp.complex64:
        return [w for part in (shard.real, shard.imag) for w in _words(part)]
    size = shard.dtype.itemsize
    if size == 1:
        return [jax.lax.bitcast_convert_type(shard, jnp.uint8).astype(jnp.uint32)]
    halves = jax.lax.bitcast_convert_type(shard, jnp.uint16)
    if size == 2:
        return [halves.astype(jnp.uint32)]
    return [halves[..., i].astype(jnp.uint32) for i in range(size // 2)]
