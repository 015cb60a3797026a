"""What the TPU kernels share: layouts, block specs, tiles of logits and the order in which they are worked on.

Inside a kernel logits are held transposed, (keys, queries), in base 2. Keys lie along sublanes, so maxima and sums
over keys need no work across lanes, and what belongs to a query is a row that broadcasts for free.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from shardzoo.kernels.flash_attention.tpu_blocks import LANES, Call, Edges, Scalar, Truth

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

# The running maximum before the first key: below every logit, yet finite, so that hidden keys (-inf) weigh nothing.
LOWEST = -3.0e38
# A finite bias below this counts as this, so that in base 2 it stays finite and above LOWEST.
LOWEST_BIAS = -2.0e38
# Stands for an lse of -inf in the backward pass: exp2(logit - NOWHERE) is 0.
NOWHERE = 1.0e30


def dot(a: Array, b: Array, contract_a: int, contract_b: int) -> Float[Array, "m n"]:
    """The matrix product over one dimension of each; float32 input keeps its bits (six passes)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract_a,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def in_steps(items: Sequence[Any], ahead: int, *stages: Callable[..., Any]) -> None:
    """Runs the stages on each item, with the first stage `ahead` items in front of the others.

    The matrix unit then has the next tile's work while the vector units are on this one. The last stage follows one
    item behind, for the same reason. Unrolled: this is the order in which the compiler sees the work.
    """
    delays = [0, *(ahead + n for n in range(len(stages) - 1))]
    results: dict[int, tuple] = {}
    for step in range(len(items) + delays[-1]):
        for stage, delay in zip(stages, delays, strict=True):
            n = step - delay
            if 0 <= n < len(items):
                results[n] = stage(*items[n], *results.pop(n, ()))


def when(condition: Truth) -> Callable[[Callable[[], None]], None]:
    """pl.when that leaves no branch behind where the condition is known."""

    def run(body: Callable[[], None]) -> None:
        if isinstance(condition, bool):
            if condition:
                body()
        else:
            pl.when(condition)(body)

    return run


def negated(condition: Truth) -> Truth:
    """Not, of a number known when tracing or of an array."""
    return not condition if isinstance(condition, bool) else jnp.logical_not(condition)


def loop(count: int, body: Callable[[Scalar], None]) -> None:
    """body(0), ..., body(count - 1): a loop in the program, unless there is nothing to loop over."""
    if count == 1:
        body(0)
    else:
        lax.fori_loop(0, count, lambda n, _: body(n), None)


def window(start: Scalar, size: int) -> Any:
    """A slice of `size` rows or lanes at a start that is a multiple of the lanes."""
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, LANES), size)


def to_kernel(x: Float[Array, "batch length heads head_dim"], packed: bool) -> Array:
    """(batch, length, heads * head_dim), a view, if the kernel cuts out heads itself; else heads before length."""
    return x.reshape(*x.shape[:2], -1) if packed else x.swapaxes(1, 2)


def from_kernel(x: Array, heads: int, packed: bool) -> Float[Array, "batch length heads head_dim"]:
    """The inverse of `to_kernel`."""
    return x.reshape(*x.shape[:2], heads, -1) if packed else x.swapaxes(1, 2)


def kernel_shape(call: Call, length: int, heads: int) -> tuple[int, ...]:
    """The shape of an array of rows in the layout of `to_kernel`."""
    size = call.size
    if call.packed:
        return size.batch, length, heads * size.head_dim
    return size.batch, heads, length, size.head_dim


def rows_spec(call: Call, rows: int, index: Callable[..., tuple]) -> pl.BlockSpec:
    """Blocks (rows, head_dim) of an array in the layout of `to_kernel`; index gives (batch, block, head)."""
    if call.packed:
        return pl.BlockSpec((None, rows, call.size.head_dim), index)

    def heads_first(*at: Any) -> tuple:
        b, block, head = index(*at)
        return b, head, block, 0

    return pl.BlockSpec((None, None, rows, call.size.head_dim), heads_first)


