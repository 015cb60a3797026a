"""Loss and gradient by a schedule of forward and backward: "1f1b", in one or several rounds (`schedule.py`).

Differentiating a pipelined forward pass keeps what all microbatches need until the last one is through. Here each
microbatch goes back as soon as it has passed the last stage: a stage keeps the inputs of a bounded number of its chunks
and computes their layers again when their turn to go back comes. Gradients add up in float32 where they are.

The first and the last step of a microbatch, its embedding and its logits and loss, are done by all stages together, as
their tables are split over all of them.

    step = decoder.loss_and_grad(declared, mesh, microbatches=8)
    labels, counts = losses.next_tokens(tokens, lengths)
    loss, gradient = step(model, tokens, labels, counts, lengths=lengths)
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, jaxtyped

from shardzoo.errors import fail_if
from shardzoo.kernels.flash_attention.options import manual_axes, varying_like, varying_over
from shardzoo.zoo import layout, pipeline
from shardzoo.zoo.differences import is_shifted, without_gradient
from shardzoo.zoo.language_model import Host, Problems, pad, seq_ways_of
from shardzoo.zoo.layers import Residual
from shardzoo.zoo.mesh import CONTEXT, DATA, PIPE, VOCAB
from shardzoo.zoo.optimizer_state import trainable_part
from shardzoo.zoo.pipeline import Rows, Stage
from shardzoo.zoo.schedule import IDLE, Schedule, Work, schedule

Tree = TypeVar("Tree")
Loss = Callable[[Array, Array, Array], Array]


class Parts(NamedTuple):
    """What is needed of a family. The functions run inside a `shard_map`; shapes are one device's.

    Attributes:
        stacks: names of the model's stacked layers.
        enter: (model, rows, features) -> the stream before the layers, the same on every device of `pipe`.
        stage: as `pipeline.through` has it, keeping nothing; it is given the stacks by name.
        leave: (model, x) -> logits of this device's part of the vocabulary, from the stream after the layers.
    """

    stacks: tuple[str, ...]
    enter: Callable[[Any, Rows, Array | None], Array]
    stage: Stage
    leave: Callable[[Any, Array], Array]


def token_loss(
    logits: Float[Array, "rows seq vocab"], labels: Int[Array, "rows seq"], weights: Float[Array, "rows seq"]
) -> Float[Array, ""]:
    """The sum of weight * -log softmax(logits)[label], of logits split over VOCAB; float32 inside.

    Collectives: one all-reduce for the maxima and one for the sums, over `pipe` and the tensor axes.
    """
    wide = logits.astype(np.promote_types(logits.dtype, np.float32))
    top = lax.pmax(lax.stop_gradient(jnp.max(wide, axis=-1)), VOCAB)
    local = labels - lax.axis_index(VOCAB) * logits.shape[-1]
    chosen = jnp.where(jnp.arange(logits.shape[-1]) == local[..., None], wide, 0)
    total, chosen = lax.psum((jnp.sum(jnp.exp(wide - top[..., None]), axis=-1), jnp.sum(chosen, axis=-1)), VOCAB)
    return jnp.sum(weights * (jnp.log(total) + top - chosen))


class Carry(NamedTuple):
    """What a tick leaves to the next: what neighbours have sent, kept inputs, sums of gradients and of the loss."""

    forth: Float[Array, "row seq embed"]
    back: Float[Array, "row seq embed"]
    inputs: Float[Array, "slot row seq embed"]
    blocks: Any
    ends: Any
    loss: Float[Array, ""]


class Tick(NamedTuple):
    """What is done in a tick: by each stage, and by all of them together for one microbatch (-1: for none)."""

    forward: Work
    backward: Work
    enter: Int[Array, ""]
    turn: Int[Array, ""]
    leave: Int[Array, ""]


def ticks_of(plan: Schedule) -> Tick:
    """The tables of a schedule, each with a row for every tick."""
    count, last = len(plan.backward.microbatch), plan.stages - 1
    more = [(0, count - len(plan.forward.microbatch)), (0, 0)]
    forward = Work(*(np.pad(table, more, constant_values=IDLE) for table in plan.forward))

    def of(work: Work, stage: int, turn: int) -> Int[np.ndarray, " ticks"]:
        return np.where(work.round[:, stage] == turn, work.microbatch[:, stage], IDLE)

    return Tick(
        forward,
        plan.backward,
        enter=of(forward, 0, 0),
        turn=of(forward, last, plan.rounds - 1),
        leave=of(plan.backward, 0, 0),
    )


def segments(ticks: Tick) -> Iterator[tuple[slice, bool, bool]]:
    """Ticks that have the same places: which they are, and whether they have one for forward and for backward."""
    places = np.stack([(work.microbatch != IDLE).any(axis=1) for work in (ticks.forward, ticks.backward)], axis=1)
    edges = [0, *(np.flatnonzero((places[1:] != places[:-1]).any(axis=1)) + 1), len(places)]
    for start, stop in itertools.pairwise(edges):
        yield slice(start, stop), *map(bool, places[start])


@dataclasses.dataclass(frozen=True)
class Program:
    """One device's ticks. `ends` is the model without its stacks; both vary over the axes that the stream does.

    Of both there are the leaves that a gradient is wanted of and the others, each with None in place of the rest.
    """

    parts: Parts
    loss: Loss
    ends: tuple[Any, Any]
    blocks: tuple[Any, Any]
    rows: Rows
    features: Array | None
    rounds: int

    def run(self, carry: Carry, ticks: Tick) -> Carry:
        """All ticks: one scan for each segment."""
        for at, ahead, back in segments(ticks):
            part = jax.tree.map(lambda table: table[at], ticks)  # noqa: B023
            step = functools.partial(self.tick, ahead=ahead, back=back, always=part)
            carry, _ = lax.scan(step, carry, jax.tree.map(jnp.asarray, part))
        return carry

    def tick(self, carry: Carry, at: Tick, *, ahead: bool, back: bool, always: Tick) -> tuple[Carry, None]:
        cotangent = pipeline.zeros(carry.forth)
        if ahead:
            carry, y = self.ahead(carry, at, always)
            carry, cotangent = self.turn(carry, y, at.turn, always.turn)
        return self.back(carry, cotangent, at, always) if back else carry, None

    def ahead(self, carry: Carry, at: Tick, always: Tick) -> tuple[Carry, Array]:
        """The forward of a chunk; its input is kept for its backward."""
        work, rows = pipeline.of_stage(at.forward), self.of(layout.after(at.enter, carry.forth))
        own = when(
            always.enter, at.enter, lambda x: self.enter(self.ends[0], rows), lambda x: x, pipeline.zeros(carry.forth)
        )
        x = jnp.where((lax.axis_index(PIPE) == 0) & (work.round == 0), own, carry.forth)
        chunk, first = pipeline.chunk_of(self.blocks, work.round, self.rounds)
        y, _ = self.parts.stage(eqx.combine(*chunk), x, self.of(work.microbatch), first)
        slot = jnp.maximum(work.slot, 0)
        kept = jnp.where(work.microbatch != IDLE, x, pipeline.pick(carry.inputs, slot))
        inputs = lax.dynamic_update_index_in_dim(carry.inputs, kept, slot, 0)
        forth = pipeline.send(y, self.rounds)
        return carry._replace(inputs=inputs, forth=forth), layout.after(y, forth)

    def turn(self, carry: Carry, y: Array, microbatch: Array, always: Int[np.ndarray, " ticks"]) -> tuple[Carry, Array]:
        """Logits, loss and their backward of the microbatch that has passed the last stage."""

        def run(given: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
            loss, ends, y = given
            value, pull = jax.vjp(lambda ends, y: self.value(ends, y, self.of(microbatch)), self.ends[0], y)
            more, cotangent = pull(varying_like(jnp.ones((), value.dtype), value))
            return loss + value.astype(loss.dtype), added(ends, more), cotangent

        given = (carry.loss, carry.ends, y)
        loss, ends, cotangent = when(always, microbatch, run, lambda x: (*x[:2], pipeline.zeros(y)), given)
        return carry._replace(loss=loss, ends=ends), cotangent

    def back(self, carry: Carry, turned: Array, at: Tick, always: Tick) -> Carry:
        """The backward of a chunk, whose layers are computed again."""
        work, rows = pipeline.of_stage(at.backward), self.of(at.leave)
        busy, last = work.microbatch != IDLE, lax.axis_index(PIPE) == lax.axis_size(PIPE) - 1
        cotangent = jnp.where(busy, jnp.where(last & (work.round == self.rounds - 1), turned, carry.back), 0)
        (chunk, fixed), first = pipeline.chunk_of(self.blocks, work.round, self.rounds)
        slot, own = layout.after(work.slot, turned, carry.forth), self.of(work.microbatch)
        x = pipeline.pick(carry.inputs, slot)
        _, pull = jax.vjp(lambda chunk, x: self.parts.stage(eqx.combine(chunk, fixed), x, own, first)[0], chunk, x)
        of_chunk, of_x = pull(cotangent)
        of_chunk = jax.tree.map(lambda d: jnp.where(busy, d, 0), of_chunk)
        sent = pipeline.send(of_x, self.rounds, back=True)
        first_x = layout.after(jnp.where((lax.axis_index(PIPE) == 0) & (work.round == 0), of_x, 0), sent)

        def leave(ends: Any) -> Any:
            return added(ends, jax.vjp(lambda ends: self.enter(ends, rows), self.ends[0])[1](first_x)[0])

        return carry._replace(
            blocks=added(carry.blocks, of_chunk, work.round if self.rounds > 1 else None),
            ends=when(always.leave, at.leave, leave, lambda x: x, carry.ends),
            back=sent,
        )

    def of(self, microbatch: Array) -> Rows:
        return pipeline.pick(self.rows, microbatch)

    def enter(self, ends: Any, rows: Rows) -> Array:
        whole = eqx.combine(ends, self.ends[1])
        return varying_over(self.parts.enter(whole, rows, self.features), frozenset({PIPE}))

    def value(self, ends: Any, y: Array, rows: Rows) -> Array:
        """The loss of the rows, from what the last stage gives: this device's part, by rows and sequence alone."""
        logits = self.parts.leave(eqx.combine(ends, self.ends[1]), pipeline.on_all(y))
        value = self.loss(logits, rows["labels"], rows["weights"])
        over = tuple(sorted(manual_axes(value) - {DATA, CONTEXT}))
        return varying_over(lax.psum(value, over) if over else value, frozenset({DATA, CONTEXT}))


