"""Block sizes of the TPU kernels, and which blocks of queries and keys have to meet.

Sizes are chosen from static schedules (benchmarks/attention_tpu.py); nothing here has been timed on a TPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from shardzoo.kernels.flash_attention.options import Extras, Options, Sizes, offset_of
from shardzoo.kernels.outline import device_kind

LANES = 128
WIDEST = 1024  # head_dim that blocks of 128 rows leave VMEM for, in float32 on all chips

Pass = Literal["forward", "backward", "bias"]
Scalar = int | Int[Array, ""]
Truth = bool | Array


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """q queries meet kv keys in one grid step, in tiles of (tile_kv, tile_q) logits.

    The matrix unit works `ahead` tiles in front of the softmax. With `registers`, the running sums of a tile of
    queries stay values from one tile of keys to the next instead of going through memory. Unmasked forward code is
    written out for `written` tiles at most; what a block has more is done in further rounds of a loop.
    """

    q: int
    kv: int
    tile_q: int
    tile_kv: int
    ahead: int = 1
    registers: bool = False
    written: int = 256


# Matrix units of 128 x 128 (v4, v5e, v5p) and of 256 x 256 (v6e, 7x).
_NARROW: dict[Pass, Blocks] = {
    "forward": Blocks(q=2048, kv=2048, tile_q=128, tile_kv=128, registers=True),
    "backward": Blocks(q=1024, kv=1024, tile_q=1024, tile_kv=1024),
    "bias": Blocks(q=512, kv=512, tile_q=512, tile_kv=512),
}
_WIDE: dict[Pass, Blocks] = {
    "forward": Blocks(q=2048, kv=2048, tile_q=256, tile_kv=256, ahead=4),
    "backward": Blocks(q=2048, kv=1024, tile_q=256, tile_kv=256),
    "bias": Blocks(q=512, kv=512, tile_q=512, tile_kv=512),
}


# With half a row of lanes a product fills half of a narrow matrix unit: larger tiles make up for it.
_NARROW_HALF = Blocks(q=2048, kv=2048, tile_q=256, tile_kv=256)


def chip() -> str:
    """The kind of the device that is traced for: of the mesh in use if it has one, else of the default backend."""
    return device_kind() or jax.devices()[0].device_kind


def preset(step: Pass, size: Sizes, itemsize: int, with_bias: bool) -> Blocks:
    """The block sizes for long sequences on the chip that is traced for."""
    wide = any(name in chip() for name in ("v6", "7"))
    blocks = (_WIDE if wide else _NARROW)[step]
    if step == "forward" and not wide and size.head_dim <= LANES // 2:
        blocks = _NARROW_HALF
    if step == "forward" and chip() in ("TPU v5", "TPU v5p"):
        # Two rounds: 1.3 % more bundles than all of a block written out, and half the time to compile. On v5e 1.6 %.
        blocks = replace(blocks, written=128)
    if with_bias:
        # A block of the bias lies in VMEM twice, in float32 or bfloat16.
        blocks = replace(blocks, q=min(blocks.q, 512), kv=min(blocks.kv, 1024))
    # Rows of more than 128 lanes of 2 bytes make fewer a block, later where the compiler gives a kernel more VMEM.
    wider = next(n for n in (1, 2, 4, 8, 16) if n * 2 * LANES >= itemsize * size.head_dim)
    spread = 1 if step == "forward" and not wide else 2
    q = blocks.q // (wider if step == "backward" else max(1, wider // spread))
    kv = blocks.kv // max(1, wider // spread)
    least = 256 if wider < 16 else 128
    return replace(blocks, q=max(least, q), kv=max(least, kv), tile_kv=min(blocks.tile_kv, 2048 // itemsize))


def fitted(blocks: Blocks, q_len: int, kv_len: int) -> Blocks:
    """The blocks cut to a call's lengths, in equal parts, so that the last block holds little padding."""
    q, tile_q = _fit(q_len, blocks.q, blocks.tile_q)
    kv, tile_kv = _fit(kv_len, blocks.kv, blocks.tile_kv)
    return replace(blocks, q=q, kv=kv, tile_q=tile_q, tile_kv=tile_kv)