def line_spec(width: int, index: Callable[..., tuple]) -> pl.BlockSpec:
    """Blocks (1, width) of an array (batch, heads, 1, length); index gives (batch, block, head)."""

    def lanes_last(*at: Any) -> tuple:
        b, block, head = index(*at)
        return b, head, 0, block

    return pl.BlockSpec((None, None, 1, width), lanes_last)


def column(row: Any, rows: Any) -> Array:
    """Lanes of a (1, n) block as a column (rows, 1)."""
    lanes = row[:, rows]
    return jnp.broadcast_to(lanes, (LANES, lanes.shape[1])).T[:, :1]


def tile_mask(
    call: Call,
    edges: Edges,
    segments: tuple[Any, Any] | None,
    at: tuple,
    starts: tuple[Scalar, Scalar],
    hide_rows: bool,
) -> Bool[Array, "tile_kv tile_q"]:
    """Which pairs of one tile are visible.

    Args:
        segments: the blocks (1, q) and (1, kv) of segment ids.
        at: the windows of the tile's queries and keys inside the blocks.
        starts: the positions of the tile's first query and key in the arrays.
        hide_rows: hide queries beyond the array as well.
    """
    blocks, options = call.blocks, call.options
    shape = (blocks.tile_kv, blocks.tile_q)
    keys = starts[1] + lax.broadcasted_iota(jnp.int32, shape, 0)
    rows = starts[0] + lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = keys < edges.kv_end
    if hide_rows:
        seen &= rows < call.size.q_len
    if options.after is not None:
        seen &= keys - rows <= edges.offset + options.after
    if options.before is not None:
        seen &= keys - rows >= edges.offset - options.before
    if segments is not None:
        q_ids, kv_ids = segments
        seen &= column(kv_ids, at[1]) == q_ids[:, at[0]]
    return seen


def fold(call: Call) -> float:
    """What queries are multiplied by, so that q . k is the logit in base 2, or what the soft cap's tanh takes."""
    scale, cap = call.options.scale, call.options.soft_cap
    return scale * LOG2E if cap is None else scale / cap


def finish_logits(
    call: Call, products: Float[Array, "tile_kv tile_q"], bias: Float[Array, "tile_q tile_kv"] | None
) -> tuple[Float[Array, "tile_kv tile_q"], Float[Array, "tile_kv tile_q"] | None]:
    """Base-2 logits from products of keys and folded queries, and the tanh of the soft cap if there is one."""
    cap, tanh = call.options.soft_cap, None
    if cap is not None:
        tanh = jnp.tanh(products)
        products = tanh * (cap * LOG2E)
    if bias is not None:
        values = bias.astype(jnp.float32)
        values = jnp.where(values == -jnp.inf, values, jnp.maximum(values, LOWEST_BIAS))
        products += values.T * LOG2E
    return products, tanh


def folded(q: Array, factor: float) -> Array:
    """Queries times a factor, rounded once."""
    return (q.astype(jnp.float32) * factor).astype(q.dtype)


def transposed(x: Array) -> Array:
    """The transpose, by way of float32, which every chip's transpose unit takes."""
    return x.astype(jnp.float32).T.astype(x.dtype)


def without_rows_from(x: Array, first: Scalar, end: Scalar) -> Array:
    """x with zeros in the rows at positions from `end` on, whatever lies there; row 0 is at `first`."""
    rows = first + lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(rows < end, x, jnp.zeros_like(x))


def unpack(refs: Sequence[Any], *present: bool) -> Iterator[Any]:
    """The refs in order, with None where an optional one was not passed."""
    rest = iter(refs)
    return iter([next(rest) if there else None for there in present])


def group_of(call: Call, head: Scalar) -> Scalar:
    """The KV head that a query head reads."""
    return head if call.size.group == 1 else jax.lax.div(head, call.size.group)