def when(always: Int[np.ndarray, " ticks"], microbatch: Array, run: Callable, skip: Callable, given: Any) -> Any:
    """`run(given)` in ticks that have a microbatch for it, the same on all devices, else `skip(given)`.

    `always` is the whole table of a scan: where all ticks agree, there is nothing to decide.
    """
    if (always != IDLE).all():
        return run(given)
    return lax.cond(microbatch != IDLE, run, skip, given) if (always != IDLE).any() else skip(given)


def sums_for(tree: Tree) -> Tree:
    """Zeros to add gradients to: in float32 at least."""
    wide = [jnp.zeros(w.shape, np.promote_types(w.dtype, np.float32)) for w in jax.tree.leaves(tree)]
    like = [varying_like(zero, w) for zero, w in zip(wide, jax.tree.leaves(tree), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), like)


def added(sums: Tree, more: Tree, index: Array | None = None) -> Tree:
    """The sums with gradients added, those of element `index` of their first dim if it is given."""
    if index is None:
        return jax.tree.map(lambda a, d: a + d.astype(a.dtype), sums, more)
    at = jnp.maximum(index, 0)
    new = added(pipeline.pick(sums, at), more)
    return jax.tree.map(lambda a, d: lax.dynamic_update_index_in_dim(a, d, at, 0), sums, new)


