"""Forward pass of the gated delta rule on TPU: the state stays in VMEM while the chunks of a sequence pass by.

The grid runs over (batch, key head, block of tokens). A step works on all chunks of its block for all value heads that
read the key head: first what does not depend on the state, for all of them at once, then chunk after chunk the state.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention.options import out_struct
from shardzoo.kernels.flash_attention.tpu_tiles import transposed, without_rows_from
from shardzoo.kernels.gated_delta.tpu_chunk import CHUNK, Decays, decays, inverses, places, product, widened
from shardzoo.kernels.gated_delta.tpu_layout import Arrays, Plan, block_specs
from shardzoo.kernels.outline import body_of


class Chunk(NamedTuple):
    """What of one chunk and value head does not depend on the state."""

    decays: Decays
    solve: Float[Array, "chunk chunk"]  # (I + L)^-1
    put: Float[Array, "key_dim chunk"]  # (k d_last beta)^T
    look: Float[Array, "chunk chunk"] | None  # (q . k) d beta, scaled


class Step:
    """One grid step of the forward pass; the backward pass starts with the same."""

    def __init__(self, plan: Plan, q: Any, k: Any, v: Any, gates: Any, block: Any):
        self.plan, self.block = plan, block
        self.q, self.k, self.v, self.gates = q, k, v, gates

    def rows(self, ref: Any, chunk: int, lanes: slice) -> Array:
        """The tokens of a chunk, zeros beyond the end of the sequence."""
        x = ref[chunk * CHUNK : (chunk + 1) * CHUNK, lanes]
        if not self.plan.tail:
            return x
        return without_rows_from(x, self.block * self.plan.tokens + chunk * CHUNK, self.plan.seq)

    def keys(self, chunk: int, head: int) -> Array:
        return self.rows(self.k, chunk, self.key_lanes(head))

    def queries(self, chunk: int, head: int) -> Array:
        return self.rows(self.q, chunk, self.key_lanes(head))

    def values(self, chunk: int, head: int) -> Array:
        return self.rows(self.v, chunk, self.value_lanes(head)).astype(jnp.float32)

    def key_lanes(self, head: int) -> slice:
        """Those of the key head that a value head of this step reads."""
        at = head // self.plan.group * self.plan.key_dim
        return slice(at, at + self.plan.key_dim)

    def value_lanes(self, head: int) -> slice:
        return slice(head * self.plan.value_dim, (head + 1) * self.plan.value_dim)

    def log_decay(self, chunk: int, head: int) -> Float[Array, "1 chunk"]:
        return self.gates[head : head + 1, chunk * CHUNK : (chunk + 1) * CHUNK]

    def beta(self, chunk: int, head: int) -> Float[Array, "1 chunk"]:
        return self.log_decay(chunk, self.plan.heads + head)

    def prepared(self, looks: bool) -> dict[tuple[int, int], Chunk]:
        """By chunk and value head; without `looks` no outputs are asked for."""
        plan = self.plan
        row, col = places()
        found, lowers, rest = [], [], []
        for chunk in range(plan.chunks):
            for head in range(plan.heads):
                if head % plan.group == 0:
                    k = self.keys(chunk, head)
                    overlap = product(k, k, 1, 1, low=plan.low)
                    seen = product(self.queries(chunk, head), k, 1, 1, low=plan.low) * plan.scale if looks else None
                    turned = transposed(k)
                beta, d = self.beta(chunk, head), decays(self.log_decay(chunk, head))
                lowers.append(jnp.where(row > col, overlap * d.between, 0.0) * beta)
                put = turned.astype(jnp.float32) * (d.between[CHUNK - 1 :] * beta)
                rest.append((d, plan.rounded(put), plan.rounded(seen * d.between * beta) if looks else None))
                found.append((chunk, head))
        solved = inverses(lowers, low=plan.low)
        chunks = [Chunk(d, plan.rounded(t), put, look) for (d, put, look), t in zip(rest, solved, strict=True)]
        return dict(zip(found, chunks, strict=True))

    def advance(
        self, ready: Chunk, chunk: int, head: int, state: Array, looks: bool
    ) -> tuple[Float[Array, "key_dim value_dim"], Float[Array, "chunk value_dim"] | None]:
        """The state after a chunk and its outputs."""
        plan, since = self.plan, widened(ready.decays.since, self.plan.value_dim)
        readers = self.keys(chunk, head)
        if looks:
            readers = jnp.concatenate([readers, self.queries(chunk, head)], axis=0)
        read = product(readers, state, low=plan.low)
        added = product(ready.solve, self.values(chunk, head) - since * read[:CHUNK], low=plan.low)
        out = None
        if looks:
            out = product(ready.look, added, low=plan.low) + (since * plan.scale) * read[CHUNK:]
        return since[CHUNK - 1 :] * state + product(ready.put, added, low=plan.low), out


def _kernel(q: Any, k: Any, v: Any, gates: Any, first: Any, out: Any, last: Any, state: Any, *, plan: Plan) -> None:
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _start() -> None:
        state[...] = first[...]

    step = Step(plan, q, k, v, gates, block)
    ready = step.prepared(looks=True)
    states = [state[head] for head in range(plan.heads)]
    for chunk in range(plan.chunks):
        for head in range(plan.heads):
            states[head], seen = step.advance(ready[chunk, head], chunk, head, states[head], looks=True)
            out[chunk * CHUNK : (chunk + 1) * CHUNK, step.value_lanes(head)] = seen.astype(out.dtype)
    for head in range(plan.heads):
        state[head] = states[head]

    @pl.when(block == plan.blocks - 1)
    def _finish() -> None:
        last[...] = state[...]


def run(plan: Plan, x: Arrays, out_dtype: jnp.dtype) -> tuple[Array, Array]:
    """Outputs (batch, seq, heads * value_dim) and final states, as `x.state`."""
    specs = block_specs(plan)
    return pl.pallas_call(
        body_of(functools.partial(_kernel, plan=plan)),
        grid=plan.grid,
        in_specs=[specs.keys, specs.keys, specs.values, specs.gates, specs.state],
        out_specs=[specs.values, specs.state],
        out_shape=[out_struct(x.v.shape, out_dtype, x.v), out_struct(x.state.shape, jnp.float32, x.v)],
        scratch_shapes=[pltpu.VMEM((plan.heads, plan.key_dim, plan.value_dim), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=plan.cost(x, products=5, moved=x.v.size * jnp.dtype(out_dtype).itemsize + 4 * x.state.size),
        name="gated_delta_forward",
    )(x.q, x.k, x.v, x.gates, x.state)
