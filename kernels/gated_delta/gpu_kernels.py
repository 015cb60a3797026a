"""The bodies of the gated delta rule's Pallas kernels for NVIDIA GPUs (Triton back end); formulas as in `chunked`.

Betas scale columns, as in the TPU kernels (`tpu_chunk`): a chunk adds x = beta y with y = (I + L)^-1 (v - p (k . S)),
L = (k . k) d beta below the diagonal. The gradients are those that `tpu_backward` writes down. All sizes are powers of
two and all arrays whole chunks long: the caller has filled them up.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

# Stands for a log decay of -inf: its exponential is 0 as well, and 0 times it is no NaN.
_NEVER = -1e30


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is known when a kernel is traced: sizes, and whether operands of products are rounded to bfloat16."""

    chunk: int
    chunks: int
    group: int
    key_dim: int
    value_dim: int
    columns: int  # of values and of the state that one program works on
    scale: float
    low: bool


def product(
    spec: Spec, a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False
) -> Float[Array, "rows columns"]:
    """A product summed in float32, of operands rounded to bfloat16 or with all their bits."""
    if spec.low:
        return plgpu.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), trans_a=trans_a, trans_b=trans_b)
    return exact_product(a.astype(jnp.float32), b.astype(jnp.float32), trans_a=trans_a, trans_b=trans_b)


def exact_product(a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False) -> Float[Array, "rows columns"]:
    """A product of float32 operands, not rounded to TF32."""
    return plgpu.dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=lax.Precision.HIGHEST)


def _places(size: int) -> tuple[Array, Array]:
    place = jnp.arange(size)
    return place[:, None], place[None, :]


class Since(NamedTuple):
    """Decays between a token and the ends of its chunk, and over the whole chunk."""

    start: Float[Array, " chunk"]  # p: from before the chunk to the token
    end: Float[Array, " chunk"]  # d_last: from after the token to the end
    whole: Float[Array, ""]


def since(spec: Spec, log_decay: Float[Array, " chunk"]) -> Since:
    """Each is the exponential of a sum of its own."""
    row, col = _places(spec.chunk)
    start = jnp.sum(jnp.where(row >= col, log_decay[None, :], 0.0), axis=1)
    end = jnp.sum(jnp.where(row > col, log_decay[:, None], 0.0), axis=0)
    return Since(jnp.exp(start), jnp.exp(end), jnp.exp(jnp.sum(log_decay)))


def between(spec: Spec, log_decay: Float[Array, " chunk"]) -> Float[Array, "chunk chunk"]:
    """d_ij from after token j to token i, 0 for j > i: sums of the terms below j alone, by a product with ones."""
    row, col = _places(spec.chunk)
    terms = jnp.where(row > col, jnp.maximum(log_decay, _NEVER)[:, None], 0.0)
    sums = exact_product(jnp.where(row >= col, 1.0, 0.0), terms)
    return jnp.where(row >= col, jnp.exp(sums), 0.0)


def inverse(spec: Spec, lower: Float[Array, "chunk chunk"]) -> Float[Array, "chunk chunk"]:
    """(I + L)^-1 by block doubling (see `inverse`); beside bfloat16 operands it is corrected once, to about 16 bits."""
    row, col = _places(spec.chunk)
    apart = row ^ col  # for i > j in [b, 2b) where a block of size 2b holds the pair and blocks of size b do not
    identity = jnp.where(row == col, 1.0, 0.0)
    found, block = identity - jnp.where(apart == 1, lower, 0.0), 2
    while block < spec.chunk:
        joins = jnp.where((apart >= block) & (apart < 2 * block), lower, 0.0)
        found -= product(spec, found, product(spec, joins, found))
        block *= 2
    if not spec.low:
        return found
    found = found.astype(jnp.bfloat16).astype(jnp.float32)
    high = lower.astype(jnp.bfloat16).astype(jnp.float32)
    left = identity - found - product(spec, high, found) - product(spec, lower - high, found)
    return found + product(spec, found, left)


def prepare_kernel(spec: Spec, x: dict, solve_ref, look_ref) -> None:
    """(I + L)^-1 and scale (q . k) d beta of one chunk and head."""
    row, col = _places(spec.chunk)
    q, k, beta = x["q"][...], x["k"][...], x["beta"][...]
    d = between(spec, x["log_decay"][...])
    lower = jnp.where(row > col, product(spec, k, k, trans_b=True) * d, 0.0) * beta[None, :]
    solve_ref[...] = inverse(spec, lower).astype(solve_ref.dtype)
    look = product(spec, q, k, trans_b=True) * d * (beta * spec.scale)[None, :]
    look_ref[...] = look.astype(look_ref.dtype)


class _Tokens:
    """The tokens of chunk n, read from strips of the whole length."""

    def __init__(self, spec: Spec, x: dict, n: Array):
        self.spec, self.x, self.n = spec, x, n
        self.at = pl.ds(n * spec.chunk, spec.chunk)

    def rows(self, name: str) -> Array:
        return self.x[name][self.at, :]

    def line(self, name: str) -> Float[Array, " chunk"]:
        return self.x[name][self.at]

    def pairs(self, name: str) -> Float[Array, "chunk chunk"]:
        return self.x[name][self.n]