def _fit(length: int, block: int, tile: int) -> tuple[int, int]:
    tile = min(tile, block, round_up(length, LANES))
    parts = -(-length // block)
    return round_up(-(-length // parts), tile), tile


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Call:
    """Everything about a call that is known when it is traced; hashable.

    `packed`: heads are cut out of (batch, length, heads * head_dim) by the kernel's own indexing, which takes a
    head_dim of whole lanes; otherwise the arrays come as (batch, heads, length, head_dim).
    """

    size: Sizes
    options: Options
    blocks: Blocks
    packed: bool
    q_lengths: bool
    kv_lengths: bool
    segments: bool
    bias: tuple[int, int] | None

    @property
    def q_blocks(self) -> int:
        return -(-self.size.q_len // self.blocks.q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.size.kv_len // self.blocks.kv)

    @property
    def q_tail(self) -> bool:
        """Whether the last block of queries reaches beyond the array."""
        return self.size.q_len % self.blocks.q != 0

    @property
    def kv_tail(self) -> bool:
        """Whether the last block of keys reaches beyond the array."""
        return self.size.kv_len % self.blocks.kv != 0

    @property
    def moving_edges(self) -> bool:
        """Whether something but the end of the arrays hides keys, so that any tile may need a mask."""
        return self.options.banded or self.kv_lengths or self.segments


def call_of(
    step: Pass, size: Sizes, itemsize: int, extras: Extras, options: Options, blocks: Blocks | None = None
) -> Call:
    """The call with the block sizes of `step` (those given, or the preset's)."""
    bias = None if extras.bias is None else extras.bias.shape[:2]
    blocks = blocks or preset(step, size, itemsize, bias is not None)
    return Call(
        size=size,
        options=options,
        blocks=fitted(blocks, size.q_len, size.kv_len),
        packed=size.head_dim % LANES == 0,
        q_lengths=extras.q_lengths is not None,
        kv_lengths=extras.kv_lengths is not None,
        segments=extras.q_segment_ids is not None,
        bias=bias,
    )


def scalars(call: Call, extras: Extras) -> Int[Array, " n"]:
    """What index maps and branches read from scalar memory: the offset, the ends of queries, the ends of keys."""

    def ends(lengths: Array | None, full: int) -> Array:
        if lengths is None:
            return jnp.full((call.size.batch,), full, jnp.int32)
        return jnp.clip(lengths.astype(jnp.int32), 0, full)

    offset = jnp.asarray(offset_of(extras, call.options), jnp.int32).reshape(1)
    return jnp.concatenate([offset, ends(extras.q_lengths, call.size.q_len), ends(extras.kv_lengths, call.size.kv_len)])


class Edges:
    """Where the queries and keys of batch row `b` end and which of them meet, from the scalars of `scalars`.

    What is known when tracing stays a Python number, so that branches on it vanish.
    """

    def __init__(self, call: Call, numbers: Any, b: Scalar):
        size, options = call.size, call.options
        self.call = call
        self.offset = options.q_offset if options.q_offset is not None else numbers[0]
        self.q_end = numbers[1 + b] if call.q_lengths else size.q_len
        self.kv_end = numbers[1 + size.batch + b] if call.kv_lengths else size.kv_len

    def kv_blocks(self, i: Scalar) -> tuple[Scalar, Scalar]:
        """The first block of keys that query block i sees, and the one after the last."""
        call, step = self.call, self.call.blocks.q
        low, high = i * step, _least((i + 1) * step, self.q_end)
        start, stop = 0, self.kv_end
        if call.options.before is not None:
            start = _most(low + self.offset - call.options.before, 0)
        if call.options.after is not None:
            stop = _least(high + self.offset + call.options.after, stop)
        return self._in_blocks(start, stop, high > low, call.blocks.kv)

    def q_blocks(self, j: Scalar) -> tuple[Scalar, Scalar]:
        """The first block of queries that sees key block j, and the one after the last."""
        call, step = self.call, self.call.blocks.kv
        low, high = j * step, _least((j + 1) * step, self.kv_end)
        start, stop = 0, self.q_end
        if call.options.after is not None:
            start = _most(low - self.offset - call.options.after, 0)
        if call.options.before is not None:
            stop = _least(high - self.offset + call.options.before, stop)
        return self._in_blocks(start, stop, high > low, call.blocks.q)

    @staticmethod
    def _in_blocks(start: Scalar, stop: Scalar, some: Truth, block: int) -> tuple[Scalar, Scalar]:
        first = _floor(start, block)
        last = _floor(stop + block - 1, block)
        if isinstance(some, bool) and some:
            return first, last
        return first, jnp.where(some, last, first)

    def meet(self, i: Scalar, j: Scalar) -> Truth:
        """Whether blocks i and j hold a pair that is visible as far as ends and band tell."""
        if not (self.call.options.banded or self.call.q_lengths or self.call.kv_lengths):
            return True
        first, stop = self.kv_blocks(i)
        return _both(first <= j, j < stop)

    def whole(self, i: Scalar, j: Scalar) -> Truth:
        """Whether every pair of blocks i and j is visible, queries beyond the end aside."""
        blocks = self.call.blocks
        return self.all_visible(i * blocks.q, blocks.q, j * blocks.kv, blocks.kv)

    def all_visible(self, row: Scalar, rows: int, key: Scalar, keys: int) -> Truth:
        """Whether `rows` queries from `row` on all see `keys` keys from `key` on."""
        options = self.call.options
        if self.call.segments:
            return False
        seen: Truth = True
        if self.call.kv_lengths or self.call.kv_tail:
            seen = _both(seen, key + keys <= self.kv_end)
        if options.after is not None:
            seen = _both(seen, key + keys - 1 <= row + self.offset + options.after)
        if options.before is not None:
            seen = _both(seen, key >= row + rows - 1 + self.offset - options.before)
        return seen

    def some_visible(self, row: Scalar, rows: int, key: Scalar, keys: int) -> Truth:
        """Whether any of these queries sees any of these keys, as far as ends and band tell."""
        options = self.call.options
        seen: Truth = True
        if self.call.kv_lengths or self.call.kv_tail:
            seen = _both(seen, key < self.kv_end)
        if options.after is not None:
            seen = _both(seen, key <= row + rows - 1 + self.offset + options.after)
        if options.before is not None:
            seen = _both(seen, key + keys - 1 >= row + self.offset - options.before)
        return seen


def _choose(pick: Callable, traced: Callable) -> Callable[[Scalar, Scalar], Scalar]:
    return lambda a, b: pick(a, b) if isinstance(a, int) and isinstance(b, int) else traced(a, b)


_least = _choose(min, jnp.minimum)
_most = _choose(max, jnp.maximum)


def _floor(n: Scalar, block: int) -> Scalar:
    """n // block for an n of at least 0: division in one instruction where the compiler has no rounding to mend."""
    return n // block if isinstance(n, int) else jax.lax.div(_most(n, 0), block)


def _both(a: Truth, b: Truth) -> Truth:
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return jnp.logical_and(a, b)
