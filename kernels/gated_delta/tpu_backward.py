"""Backward pass of the gated delta rule on TPU: two kernels over the same blocks of tokens as the forward pass.

The first runs the recurrence again and keeps the state before each block. The second goes through the blocks from the
last to the first with the gradient of the state in VMEM; in each it computes what the forward pass did, then its
gradients. With y = (I + L)^-1 r for r = v - p (k . S), out = scale p (q . S) + look . y and S' = p_last S + put . y
(look = scale (q . k) d beta and put = (k d_last beta)^T, see `tpu_forward`), and with d of a name its gradient,

    dy = look^T . d_out + put^T . dS'
    dr = (I + L)^-T . dy                           = dv
    dS = p_last dS' - k^T . (p dr) + scale q^T . (p d_out)
    dL = -dr . y^T    d_look = d_out . y^T         below the diagonal, and on it for look

Decays and betas meet the loss only through products with them, so their gradients are sums of elements of
Z = dL (k . k) d + d_look scale (q . k) d: betas get the sums of its columns, log decays differences of sums of rows and
columns of Z beta, of each token and all after it. `gate_gradients` adds up what comes after.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import out_struct
from shardzoo.kernels.flash_attention.tpu_tiles import transposed
from shardzoo.kernels.gated_delta.tpu_chunk import CHUNK, LANES, column, places, product, widened
from shardzoo.kernels.gated_delta.tpu_forward import Chunk, Step
from shardzoo.kernels.gated_delta.tpu_layout import Arrays, Plan, block_specs
from shardzoo.kernels.outline import body_of


class Gradients(NamedTuple):
    """Of `Arrays`, in their layout; of gates what `gate_gradients` takes."""

    q: Float[Array, "batch seq key_lanes"]
    k: Float[Array, "batch seq key_lanes"]
    v: Float[Array, "batch seq value_lanes"]
    gates: Float[Array, "batch head_blocks rows tokens"]
    state: Float[Array, "batch heads key_dim value_dim"]


def _states_kernel(q: Any, k: Any, v: Any, gates: Any, first: Any, before: Any, state: Any, *, plan: Plan) -> None:
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _start() -> None:
        state[...] = first[...]

    before[...] = state[...]
    step = Step(plan, q, k, v, gates, block)
    ready = step.prepared(looks=False)
    states = [state[head] for head in range(plan.heads)]
    for chunk in range(plan.chunks):
        for head in range(plan.heads):
            states[head], _ = step.advance(ready[chunk, head], chunk, head, states[head], looks=False)
    for head in range(plan.heads):
        state[head] = states[head]


def states(plan: Plan, x: Arrays) -> Float[Array, "batch blocks heads key_dim value_dim"]:
    """The state before each block of tokens."""
    specs = block_specs(plan)
    shape = (plan.batch, plan.blocks, *x.state.shape[1:])
    return pl.pallas_call(
        body_of(functools.partial(_states_kernel, plan=plan)),
        grid=plan.grid,
        in_specs=[specs.keys, specs.keys, specs.values, specs.gates, specs.state],
        out_specs=specs.states,
        out_shape=out_struct(shape, jnp.float32, x.v),
        scratch_shapes=[pltpu.VMEM((plan.heads, plan.key_dim, plan.value_dim), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=plan.cost(x, products=4, moved=4 * plan.blocks * x.state.size),
        name="gated_delta_states",
    )(x.q, x.k, x.v, x.gates, x.state)


class _Again(NamedTuple):
    """What the forward pass had of one chunk and value head."""

    state: Float[Array, "key_dim value_dim"]  # before the chunk
    read: Float[Array, "twice_chunk value_dim"]  # k . S, then q . S
    added: Float[Array, "chunk value_dim"]  # y


@dataclass
class _KeyHead:
    """Gradients of one chunk's queries and keys, added up over the value heads that read them."""

    overlap: Any = 0.0
    seen: Any = 0.0
    q: Any = 0.0
    k: Any = 0.0