def gradients(
    parts: Parts,
    declared: Any,
    wanted: Any,
    loss: Loss,
    microbatches: int,
    model: Tree,
    rows: Rows,
    features: Array | None,
) -> tuple[Float[Array, ""], Tree]:
    """One device's loss and gradient; the loss is the sum over all microbatches and devices.

    `wanted` is True at the leaves of a declaration that a gradient is wanted of. It is None at the others.
    """
    rounds = pipeline.rounds_of(declared)
    plan = schedule(lax.axis_size(PIPE), microbatches, rounds)
    rows = jax.tree.map(lambda a: pipeline.cut(a, microbatches), rows)
    given, declared_ends, wanted_ends = (
        with_stacks(tree, parts, dict.fromkeys(parts.stacks)) for tree in (model, declared, wanted)
    )
    stacks, wanted_stacks = ({name: getattr(tree, name) for name in parts.stacks} for tree in (model, wanted))
    x = jax.eval_shape(
        lambda m: parts.enter(layout.gather_at_rest(m, declared_ends), pipeline.pick(rows, 0), features), given
    )
    over = x.manual_axis_type.varying
    # Weights that are equal on devices with other rows: their gradients are summed once, at the end.
    ends, pull_ends = split_vjp(
        lambda m: varying_over(layout.gather_at_rest(m, declared_ends), over),
        given,
        wanted_ends,
        jax.tree.map(lambda w: any(jax.tree.leaves(w)), wanted_ends, is_leaf=is_shifted),  # which are added up there
    )
    blocks, pull_blocks = split_vjp(lambda m: varying_over(m, over | {PIPE}), stacks, wanted_stacks)
    nothing = varying_over(jnp.zeros(x.shape, x.dtype), over | {PIPE})
    carry = Carry(
        forth=nothing,
        back=nothing,
        inputs=varying_over(jnp.zeros((plan.slots, *x.shape), x.dtype), over | {PIPE}),
        blocks=sums_for(blocks[0]),
        ends=sums_for(ends[0]),
        loss=varying_over(jnp.zeros((), jnp.float32), frozenset({DATA, CONTEXT})),
    )
    carry = Program(parts, loss, ends, blocks, rows, features, rounds).run(carry, ticks_of(plan))
    (of_ends,) = pull_ends(jax.tree.map(lambda d, w: d.astype(w.dtype), carry.ends, ends[0]))
    (of_blocks,) = pull_blocks(jax.tree.map(lambda d, w: d.astype(w.dtype), carry.blocks, blocks[0]))
    return total(carry), with_stacks(of_ends, parts, of_blocks)


