"""Flash attention for NVIDIA GPUs: Pallas kernels for the Triton back end, forward and backward.

Four kernels: forward (a program per query tile and head), dq (the same grid), dk and dv (a program per key tile
and KV head, over the query heads that read it), dbias (a program per tile of the bias). Nothing is added up by
two programs at once, so results are the same bits on every run. Arrays keep the layout that models use.

What has run where: in the tests the kernels run in Pallas' interpreter on a CPU and are lowered to Triton's IR for
CUDA. That IR, of every preset below, has been compiled by Triton 3.5 for compute capability 9.0 on a machine
without a GPU (warp-group matrix instructions, registers and shared memory within bounds). Nothing has run or been
timed on a GPU yet; the tile sizes are estimates.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.gpu_kernels import Spec, dbias_kernel, dkv_kernel, dq_kernel, forward_kernel
from shardzoo.kernels.flash_attention.options import Extras, Options, Shaped, Sizes, out_struct, sizes

_INTERPRETED: ContextVar[bool] = ContextVar("interpreted", default=False)
# Triton computes the place of an element within an array in 32 bits.
MOST_ELEMENTS = 2**31 - 1
LARGEST_HEAD_DIM = 256


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, kernels that are traced run in Pallas' interpreter, on any platform: slow, for tests."""
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def supports(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    extras: Extras,
    options: Options,
) -> str | None:
    """Why the kernels cannot take the call; None when they can."""
    head_dim = q.shape[-1]
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"dtype {q.dtype}; the kernels take float32, bfloat16 and float16"
    if head_dim > LARGEST_HEAD_DIM:
        return f"head_dim={head_dim} is above {LARGEST_HEAD_DIM}, a tile of it does not fit in registers"
    given = {"q": q, "k": k, "bias": extras.bias}
    for name, x in given.items():
        if x is not None and x.size > MOST_ELEMENTS:
            return f"{name} has {x.size} elements, more than the {MOST_ELEMENTS} that 32-bit offsets reach"
    return None


@dataclass(frozen=True)
class Launch:
    """Tile sizes and how a kernel is compiled."""

    q: int
    kv: int
    warps: int
    stages: int


# By bytes of an element and head_dim rounded up. The sum of a query tile (q x head_dim float32), and in the backward
# pass dk and dv of a key tile, stay in registers; shared memory stays below 99 KiB, what every GPU since compute
# capability 8.0 has. float32 products do not run on the tensor cores: smaller tiles.
FORWARD = {
    (2, 64): Launch(128, 64, 4, 2),
    (2, 128): Launch(128, 64, 8, 2),
    (2, 256): Launch(64, 32, 8, 2),
    (4, 64): Launch(64, 32, 8, 2),
    (4, 128): Launch(32, 32, 8, 1),
    (4, 256): Launch(32, 16, 8, 1),
}
BACKWARD = {
    (2, 64): Launch(64, 64, 4, 2),
    (2, 128): Launch(64, 64, 8, 2),
    (2, 256): Launch(32, 32, 8, 1),
    (4, 64): Launch(32, 32, 8, 1),
    (4, 128): Launch(16, 32, 8, 1),
    (4, 256): Launch(16, 32, 8, 1),
}


def launch_of(presets: dict[tuple[int, int], Launch], q: Array) -> Launch:
    """The preset for arrays like q."""
    return presets[q.dtype.itemsize, max(64, pl.next_power_of_2(q.shape[-1]))]


def _spec(size: Sizes, extras: Extras, options: Options, launch: Launch) -> Spec:
    """Tiles no longer than the lengths rounded up to a power of two; the tensor cores want at least 16 of each."""
    q = min(launch.q, max(16, pl.next_power_of_2(size.q_len)))
    kv = min(launch.kv, max(16, pl.next_power_of_2(size.kv_len)))
    bias = None if extras.bias is None else extras.bias.shape[:2]
    return Spec(size, options, q, kv, max(16, pl.next_power_of_2(size.head_dim)), bias)