class _Backward(Step):
    """One grid step of the second kernel."""

    def __init__(self, plan: Plan, q: Any, k: Any, v: Any, gates: Any, d_out: Any, block: Any):
        super().__init__(plan, q, k, v, gates, block)
        self.d_out = d_out

    def forward(self, ready: dict[tuple[int, int], Chunk], before: Any) -> dict[tuple[int, int], _Again]:
        """By chunk and value head, from the states before the block."""
        plan, found = self.plan, {}
        states = [before[head] for head in range(plan.heads)]
        for chunk in range(plan.chunks):
            for head in range(plan.heads):
                it, state = ready[chunk, head], states[head]
                since = widened(it.decays.since, plan.value_dim)
                readers = jnp.concatenate([self.keys(chunk, head), self.queries(chunk, head)], axis=0)
                read = product(readers, state, low=plan.low)
                added = product(it.solve, self.values(chunk, head) - since * read[:CHUNK], low=plan.low)
                found[chunk, head] = _Again(state, read, added)
                if chunk + 1 < plan.chunks:
                    states[head] = since[CHUNK - 1 :] * state + product(it.put, added, low=plan.low)
        return found

    def head(
        self, it: Chunk, had: _Again, chunk: int, head: int, after: Array, keys: _KeyHead, turned: Array
    ) -> tuple[Array, Array, Array]:
        """(dv, d_gates: two rows, dS) of a value head; adds to what its key head gets. after: dS'."""
        plan, low = self.plan, self.plan.low
        row, col = places()
        since = widened(it.decays.since, plan.value_dim)
        d_out = self.rows(self.d_out, chunk, self.value_lanes(head)).astype(jnp.float32)
        d_added = product(it.look, d_out, 0, 0, low=low) + product(it.put, after, 0, 0, low=low)
        d_values = product(it.solve, d_added, 0, 0, low=low)
        # What reads the state: k . S with -p dr, q . S with scale p d_out.
        d_read = jnp.concatenate([-since * d_values, (since * plan.scale) * d_out], axis=0)
        before = since[CHUNK - 1 :] * after + product(turned, d_read, low=low)
        d_readers = product(d_read, had.state, 1, 1, low=low)
        beta, between = self.beta(chunk, head), it.decays.between
        d_put = product(had.added, after, 1, 1, low=low)
        key = self.keys(chunk, head).astype(jnp.float32)
        keys.k += d_readers[:CHUNK] + widened(column(between[CHUNK - 1 :] * beta), plan.key_dim) * d_put
        keys.q += d_readers[CHUNK:]
        d_lower = jnp.where(row > col, -product(d_values, had.added, 1, 1, low=low), 0.0) * between
        d_look = product(d_out, had.added, 1, 1, low=low) * between
        both = d_lower * self.overlap[chunk, head // plan.group] + d_look * self.seen[chunk, head // plan.group]
        keys.overlap += d_lower * beta
        keys.seen += d_look * beta
        put = between[CHUNK - 1 :] * _rows_sum(key * d_put)
        d_beta = jnp.sum(both, axis=0, keepdims=True) + put
        reads = _folded(d_read * had.read)
        later = both * beta + reads[:CHUNK] + reads[CHUNK:]
        state = jnp.sum(_folded(jnp.sum(had.state * after, axis=0, keepdims=True)), axis=1, keepdims=True)
        last = jnp.sum(beta * put, axis=1, keepdims=True) + it.decays.since[CHUNK - 1 :, :1] * state
        lanes = lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1)
        d_log = _rows_sum(later) - beta * d_beta + jnp.where(lanes == CHUNK - 1, last, 0.0)
        return d_values, jnp.concatenate([d_log, d_beta], axis=0), before

    def prepared(self, looks: bool) -> dict[tuple[int, int], Chunk]:
        plan = self.plan
        self.overlap, self.seen = {}, {}
        for chunk in range(plan.chunks):
            for n in range(plan.together):
                q, k = self.queries(chunk, n * plan.group), self.keys(chunk, n * plan.group)
                self.overlap[chunk, n] = product(k, k, 1, 1, low=plan.low)
                self.seen[chunk, n] = product(q, k, 1, 1, low=plan.low) * plan.scale
        return super().prepared(looks)

    def finish(self, chunk: int, n: int, keys: _KeyHead) -> tuple[Array, Array]:
        """(dq, dk) of a key head."""
        plan = self.plan
        q, k = self.queries(chunk, n * plan.group), self.keys(chunk, n * plan.group)
        seen = keys.seen * plan.scale
        pairs = jnp.concatenate([keys.overlap + keys.overlap.T, seen.T], axis=1)
        d_k = keys.k + product(pairs, jnp.concatenate([k, q], axis=0), low=plan.low)
        return keys.q + product(seen, k, low=plan.low), d_k