def scan_kernel(spec: Spec, x: dict, out_ref, last_ref, *kept) -> None:
    """Chunk after chunk, columns of one head: outputs and final state; kept: the state before each chunk, and y."""

    def step(n: Array, state: Array) -> Array:
        t = _Tokens(spec, x, n)
        k, s = t.rows("k"), since(spec, t.line("log_decay"))
        wanted = t.rows("v").astype(jnp.float32) - s.start[:, None] * product(spec, k, state)
        added = product(spec, t.pairs("solve"), wanted)
        if kept:
            before_ref, added_ref = kept
            before_ref[n] = state
            added_ref[t.at, :] = added.astype(added_ref.dtype)
        seen = (s.start * spec.scale)[:, None] * product(spec, t.rows("q"), state)
        out_ref[t.at, :] = (seen + product(spec, t.pairs("look"), added)).astype(out_ref.dtype)
        put = k.astype(jnp.float32) * (s.end * t.line("beta"))[:, None]
        return s.whole * state + product(spec, put, added, trans_a=True)

    last_ref[...] = lax.fori_loop(0, spec.chunks, step, x["state"][...])


def chain_kernel(spec: Spec, x: dict, d_values_ref, after_ref, d_first_ref) -> None:
    """From the last chunk to the first: the gradient of values, and of the state after each chunk and before all."""

    def step(turn: Array, after: Array) -> Array:
        n = spec.chunks - 1 - turn
        t = _Tokens(spec, x, n)
        k, s = t.rows("k"), since(spec, t.line("log_decay"))
        after_ref[n] = after
        d_out = t.rows("d_out").astype(jnp.float32)
        put = k.astype(jnp.float32) * (s.end * t.line("beta"))[:, None]
        d_added = product(spec, t.pairs("look"), d_out, trans_a=True) + product(spec, put, after)
        d_values = product(spec, t.pairs("solve"), d_added, trans_a=True)
        d_values_ref[t.at, :] = d_values.astype(d_values_ref.dtype)
        before = product(spec, t.rows("q"), (s.start * spec.scale)[:, None] * d_out, trans_a=True)
        return s.whole * after + before - product(spec, k, s.start[:, None] * d_values, trans_a=True)

    d_first_ref[...] = lax.fori_loop(0, spec.chunks, step, x["d_last"][...])


def gradients_kernel(spec: Spec, x: dict, d_q_ref, d_k_ref, d_log_ref, d_beta_ref) -> None:
    """Gradients of one chunk's queries, keys and gates, one after another over the value heads that read the keys."""
    row, col = _places(spec.chunk)
    q, k = x["q"][...], x["k"][...]
    overlap, seen = product(spec, k, k, trans_b=True), product(spec, q, k, trans_b=True) * spec.scale
    d_q, d_k = (jnp.zeros((spec.chunk, spec.key_dim), jnp.float32) for _ in range(2))
    d_overlap, d_seen = (jnp.zeros((spec.chunk, spec.chunk), jnp.float32) for _ in range(2))
    for head in range(spec.group):
        log_decay, beta = x["log_decay"][head, :], x["beta"][head, :]
        d, s = between(spec, log_decay), since(spec, log_decay)
        sums = _columns(spec, x, head, s)
        d_lower = jnp.where(row > col, -sums.values, 0.0) * d
        d_look = sums.outs * d
        both = d_lower * overlap + d_look * seen
        put = s.end * jnp.sum(k.astype(jnp.float32) * sums.put, axis=1)
        reads = jnp.sum(k.astype(jnp.float32) * sums.by_k + q.astype(jnp.float32) * sums.by_q, axis=1)
        d_beta = jnp.sum(both, axis=0) + put
        last = jnp.sum(beta * put) + s.whole * sums.state
        d_log = jnp.sum(both * beta[None, :], axis=1) + reads - beta * d_beta
        d_log_ref[head, :] = d_log + jnp.where(jnp.arange(spec.chunk) == spec.chunk - 1, last, 0.0)
        d_beta_ref[head, :] = d_beta
        d_q += sums.by_q
        d_k += sums.by_k + (s.end * beta)[:, None] * sums.put
        d_overlap += d_lower * beta[None, :]
        d_seen += d_look * (beta * spec.scale)[None, :]
    d_q_ref[...] = d_q + product(spec, d_seen, k)
    d_k += product(spec, d_overlap, k) + product(spec, d_overlap, k, trans_a=True)
    d_k_ref[...] = d_k + product(spec, d_seen, q, trans_a=True)


class _Sums(NamedTuple):
    """Sums over the columns of a head."""

    values: Float[Array, "chunk chunk"]  # dr . y
    outs: Float[Array, "chunk chunk"]  # d_out . y
    by_k: Float[Array, "chunk key_dim"]  # what k . S gives to k
    by_q: Float[Array, "chunk key_dim"]
    put: Float[Array, "chunk key_dim"]  # y . dS'
    state: Float[Array, ""]  # S . dS'


def _columns(spec: Spec, x: dict, head: int, s: Since) -> _Sums:
    total = None
    for first in range(0, spec.value_dim, spec.columns):
        at = pl.ds(first, spec.columns)
        added, d_values = (x[n][:, head, at].astype(jnp.float32) for n in ("added", "d_values"))
        d_out = x["d_out"][:, head, at].astype(jnp.float32)
        before, after = x["before"][head, :, at], x["after"][head, :, at]
        more = _Sums(
            values=product(spec, d_values, added, trans_b=True),
            outs=product(spec, d_out, added, trans_b=True),
            by_k=product(spec, -s.start[:, None] * d_values, before, trans_b=True),
            by_q=product(spec, (s.start * spec.scale)[:, None] * d_out, before, trans_b=True),
            put=product(spec, added, after, trans_b=True),
            state=jnp.sum(before * after),
        )
        total = more if total is None else _Sums(*(a + b for a, b in zip(total, more, strict=True)))
    return total
