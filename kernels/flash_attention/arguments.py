"""Checks the arguments of a call and brings them to the form that implementations receive."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from shardzoo.errors import fail_if
from shardzoo.kernels.flash_attention.options import Extras, Options, Shaped, Sizes, sizes

DTYPES = ("float32", "bfloat16", "float16", "float64")


def prepare(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
    q_offset: int | Shaped | None,
    arrays: Extras,
) -> tuple[Extras, Options]:
    """The checked call; `arrays` holds everything but the offset.

    Raises:
        InputError: arguments that contradict each other, all of them in one message.
    """
    fail_if(_problems(q, k, v, window, soft_cap, arrays), "flash_attention")
    size = sizes(q, k)
    before = None if window is None else int(window) - 1
    after = 0 if causal else before
    offset, traced = _offset(size, q_offset)
    if offset is not None:
        before, after = _without_idle_bounds(size, before, after, offset)
    if before is None and after is None:
        offset, traced = 0, None
    options = Options(
        scale=size.head_dim**-0.5 if scale is None else float(scale),
        before=before,
        after=after,
        soft_cap=None if soft_cap is None else float(soft_cap),
        q_offset=offset,
    )
    return arrays._replace(q_offset=traced), options


def _offset(size: Sizes, q_offset: int | Shaped | None) -> tuple[int | None, Shaped | None]:
    """The offset as a number where it is known when tracing, else as an int32 array."""
    if q_offset is None:
        return size.kv_len - size.q_len, None
    if isinstance(q_offset, jax.core.Tracer):
        return None, q_offset.astype(jnp.int32)
    if isinstance(q_offset, jax.ShapeDtypeStruct):
        return None, jax.ShapeDtypeStruct(q_offset.shape, jnp.int32)
    return int(q_offset), None


def _without_idle_bounds(
    size: Sizes, before: int | None, after: int | None, offset: int
) -> tuple[int | None, int | None]:
    """The band without the bounds that hide no key from any query, as for the single query of a decode step."""
    if after is not None and offset + after >= size.kv_len - 1:
        after = None
    if before is not None and offset + size.q_len - 1 - before <= 0:
        before = None
    return before, after


def _problems(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    window: int | None,
    soft_cap: float | None,
    arrays: Extras,
) -> Iterator[str]:
    """Everything that is wrong with a call, one line each."""
    if any(len(x.shape) != 4 for x in (q, k, v)):
        shapes = ", ".join(str(x.shape) for x in (q, k, v))
        yield f"q, k, v: shapes {shapes} must each be (batch, length, heads, head_dim): add the missing dims"
        return
    yield from _shape_problems(q, k, v)
    if window is not None and window < 1:
        yield f"window={window} must be at least 1 (1 sees only the query's own position): use None for no window"
    if soft_cap is not None and not soft_cap > 0:
        yield f"soft_cap={soft_cap} must be positive: use None for no cap"
    if (arrays.q_segment_ids is None) != (arrays.kv_segment_ids is None):
        yield "q_segment_ids and kv_segment_ids: only one is given: give both (the same array twice for self-attention)"
    yield from _extra_shape_problems(sizes(q, k), arrays)


def _shape_problems(
    q: Shaped,
    k: Shaped,
    v: Shaped,
) -> Iterator[str]:
    if k.shape != v.shape:
        yield f"k, v: shapes {k.shape} and {v.shape} differ: give one value per key, of the same head_dim"
    for name, dim in (("batch", 0), ("head_dim", 3)):
        if q.shape[dim] != k.shape[dim]:
            yield f"q, k: {name}={q.shape[dim]} and {k.shape[dim]} differ: use the same {name}"
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        nearest = kv_heads * max(1, round(heads / kv_heads)) if kv_heads else 0
        yield f"q: heads={heads} does not divide by kv_heads={kv_heads}: use e.g. heads={nearest}"
    dtypes = [str(x.dtype) for x in (q, k, v)]
    if len(set(dtypes)) > 1:
        yield f"q, k, v: dtypes {', '.join(dtypes)} differ: cast them to one"
    if not set(dtypes) <= set(DTYPES):
        yield f"q, k, v: dtypes {', '.join(dtypes)} must be of {', '.join(DTYPES)}: cast them"


def _extra_shape_problems(size: Sizes, arrays: Extras) -> Iterator[str]:
    wanted = {
        "q_lengths": (size.batch,),
        "kv_lengths": (size.batch,),
        "q_segment_ids": (size.batch, size.q_len),
        "kv_segment_ids": (size.batch, size.kv_len),
    }
    for name, shape in wanted.items():
        x = getattr(arrays, name)
        if x is None:
            continue
        if x.shape != shape:
            yield f"{name}: shape {x.shape} must be {shape}: give one entry per row of q, k and v"
        if not jnp.issubdtype(x.dtype, jnp.integer):
            yield f"{name}: dtype {x.dtype} must be an integer: cast it to int32"
    bias = arrays.bias
    if bias is None:
        return
    whole = (size.batch, size.heads, size.q_len, size.kv_len)
    pairs = zip(bias.shape[:2], whole[:2], strict=False)
    if len(bias.shape) != 4 or bias.shape[2:] != whole[2:] or any(n not in (1, m) for n, m in pairs):
        yield f"bias: shape {bias.shape} must be (1 or {whole[0]}, 1 or {whole[1]}, {whole[2]}, {whole[3]}): reshape it"
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        yield f"bias: dtype {bias.dtype} must be floating: for a mask use 0 and -inf"