def total(carry: Carry) -> Float[Array, ""]:
    """The loss of all devices, summed after the last tick."""
    loss = layout.after(carry.loss, *jax.tree.leaves((carry.blocks, carry.ends))[:1])
    same = tuple(sorted(manual_axes(loss) - {DATA, CONTEXT}))  # on devices that differ in these alone
    return lax.psum(jnp.where(lax.axis_index(same) == 0, loss, 0) if same else loss, (DATA, CONTEXT, *same))


def split_vjp(
    change: Callable[[Tree], Tree], tree: Tree, wanted: Any, changed: Any = None
) -> tuple[tuple[Tree, Tree], Callable]:
    """`change(tree)`, its wanted leaves and the others apart, and the pullback of the former to those of `tree`.

    `changed` says which leaves of `change(tree)` come from wanted ones, where it has others than `tree`.
    """
    chosen, fixed = eqx.partition(tree, wanted)

    def run(chosen: Tree) -> tuple[Tree, Tree]:
        return eqx.partition(change(eqx.combine(chosen, fixed)), wanted if changed is None else changed)

    chosen, pull, fixed = jax.vjp(run, chosen, has_aux=True)
    return (chosen, fixed), pull


def with_stacks(model: Tree, parts: Parts, stacks: Mapping[str, Any]) -> Tree:
    """The model with other values, or None, for its stacks."""
    new = [stacks[name] for name in parts.stacks]
    return eqx.tree_at(lambda m: [getattr(m, n) for n in parts.stacks], model, new, is_leaf=lambda x: x is None)