def _cost(size: Sizes, options: Options, products: int, moved: int) -> pl.CostEstimate:
    """`products` matrix products per logit. A band sees about half of the keys, or its own width."""
    seen = size.kv_len
    if options.banded:
        width = size.kv_len if None in (options.before, options.after) else options.before + options.after + 1
        seen = min(max(1, size.kv_len // 2), width)
    logits = size.batch * size.heads * size.q_len * seen
    return pl.CostEstimate(flops=2 * products * logits * size.head_dim, transcendentals=logits, bytes_accessed=moved)


def _call(
    kernel: Callable,
    name: str,
    grid: tuple[int, ...],
    spec: Spec,
    launch: Launch,
    inputs: dict[str, tuple[Array, pl.BlockSpec]],
    outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    products: int,
) -> tuple[Array, ...]:
    """One Pallas call; `inputs` are arrays with their blocks, by the name that the kernel reads them by."""
    arrays = {n: x for n, (x, _) in inputs.items()}
    buffers: list[Array | jax.ShapeDtypeStruct] = [*arrays.values(), *(o for o, _ in outputs)]
    moved = sum(x.size * x.dtype.itemsize for x in buffers)
    call = pl.pallas_call(
        partial(kernel, spec),
        grid=grid,
        in_specs=[{n: block for n, (_, block) in inputs.items()}],
        out_specs=[block for _, block in outputs],
        out_shape=[struct for struct, _ in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        cost_estimate=_cost(spec.size, spec.options, products, moved),
        interpret=_INTERPRETED.get(),
        name=name,
    )
    return tuple(call(arrays))


def _extra_inputs(spec: Spec, extras: Extras, by: str) -> dict[str, tuple[Array, pl.BlockSpec]]:
    """The optional arrays, cut for a grid (tile, head, row); `by` says which side the tiles are of, "q" or "kv"."""
    size, inputs = spec.size, {}
    if extras.q_offset is not None:
        inputs["q_offset"] = (extras.q_offset.reshape(1), pl.BlockSpec((1,), lambda i, h, b: (0,)))
    for name in ("q_lengths", "kv_lengths"):
        if (x := getattr(extras, name)) is not None:
            inputs[name] = (x.astype(jnp.int32), pl.BlockSpec((1,), lambda i, h, b: (b,)))
    for side, tile, length in (("q", spec.q, size.q_len), ("kv", spec.kv, size.kv_len)):
        if (x := getattr(extras, f"{side}_segment_ids")) is not None:
            cut = pl.BlockSpec((None, tile), lambda i, h, b: (b, i))
            whole = pl.BlockSpec((None, length), lambda i, h, b: (b, 0))
            inputs[f"{side}_segment_ids"] = (x.astype(jnp.int32), cut if side == by else whole)
    if extras.bias is not None:
        inputs["bias"] = (extras.bias, _bias_block(spec, by))
    return inputs


def _bias_block(spec: Spec, by: str) -> pl.BlockSpec:
    """A strip of the bias: all keys of a query tile of one head, or all queries of a key tile of a group of heads."""
    size, (rows, heads) = spec.size, spec.bias
    row, head = (1 if rows > 1 else 0), (1 if heads > 1 else 0)
    if by == "q":
        return pl.BlockSpec((None, None, spec.q, size.kv_len), lambda i, h, b: (b * row, h * head, i, 0))
    group = size.group if heads > 1 else 1
    return pl.BlockSpec((None, group, size.q_len, spec.kv), lambda j, h, b: (b * row, h * head, 0, j))


def _query_tile(spec: Spec) -> pl.BlockSpec:
    """A query tile of one head of (batch, q_len, heads, head_dim), for a grid (query tile, head, row)."""
    return pl.BlockSpec((None, spec.q, None, spec.head_dim), lambda i, h, b: (b, i, h, 0))


def _per_query(spec: Spec) -> pl.BlockSpec:
    """The numbers of a query tile of (batch, heads, q_len), for the same grid."""
    return pl.BlockSpec((None, None, spec.q), lambda i, h, b: (b, h, i))


def _all_keys(spec: Spec) -> pl.BlockSpec:
    """All keys of the KV head that a head reads, for the same grid."""
    size = spec.size
    return pl.BlockSpec((None, size.kv_len, None, spec.head_dim), lambda i, h, b: (b, 0, h // size.group, 0))


def forward(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    options: Options,
) -> tuple[Float[Array, "batch q_len heads head_dim"], Float[Array, "batch heads q_len"]]:
    """Output and log-sum-exp; see `options`."""
    size = sizes(q, k)
    launch = launch_of(FORWARD, q)
    spec = _spec(size, extras, options, launch)
    inputs = {"q": (q, _query_tile(spec)), "k": (k, _all_keys(spec)), "v": (v, _all_keys(spec))}
    lse = out_struct((size.batch, size.heads, size.q_len), jnp.float32, q)
    out, lse = _call(
        forward_kernel,
        "attention_forward",
        (pl.cdiv(size.q_len, spec.q), size.heads, size.batch),
        spec,
        launch,
        inputs | _extra_inputs(spec, extras, "q"),
        [(out_struct(q.shape, q.dtype, q), _query_tile(spec)), (lse, _per_query(spec))],
        products=2,
    )
    return out, lse


def backward(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    options: Options,
    out: Float[Array, "batch q_len heads head_dim"],
    lse: Float[Array, "batch heads q_len"],
    d_out: Float[Array, "batch q_len heads head_dim"],
    d_lse: Float[Array, "batch heads q_len"],
) -> tuple[Array, Array, Array, Array | None]:
    """dq, dk, dv and dbias (None without a bias); see `options`."""
    size = sizes(q, k)
    launch = launch_of(BACKWARD, q)
    spec = _spec(size, extras, options, launch)
    # A query without keys has no weights to differentiate, whatever cotangent its lse of -inf was given.
    empty = jnp.isneginf(lse)
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    arrays = {"q": q, "k": k, "v": v, "d_out": d_out, "lse": jnp.where(empty, 0, lse)}
    arrays["delta"] = jnp.where(empty, 0, delta - d_lse)
    dq = _dq(spec, launch, arrays, extras)
    dk, dv = _dkv(spec, launch, arrays, extras)
    wanted = extras.bias is not None and options.bias_gradient
    return dq, dk, dv, _dbias(spec, launch, arrays, extras) if wanted else None


def _dq(spec: Spec, launch: Launch, arrays: dict[str, Array], extras: Extras) -> Array:
    size, q = spec.size, arrays["q"]
    blocks = {"q": _query_tile, "d_out": _query_tile, "k": _all_keys, "v": _all_keys}
    blocks |= {"lse": _per_query, "delta": _per_query}
    inputs = {n: (arrays[n], block(spec)) for n, block in blocks.items()}
    (dq,) = _call(
        dq_kernel,
        "attention_dq",
        (pl.cdiv(size.q_len, spec.q), size.heads, size.batch),
        spec,
        launch,
        inputs | _extra_inputs(spec, extras, "q"),
        [(out_struct(q.shape, q.dtype, q), _query_tile(spec))],
        products=3,
    )
    return dq


def _dkv(spec: Spec, launch: Launch, arrays: dict[str, Array], extras: Extras) -> tuple[Array, Array]:
    size, k = spec.size, arrays["k"]
    tile = pl.BlockSpec((None, spec.kv, None, spec.head_dim), lambda j, h, b: (b, j, h, 0))
    queries = pl.BlockSpec((None, size.q_len, size.group, spec.head_dim), lambda j, h, b: (b, 0, h, 0))
    per_query = pl.BlockSpec((None, size.group, size.q_len), lambda j, h, b: (b, h, 0))
    blocks = {"q": queries, "d_out": queries, "k": tile, "v": tile, "lse": per_query, "delta": per_query}
    return _call(
        dkv_kernel,
        "attention_dkv",
        (pl.cdiv(size.kv_len, spec.kv), size.kv_heads, size.batch),
        spec,
        launch,
        {n: (arrays[n], block) for n, block in blocks.items()} | _extra_inputs(spec, extras, "kv"),
        [(out_struct(k.shape, k.dtype, k), tile)] * 2,
        products=4,
    )


def _dbias(spec: Spec, launch: Launch, arrays: dict[str, Array], extras: Extras) -> Array:
    size, bias = spec.size, extras.bias
    rows, heads = spec.bias
    queries = pl.BlockSpec((size.batch, spec.q, size.heads, spec.head_dim), lambda i, j, n: (0, i, 0, 0))
    keys = pl.BlockSpec((size.batch, spec.kv, size.kv_heads, spec.head_dim), lambda i, j, n: (0, j, 0, 0))
    per_query = pl.BlockSpec((size.batch, size.heads, spec.q), lambda i, j, n: (0, 0, i))
    tile = pl.BlockSpec((None, None, spec.q, spec.kv), lambda i, j, n: (n // heads, n % heads, i, j))
    blocks = {"q": queries, "d_out": queries, "k": keys, "v": keys, "lse": per_query, "delta": per_query}
    inputs = {n: (arrays[n], block) for n, block in blocks.items()} | {"bias": (bias, tile)}
    if extras.q_offset is not None:
        inputs["q_offset"] = (extras.q_offset.reshape(1), pl.BlockSpec((1,), lambda i, j, n: (0,)))
    for name in ("q_lengths", "kv_lengths"):
        if (x := getattr(extras, name)) is not None:
            inputs[name] = (x.astype(jnp.int32), pl.BlockSpec((size.batch,), lambda i, j, n: (0,)))
    if extras.q_segment_ids is not None:
        q_ids, kv_ids = extras.q_segment_ids.astype(jnp.int32), extras.kv_segment_ids.astype(jnp.int32)
        inputs["q_segment_ids"] = (q_ids, pl.BlockSpec((size.batch, spec.q), lambda i, j, n: (0, i)))
        inputs["kv_segment_ids"] = (kv_ids, pl.BlockSpec((size.batch, spec.kv), lambda i, j, n: (0, j)))
    (dbias,) = _call(
        dbias_kernel,
        "attention_dbias",
        (pl.cdiv(size.q_len, spec.q), pl.cdiv(size.kv_len, spec.kv), rows * heads),
        spec,
        launch,
        inputs,
        [(out_struct(bias.shape, bias.dtype, bias), tile)],
        products=2,
    )
    return dbias
