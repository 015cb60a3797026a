"""Pipeline parallelism: the stacked layers split over `pipe`, microbatches passed from stage to stage.

Everything but `interleaved`, `as_declared` and the checks runs inside a model's own `shard_map`; shapes are one
device's. A model gives a `stage`, which runs a chunk of its layers, and calls `through` round it: a `lax.scan` over the
ticks of a schedule (`schedule.py`), each with one collective-permute to the next stage. JAX differentiates that: the
backward pass goes through the same ticks in reverse, which is GPipe. `pipeline_gradients` has the schedule "1f1b".

All devices run one program: an idle place computes on what lies there and its result is dropped.

What stands before and after the layers is on every stage: the vocabulary is split over `pipe` as well as over the
tensor axes, so that no stage holds tables that the others wait for. The stream after the last stage goes to all of
them by one all-reduce over `pipe`, and each computes its part of the logits.
"""

import dataclasses
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from shardzoo.errors import InputError, fail_if
from shardzoo.kernels.flash_attention.options import manual_axes, varying_like, varying_over
from shardzoo.zoo import layout
from shardzoo.zoo.layout import LAYER, ROUND
from shardzoo.zoo.mesh import DATA, PIPE
from shardzoo.zoo.schedule import IDLE, Schedule, Work, bubble, schedule

__all__ = [
    "as_declared",
    "bubble",
    "check_microbatches",
    "interleaved",
    "layers_of",
    "microbatches_for",
    "relay",
    "rounds_of",
    "schedule",
    "through",
]

Tree = TypeVar("Tree")
Rows = dict[str, Array]  # arrays whose first dim is the rows of the batch
Stage = Callable[[Any, Array, Rows, Array | int], tuple[Array, Any]]


