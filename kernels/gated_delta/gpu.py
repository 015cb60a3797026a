"""The gated delta rule on NVIDIA GPUs: Pallas kernels for the Triton back end, forward and backward.

Forward in two kernels: what does not depend on the state, a program for each chunk and head; and the recurrence, a
program for some columns of a head's values. Backward runs the same and keeps the state before each chunk, then goes
back over the chunks, and last makes the gradients of queries, keys and gates, a program for each chunk and key head.
Nothing is added up by two programs at once, so results are the same bits on every run.

In the tests the kernels run in Pallas' interpreter on a CPU and are lowered to Triton's IR for CUDA. Nothing has run or
been timed on a GPU yet; chunk, columns and warps are estimates.

The state is float32. Float32 values are multiplied with all their bits; beside values in bfloat16 the operands of
products are rounded to bfloat16. Head sizes are filled up with zeros to powers of two, lengths to whole chunks. The
parts are columns beside the values, as in `tpu`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.gpu import _INTERPRETED, MOST_ELEMENTS, interpreted
from shardzoo.kernels.flash_attention.options import out_struct
from shardzoo.kernels.gated_delta.gpu_kernels import Spec, chain_kernel, gradients_kernel, prepare_kernel, scan_kernel
from shardzoo.kernels.gated_delta.options import Call, Result, backward_of, cut, result_dtype, with_identity

__all__ = ["backward", "interpreted", "run", "supports"]

DTYPES = ("float32", "bfloat16")
LARGEST_KEY_DIM = 256  # columns of the state stay in registers
_COLUMNS = 64  # of values that one program of the recurrence works on
_FLOAT32 = jnp.dtype(jnp.float32)
_SMALLEST = 16  # side of a product on the tensor cores


def supports(call: Call, *, parts: bool) -> str | None:
    """Why the kernels cannot take the call; None when they can."""
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if str(x.dtype) not in DTYPES:
            return f"the dtype {x.dtype} of {name} is none of {', '.join(DTYPES)}"
    if call.k.shape[-1] > LARGEST_KEY_DIM:
        return f"its key_dim={call.k.shape[-1]} is over {LARGEST_KEY_DIM}"
    if any(x.size == 0 for x in call):
        return "it has no elements"
    spec = _spec(call, 1.0, more=call.k.shape[-1] if parts else 0)
    batch, _, key_heads, group, _ = call.v.shape
    kept = batch * key_heads * group * spec.chunks * spec.key_dim * spec.value_dim
    if kept > MOST_ELEMENTS:
        return f"its {kept} elements of states between chunks are more than the {MOST_ELEMENTS} of 32-bit offsets"
    return None


def _spec(call: Call, scale: float, more: int = 0) -> Spec:
    """more: columns of values yet to come."""
    low = call.v.dtype == jnp.bfloat16
    chunk = 64 if low else 32
    value_dim = _power(call.v.shape[-1] + more)
    return Spec(
        chunk=chunk,
        chunks=pl.cdiv(call.v.shape[1], chunk),
        group=call.v.shape[3],
        key_dim=_power(call.k.shape[-1]),
        value_dim=value_dim,
        columns=min(_COLUMNS, value_dim),
        scale=scale,
        low=low,
    )


def _power(size: int) -> int:
    return max(_SMALLEST, pl.next_power_of_2(size))


def run(call: Call, scale: float, *, parts: bool) -> Result:
    """Outputs and final state, with the parts if asked for."""
    dtype, width = result_dtype(call, parts=parts), call.v.shape[-1]
    whole = with_identity(call) if parts else call
    spec = _spec(whole, scale)
    x = _prepared(spec, _arrays(spec, whole))
    out, state = _scan(spec, x, dtype, keep=False)
    out, state = _rows_like(out, whole.v), _state_like(state, whole.state)
    return cut(out, state, width) if parts else Result(out, state)


def backward(call: Call, scale: float, change: Result, *, parts: bool) -> Call:
    """Gradients of the call from those of its result."""
    return backward_of(_backward, call, scale, change, parts=parts)


def _backward(
    call: Call,
    scale: float,
    d_out: Float[Array, "batch seq key_heads group value_dim"],
    d_state: Float[Array, "batch key_heads group key_dim value_dim"],
) -> Call:
    spec = _spec(call, scale)
    x = _prepared(spec, _arrays(spec, call))
    x["before"], x["added"] = _scan(spec, x, x["v"].dtype, keep=True)[2:]
    x["d_out"], x["d_last"] = _rows(spec, d_out, spec.value_dim, x["v"].dtype), _state(spec, d_state)
    x["d_values"], x["after"], d_first = _chain(spec, x)
    d_q, d_k, d_log, d_beta = _gradients(spec, x)
    by_chunk = d_log.reshape(*d_log.shape[:2], spec.chunks, spec.chunk)
    d_log = lax.cumsum(by_chunk, axis=3, reverse=True).reshape(d_log.shape)  # a log decay acts on all after it
    d_log, d_beta = (jnp.moveaxis(g, 1, 2)[:, : call.v.shape[1]].reshape(call.beta.shape) for g in (d_log, d_beta))
    d_q, d_k, d_v = (
        _rows_like(g, a).astype(a.dtype) for g, a in ((d_q, call.q), (d_k, call.k), (x["d_values"], call.v))
    )
    return Call(d_q, d_k, d_v, d_log, d_beta, _state_like(d_first, call.state))


def _arrays(spec: Spec, call: Call) -> dict[str, Array]:
    """(batch, tokens, heads, dim), gates (batch, heads, tokens), state (batch, heads, key_dim, value_dim)."""
    dtype = jnp.dtype(jnp.bfloat16 if spec.low else jnp.float32)
    extra = spec.chunks * spec.chunk - call.v.shape[1]
    gates = {}
    for name, x in (("log_decay", call.log_decay), ("beta", call.beta)):
        x = x.astype(jnp.float32).reshape(*x.shape[:2], -1)
        gates[name] = jnp.moveaxis(jnp.pad(x, ((0, 0), (0, extra), (0, 0))), 1, 2)
    dims = {"q": spec.key_dim, "k": spec.key_dim, "v": spec.value_dim}
    rows = {name: _rows(spec, getattr(call, name), dim, dtype) for name, dim in dims.items()}
    return {**rows, **gates, "state": _state(spec, call.state)}


def _rows(spec: Spec, x: Array, dim: int, dtype: jnp.dtype) -> Float[Array, "batch tokens heads dim"]:
    x = x.astype(dtype).reshape(*x.shape[:2], -1, x.shape[-1])
    extra = spec.chunks * spec.chunk - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, dim - x.shape[-1])))


def _rows_like(x: Float[Array, "batch tokens heads dim"], like: Array) -> Array:
    """The inverse of `_rows`, but for the dtype."""
    return x[:, : like.shape[1], :, : like.shape[-1]].reshape(like.shape)


def _state(spec: Spec, x: Array) -> Float[Array, "batch heads key_dim value_dim"]:
    x = x.astype(jnp.float32).reshape(x.shape[0], -1, *x.shape[-2:])
    return jnp.pad(x, ((0, 0), (0, 0), (0, spec.key_dim - x.shape[2]), (0, spec.value_dim - x.shape[3])))


def _state_like(x: Float[Array, "batch heads key_dim value_dim"], like: Array) -> Array:
    return x[:, :, : like.shape[-2], : like.shape[-1]].reshape(like.shape)


def _call(
    spec: Spec,
    kernel: Callable,
    name: str,
    grid: tuple[int, ...],
    x: dict[str, Array],
    inputs: dict[str, pl.BlockSpec],
    outputs: list[tuple[tuple[int, ...], jnp.dtype, pl.BlockSpec]],
    products: int,
) -> tuple[Array, ...]:
    """One Pallas call; `products` of chunk x chunk x columns and the like for each chunk, head and tile of columns."""
    like = x["v"]
    structs = [out_struct(shape, dtype, like) for shape, dtype, _ in outputs]
    arrays = {n: x[n] for n in inputs}
    buffers: list[Array | jax.ShapeDtypeStruct] = [*arrays.values(), *structs]
    work = like.shape[0] * like.shape[2] * spec.chunks * spec.chunk
    call = pl.pallas_call(
        partial(kernel, spec),
        grid=grid,
        in_specs=[inputs],
        out_specs=[block for _, _, block in outputs],
        out_shape=structs,
        compiler_params=plgpu.CompilerParams(num_warps=8 if spec.key_dim > 64 else 4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * work * spec.key_dim * max(spec.chunk, spec.value_dim),
            transcendentals=work * spec.chunk,
            bytes_accessed=sum(b.size * b.dtype.itemsize for b in buffers),
        ),
        interpret=_INTERPRETED.get(),
        name=name,
    )
    return tuple(call(arrays))


def _prepared(spec: Spec, x: dict[str, Array]) -> dict[str, Array]:
    """The arrays and, for each chunk and head, what does not depend on the state."""
    batch, heads, _ = x["beta"].shape
    keys = pl.BlockSpec((None, spec.chunk, None, spec.key_dim), lambda n, h, b: (b, n, h // spec.group, 0))
    line = pl.BlockSpec((None, None, spec.chunk), lambda n, h, b: (b, h, n))
    pairs = pl.BlockSpec((None, None, None, spec.chunk, spec.chunk), lambda n, h, b: (b, h, n, 0, 0))
    shape = (batch, heads, spec.chunks, spec.chunk, spec.chunk)
    solve, look = _call(
        spec,
        prepare_kernel,
        "gated_delta_prepare",
        (spec.chunks, heads, batch),
        x,
        {"q": keys, "k": keys, "log_decay": line, "beta": line},
        [(shape, x["v"].dtype, pairs)] * 2,
        products=2 + 2 * spec.chunk.bit_length(),
    )
    return {**x, "solve": solve, "look": look}


class _Strips:
    """Blocks of a grid (columns, head, row of the batch): all tokens of a head."""

    def __init__(self, spec: Spec):
        tokens = spec.chunks * spec.chunk
        state = (spec.key_dim, spec.columns)
        self.keys = pl.BlockSpec((None, tokens, None, spec.key_dim), lambda c, h, b: (b, 0, h // spec.group, 0))
        self.values = pl.BlockSpec((None, tokens, None, spec.columns), lambda c, h, b: (b, 0, h, c))
        self.line = pl.BlockSpec((None, None, tokens), lambda c, h, b: (b, h, 0))
        pairs = (spec.chunks, spec.chunk, spec.chunk)
        self.pairs = pl.BlockSpec((None, None, *pairs), lambda c, h, b: (b, h, 0, 0, 0))
        self.state = pl.BlockSpec((None, None, *state), lambda c, h, b: (b, h, 0, c))
        self.states = pl.BlockSpec((None, None, spec.chunks, *state), lambda c, h, b: (b, h, 0, 0, c))
        self.always = {"q": self.keys, "k": self.keys, "log_decay": self.line, "beta": self.line}
        self.always |= {"solve": self.pairs, "look": self.pairs}


def _columns_grid(spec: Spec, x: dict[str, Array]) -> tuple[int, int, int]:
    return spec.value_dim // spec.columns, x["v"].shape[2], x["v"].shape[0]


def _states_shape(spec: Spec, x: dict[str, Array]) -> tuple[int, ...]:
    batch, heads, *state = x["state"].shape
    return batch, heads, spec.chunks, *state


def _scan(spec: Spec, x: dict[str, Array], dtype: jnp.dtype, *, keep: bool) -> tuple[Array, ...]:
    """Outputs and final state; with `keep` also the state before each chunk and y."""
    strips = _Strips(spec)
    outputs = [(x["v"].shape, dtype, strips.values), (x["state"].shape, _FLOAT32, strips.state)]
    if keep:
        outputs += [(_states_shape(spec, x), _FLOAT32, strips.states), (x["v"].shape, x["v"].dtype, strips.values)]
    inputs = {**strips.always, "v": strips.values, "state": strips.state}
    return _call(spec, scan_kernel, "gated_delta_scan", _columns_grid(spec, x), x, inputs, outputs, products=5)


def _chain(spec: Spec, x: dict[str, Array]) -> tuple[Array, Array, Array]:
    """The gradient of values, of the state after each chunk, and of the first state."""
    strips = _Strips(spec)
    outputs = [
        (x["v"].shape, x["v"].dtype, strips.values),
        (_states_shape(spec, x), _FLOAT32, strips.states),
        (x["state"].shape, _FLOAT32, strips.state),
    ]
    inputs = {**strips.always, "d_out": strips.values, "d_last": strips.state}
    return _call(spec, chain_kernel, "gated_delta_chain", _columns_grid(spec, x), x, inputs, outputs, products=5)


def _gradients(spec: Spec, x: dict[str, Array]) -> tuple[Array, Array, Array, Array]:
    """Of queries, keys, log decays (yet to be added up) and betas."""
    batch, _, key_heads, _ = x["k"].shape
    keys = pl.BlockSpec((None, spec.chunk, None, spec.key_dim), lambda n, h, b: (b, n, h, 0))
    lines = pl.BlockSpec((None, spec.group, spec.chunk), lambda n, h, b: (b, h, n))
    values = pl.BlockSpec((None, spec.chunk, spec.group, spec.value_dim), lambda n, h, b: (b, n, h, 0))
    state = (spec.key_dim, spec.value_dim)
    states = pl.BlockSpec((None, spec.group, None, *state), lambda n, h, b: (b, h, n, 0, 0))
    inputs = {"q": keys, "k": keys, "log_decay": lines, "beta": lines, "before": states, "after": states}
    inputs |= {"added": values, "d_values": values, "d_out": values}
    outputs = [(x["k"].shape, _FLOAT32, keys)] * 2 + [(x["beta"].shape, _FLOAT32, lines)] * 2
    grid = (spec.chunks, key_heads, batch)
    return _call(spec, gradients_kernel, "gated_delta_gradients", grid, x, inputs, outputs, products=7)