@runtime_checkable
class LossAndGrad(Protocol):
    """Loss and gradient on a mesh: a pure function, to be jitted. Inputs beside the labels are those of `Forward`.

    The loss is the mean over the labels that count: those within the vocabulary, and of them those of `counts`.
    """

    def __call__(
        self,
        model: Any,
        tokens: Int[Host, "batch seq"],
        labels: Int[Host, "batch seq"],
        counts: Bool[Host, "batch seq"] | None = None,
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> tuple[Float[Array, ""], Any]: ...


def loss_and_grad(
    what: str,
    parts: Parts,
    declared: Any,
    mesh: Mesh | AbstractMesh,
    *,
    problems: Problems,
    loss: Loss,
    trainable: str | Iterable[str] | None,
    residual: Residual,
    microbatches: int | None,
) -> LossAndGrad:
    """What a family's `loss_and_grad` returns; `what` is asked for it.

    The same numbers as the gradient of `losses.cross_entropy(forward(...), labels, counts)`, in less memory where
    layers are split over `pipe` or rows cut into microbatches. The gradient is that of the model's weights, split like
    them; the layers run in rounds if `declared` is `pipeline.interleaved`.

    Args:
        loss: `(logits, labels, weights) -> number` of one microbatch on one device, inside of the `shard_map`: logits
            are split over VOCAB, the weights of all labels that count are 1 / their number. Losses of all microbatches
            and devices are summed.
        trainable: patterns of the paths of the leaves that a gradient is wanted of, as `training.make_step` takes them;
            None is all. The others have None for theirs. "*.lora.*.[ab]" are those of adapters, as beside quantized
            weights, which have no gradient, and "*.diff.*.value" what adapters add to other leaves.

    Raises:
        InputError: weights without a gradient among the trainable ones; a pattern that matches no leaf.
    """
    trained = trainable_part(declared, trainable)
    chosen = layout.named(trained)
    fixed = [path for path, param in chosen.items() if without_gradient(path, param)]
    problem = f"{', '.join(fixed[:3])}: have no gradient (quantized, or fixed)"
    fail_if([f"{problem}: pass trainable= without them, as '*.lora.*.[ab]'"] if fixed else [], what)
    wanted = jax.tree.unflatten(jax.tree.structure(declared), [path in chosen for path in layout.named(declared)])
    seq_ways, vocab = seq_ways_of(mesh, residual), declared.config.vocab

    @jaxtyped(typechecker=beartype)
    def f(
        model: Any,
        tokens: Int[Host, "batch seq"],
        labels: Int[Host, "batch seq"],
        counts: Bool[Host, "batch seq"] | None = None,
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> tuple[Float[Array, ""], Any]:
        given = {"lengths": lengths, "mask": mask, "positions": positions, "places": places}
        fail_if(problems(model, features=features, **given), what)
        counted, count = weights(jnp.asarray(labels), counts, vocab)
        tokens = layout.after(jnp.asarray(tokens), count)
        rows = {"tokens": tokens, "labels": labels, "weights": counted, **given}
        cut = pipeline.microbatches_for(microbatches, mesh, tokens.shape[0])
        arrays = {k: pad(jnp.asarray(v), mesh.shape[DATA] * cut, seq_ways) for k, v in rows.items() if v is not None}
        specs = {k: P(DATA) if v.ndim == 1 else P(DATA, CONTEXT) for k, v in arrays.items()}
        shard = layout.sharded(
            functools.partial(gradients, parts, declared, wanted, loss, cut),
            mesh,
            (layout.specs(declared), specs, P()),
            (P(), layout.specs(trained)),
        )
        return shard(model, arrays, None if features is None else jnp.asarray(features))

    return f


def weights(
    labels: Int[Array, "batch seq"], counts: Bool[Array, "batch seq"] | None, vocab: int
) -> tuple[Float[Array, "batch seq"], Int[Array, ""]]:
    """1 / n for each of the n labels that count, so that the sum of losses is their mean; and n."""
    wanted = (labels >= 0) & (labels < vocab)
    wanted = wanted if counts is None else wanted & jnp.asarray(counts)
    n = jnp.sum(wanted, dtype=jnp.int32)
    return wanted.astype(jnp.float32) / jnp.maximum(n, 1).astype(jnp.float32), n