def interleaved(declared: Tree, rounds: int) -> Tree:
    """The declaration with its layers in several rounds over the stages: [layer, ...] becomes [round, layer, ...].

    Stage s then holds the s-th part of each round, and a microbatch passes the stages once for each: the bubble shrinks
    from (stages - 1) / (microbatches + stages - 1) to (stages - 1) / (rounds * microbatches + stages - 1), for as many
    more transfers. `as_declared` brings a live model to this form and back; splits at rest and quantization come first.

    Raises:
        InputError: a number of layers that does not divide by the rounds.
    """
    stacked = {p: q for p, q in layout.named(declared).items() if q.names[:1] == (LAYER,)}
    problems = {f"layer={q.shape[0]}" for q in stacked.values() if rounds < 1 or q.shape[0] % rounds}
    fail_if([f"{p} does not divide by rounds={rounds}: change the rounds" for p in sorted(problems)], "interleaved")
    fail_if([] if stacked else ["this model has no stacked layers, or has them in rounds already"], "interleaved")

    def one(p: layout.Param) -> layout.Param:
        if p.names[:1] != (LAYER,) or rounds == 1:
            return p
        return dataclasses.replace(p, dims=f"{ROUND} {p.dims}", shape=(rounds, p.shape[0] // rounds, *p.shape[1:]))

    return jax.tree.map(one, declared)


def as_declared(live: Tree, declared: Any, mesh: Mesh) -> Tree:
    """A live model in the form of another declaration of the same values, such as `interleaved` or the plain one.

    Both directions are a reshape; the layers change their devices.
    """
    shardings = jax.tree.map(lambda p: p.sharding(mesh), declared)
    shapes = [p.shape for p in jax.tree.leaves(declared)]

    def change(live: Tree) -> Tree:
        leaves, form = jax.tree.flatten(live)
        return jax.tree.unflatten(form, [x.reshape(shape) for x, shape in zip(leaves, shapes, strict=True)])

    return jax.jit(change, out_shardings=shardings)(live)


def rounds_of(declared: Any) -> int:
    """How many rounds over the stages a declaration has its layers in."""
    return next((p.shape[0] for p in jax.tree.leaves(declared) if p.names[:1] == (ROUND,)), 1)


def layers_of(blocks: Any, rounds: int) -> int:
    """How many layers a live stack holds."""
    shape = jax.tree.leaves(blocks)[0].shape
    return shape[0] if rounds == 1 else shape[0] * shape[1]


def check_microbatches(what: str, microbatches: object) -> None:
    """Refuses microbatches that are no whole number of at least one; `what` is asked for them.

    Raises:
        InputError: as said.
    """
    if microbatches is None:
        return
    if not isinstance(microbatches, Integral) or isinstance(microbatches, bool):
        raise InputError(f"{what}: microbatches={microbatches!r} is not a whole number: change it")
    if microbatches < 1:
        raise InputError(f"{what}: microbatches={microbatches} is not at least 1: change it")


def microbatches_for(asked: int | None, mesh: Mesh | AbstractMesh, batch: int) -> int:
    """Into how many microbatches each device's rows are cut: as asked, else one for each stage, as far as rows go."""
    return asked or max(1, min(mesh.shape[PIPE], -(-batch // mesh.shape[DATA])))


def through(
    stage: Stage, blocks: Any, x: Float[Array, "batch seq embed"], rows: Rows, *, microbatches: int = 1, rounds: int = 1
) -> tuple[Float[Array, "batch seq embed"], Any]:
    """The stream after all layers, and what they keep, the same on every device of `pipe`.

    `stage(blocks, x, rows, first)` runs one chunk of layers for one microbatch: it is given their stacked weights, the
    stream, those rows of `rows`, and the number of its first layer in the model. It returns the stream, and a tree of
    what its layers keep, [.., batch, ...] with the rows in the second dim and zeros for other layers (None: nothing).

    Collectives beside those of the stages: with more than one stage one collective-permute over `pipe` a tick, and one
    all-reduce over it at the end.
    """
    stages, me = lax.axis_size(PIPE), lax.axis_index(PIPE)
    x = varying_over(x, frozenset({PIPE}))
    if stages == 1:
        blocks, rounds = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), blocks) if rounds > 1 else blocks, 1
    if stages * microbatches == 1:
        return lax.psum(stage(blocks, x, rows, 0), PIPE)  # of one device: tells the type, moves nothing
    plan = schedule(stages, microbatches, rounds)
    # Weights that are equal on devices with other rows get their gradients summed once, not at every tick.
    blocks = varying_over(blocks, manual_axes(x))
    x, rows = cut(x, microbatches), jax.tree.map(lambda a: cut(a, microbatches), rows)
    entering = x[np.maximum(plan.forward.microbatch[:, 0], 0)]

    def tick(arrived: Array, inputs: tuple[Work, Array]) -> tuple[Array, tuple[Array, Any]]:
        at, own = of_stage(inputs[0]), inputs[1]
        fed = jnp.where((me == 0) & (at.round == 0), own, arrived)
        chunk, first = chunk_of(blocks, at.round, rounds)
        y, kept = stage(chunk, fed, pick(rows, at.microbatch), first)
        return send(y, rounds), (y, kept)

    _, (y, kept) = lax.scan(tick, zeros(x[0]), (Work(*map(jnp.asarray, plan.forward)), entering))
    done = _ticks_of(plan)
    y = on_all(y[done[-1, -1]])
    kept = lax.psum(jax.tree.map(lambda a: _joined(a[jnp.asarray(done)[:, me]]), kept), PIPE)
    return y.reshape(-1, *y.shape[2:]), kept


def zeros(x: Array) -> Array:
    """Zeros of the same type."""
    return varying_like(jnp.zeros(x.shape, x.dtype), x)


def cut(x: Array, microbatches: int) -> Array:
    """[batch, ...] -> [microbatch, row, ...]."""
    return x.reshape(microbatches, -1, *x.shape[1:])


def pick(tree: Tree, index: Array | int) -> Tree:
    """Element `index` of the first dim; an idle stage's -1 gives the first one."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, jnp.maximum(index, 0), keepdims=False), tree)


def of_stage(work: Work) -> Work:
    """This stage's part of a tick."""
    return Work(*(column[lax.axis_index(PIPE)] for column in work))


def chunk_of(blocks: Tree, turn: Array, rounds: int) -> tuple[Tree, Array]:
    """The weights of this stage's chunk of a round, and the number of its first layer in its model."""
    chunk = pick(blocks, turn) if rounds > 1 else blocks
    layers = jax.tree.leaves(chunk)[0].shape[0]
    return chunk, (jnp.maximum(turn, 0) * lax.axis_size(PIPE) + lax.axis_index(PIPE)) * layers


def send(x: Array, rounds: int, *, back: bool = False) -> Array:
    """x on the next stage, or on the one before: one collective-permute. With rounds the last sends to the first."""
    stages = lax.axis_size(PIPE)
    if stages == 1:
        return x
    pairs = [(i, (i + 1) % stages) for i in range(stages if rounds > 1 else stages - 1)]
    return lax.ppermute(x, PIPE, [pair[::-1] for pair in pairs] if back else pairs)


def on_all(x: Array) -> Array:
    """What the last stage has, on all of them: one all-reduce over `pipe`."""
    stages = lax.axis_size(PIPE)
    return lax.psum(x if stages == 1 else jnp.where(lax.axis_index(PIPE) == stages - 1, x, 0), PIPE)


def _ticks_of(plan: Schedule) -> Int[np.ndarray, "round stage microbatch"]:
    """When each stage runs the forward of a microbatch in each round."""
    ticks = np.zeros((plan.rounds, plan.stages, plan.microbatches), int)
    for (tick, stage), m in np.ndenumerate(plan.forward.microbatch):
        if m != IDLE:
            ticks[plan.forward.round[tick, stage], stage, m] = tick
    return ticks


def _joined(kept: Array) -> Array:
    """[round, microbatch, .., row, ...] -> [.., batch, ...]: each layer is in one round."""
    summed = jnp.moveaxis(kept.sum(axis=0), 0, 1)
    return summed.reshape(summed.shape[0], -1, *summed.shape[3:])


def relay(
    run: Callable[[Array, Tree, Array | None], tuple[Array, Tree]], x: Array, state: Tree
) -> tuple[Float[Array, "batch seq embed"], Tree]:
    """x through all stages, each with a state of its own: for generation. x comes back on every device of `pipe`.

    `run(x, state, here)` runs this stage's layers; what it writes into the state counts only where `here` (None: it
    does). Stages wait for each other: the time of all layers, with the memory of a stage's.

    Collectives: with more than one stage as many collective-permutes over `pipe` as stages, and one all-reduce over it.
    """
    stages, me = lax.axis_size(PIPE), lax.axis_index(PIPE)
    x = varying_over(x, frozenset({PIPE}))
    if stages == 1:
        x, state = run(x, state, None)
        return lax.psum(x, PIPE), state  # of one device: tells the type, moves nothing

    def tick(carry: tuple[Array, Tree], at: Array) -> tuple[tuple[Array, Tree], None]:
        x, state = carry
        x, state = run(x, state, at == me)
        return (send(x, rounds=2), state), None

    (x, state), _ = lax.scan(tick, (x, state), jnp.arange(stages))
    return lax.psum(jnp.where(me == 0, x, 0), PIPE), state  # the last stage has sent it to the first