def _folded(x: Float[Array, "rows width"]) -> Float[Array, "rows lanes"]:
    """Blocks of lanes added up."""
    return sum(x[:, n : n + LANES] for n in range(0, x.shape[1], LANES))


def _rows_sum(x: Float[Array, "chunk width"]) -> Float[Array, "1 chunk"]:
    """The sum of each row, in lanes."""
    return jnp.sum(_folded(x).T, axis=0, keepdims=True)


def _kernel(*refs: Any, plan: Plan) -> None:
    q, k, v, gates, before, d_out, d_last, d_q, d_k, d_v, d_gates, d_first, d_state = refs
    turn = pl.program_id(2)

    @pl.when(turn == 0)
    def _start() -> None:
        d_state[...] = d_last[...]

    step = _Backward(plan, q, k, v, gates, d_out, plan.blocks - 1 - turn)
    ready = step.prepared(looks=True)
    had = step.forward(ready, before)
    after = [d_state[head] for head in range(plan.heads)]
    for chunk in reversed(range(plan.chunks)):
        tokens = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        for n in range(plan.together):
            keys, first = _KeyHead(), n * plan.group
            turned = jnp.concatenate(
                [transposed(step.keys(chunk, first)), transposed(step.queries(chunk, first))], axis=1
            )
            for head in range(first, first + plan.group):
                values, two, after[head] = step.head(
                    ready[chunk, head], had[chunk, head], chunk, head, after[head], keys, turned
                )
                d_v[tokens, step.value_lanes(head)] = values.astype(d_v.dtype)
                d_gates[head : head + 1, tokens] = two[:1]
                d_gates[plan.heads + head : plan.heads + head + 1, tokens] = two[1:]
            for ref, value in zip((d_q, d_k), step.finish(chunk, n, keys), strict=True):
                ref[tokens, step.key_lanes(first)] = value.astype(ref.dtype)
    for head in range(plan.heads):
        d_state[head] = after[head]

    @pl.when(turn == plan.blocks - 1)
    def _finish() -> None:
        d_first[...] = d_state[...]


def run(
    plan: Plan,
    x: Arrays,
    before: Float[Array, "batch blocks heads key_dim value_dim"],
    d_out: Float[Array, "batch seq value_lanes"],
    d_last: Float[Array, "batch heads key_dim value_dim"],
    dtypes: tuple[jnp.dtype, jnp.dtype, jnp.dtype],
) -> Gradients:
    """From the states before each block and the gradients of the results; `dtypes` of those of q, k and v."""
    specs = block_specs(plan, backwards=True)
    kinds = [specs.keys, specs.keys, specs.values, specs.gates, specs.state]
    shapes = [*((a.shape, dtype) for a, dtype in zip(x[:3], dtypes, strict=True)), (x.gates.shape, jnp.float32)]
    structs = [out_struct(shape, dtype, x.v) for shape, dtype in [*shapes, (x.state.shape, jnp.float32)]]
    written = sum(s.size * s.dtype.itemsize for s in structs)
    found = pl.pallas_call(
        body_of(functools.partial(_kernel, plan=plan)),
        grid=plan.grid,
        in_specs=[*kinds[:4], specs.states, specs.values, specs.state],
        out_specs=kinds,
        out_shape=structs,
        scratch_shapes=[pltpu.VMEM((plan.heads, plan.key_dim, plan.value_dim), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=plan.cost(x, products=17, moved=written + d_out.size * d_out.dtype.itemsize + 4 * before.size),
        name="gated_delta_backward",
    )(*x[:4], before, d_out, d_last)
    return Gradients(*found)


def gate_gradients(plan: Plan, gates: Float[Array, "batch head_blocks rows tokens"]) -> tuple[Array, Array]:
    """Of log decays and of betas, each (batch, seq, heads), from what the kernel writes.

    A log decay acts on all that comes after it: its gradient is a sum over the rest of its chunk, whose last tokens may
    lie beyond the end of the sequence.
    """
    log_decay, beta = jnp.split(gates, 2, axis=2)
    by_chunk = log_decay.reshape(*log_decay.shape[:3], -1, CHUNK)
    log_decay = lax.cumsum(by_chunk, axis=4, reverse=True).reshape(beta.shape)
    return tuple(
        jnp.moveaxis(x, 3, 1).reshape(plan.batch, -1, plan.key_heads * plan.group)[:, : plan.seq]
        for x in (log_decay, beta)
    )
