"""A step of training on a mesh, and where the gradient is taken.

    declared = layout.split_at_rest(zoo.decoder.declare(config), "data", degrees)   # or without: whole over `data`
    forward = zoo.decoder.forward(declared, mesh, dtype="bfloat16", remat="dots")   # float32 weights are the masters
    step = training.make_step(loss, optimizer, declared, mesh)                      # loss(model, *inputs) -> scalar
    opt_state = optimizer_state.init(optimizer, model, declared, mesh)
    model, opt_state, metrics = step(model, opt_state, tokens)

**Where the gradient is taken.** Outside of `forward`, of a function that calls it, as `make_step` does: `forward` is a
pure function of global arrays, and so its gradient is that of one device, whatever the mesh. What a mesh needs beside
that stands in the transpose of its collectives: a weight that repeats over an axis is made to vary over it where it is
used, and the transpose of that adds the gradients up; one that is split at rest is gathered, and the transpose of that
scatters. Inside of a `shard_map` there are only parts of a loss, and whether their gradients are to be added up, and
how often, would be the caller's to know.

**Split over data (FSDP).** `layout.split_at_rest(declared, "data", degrees)` is all of it, for every family. Each leaf
of a block is gathered when the scan reaches it (one all-gather; a second one in the backward pass unless `remat=False`,
which keeps all gathered weights) and its gradient scattered (one reduce-scatter in place of the all-reduce of whole
weights). The optimizer's state is split as its parameters are: its update needs no collective but the global norm's.

**dtypes.** Declare the model in float32 and give `forward` the compute dtype: layers cast weights where they use them,
the optimizer sees float32. Norms, softmax, losses and sums are in float32 regardless. In the dense decoder, blocks that
are split at rest have their matrices cast before they are gathered; gradients are scattered in float32.

**On CPUs** XLA takes the memory of a step's intermediate results from the system and gives it back, at every step: that
can cost half as much as computing. `remat="dots"` halves that memory at no cost in time, and with the environment that
`benchmarks/training_cpu.py` sets for glibc it stays with the process.

An optimizer is anything with optax's `init(params)` and `update(gradients, state, params)`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from shardzoo.errors import fail_if
from shardzoo.zoo import layout, optimizer_state
from shardzoo.zoo.differences import without_gradient
from shardzoo.zoo.optimizer_state import trainable_part


class Optimizer(optimizer_state.Optimizer, Protocol):
    """What is asked of an optimizer: `optax.GradientTransformation` is one."""

    @property
    def update(self) -> Any:
        """Gradients, state, parameters -> updates, state."""


class Metrics(NamedTuple):
    """What a step tells: the loss before it, and the norm of all gradients together before any clipping."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]


@runtime_checkable
class Step(Protocol):
    """See `make_step`."""

    def __call__(self, model: Any, opt_state: Any, *inputs: Any, **named: Any) -> tuple[Any, Any, Metrics]: ...


def make_step(
    loss: Callable[..., Float[Array, ""]],
    optimizer: Optimizer,
    declared: Any,
    mesh: Mesh | AbstractMesh,
    *,
    trainable: str | Iterable[str] | None = None,
) -> Step:
    """The jitted `f(model, opt_state, *inputs)` that gives both after one update, where they lay, and `Metrics`.

    Model and state are donated: what was passed must not be used again.

    Args:
        loss: `loss(model, *inputs)`, a scalar; it calls `forward`, and all that it depends on, such as batch and key,
            is among the inputs.
        optimizer: of optax, or what has its interface. `optax.clip_by_global_norm` takes the norm over the whole mesh,
            since gradients are global arrays.
        trainable: patterns of the paths of the leaves that are trained, as `optimizer_state.declare` takes them; None
            is all. "*.lora.*.[ab]" are those of adapters, "*.diff.*.value" what these add to other leaves.

    Raises:
        InputError: leaves to be trained that hold whole numbers or quantized values; a pattern that matches no leaf.
    """
    patterns = trainable if trainable is None or isinstance(trainable, str) else tuple(trainable)

    def loss_and_grad(model: Any, *inputs: Any, **named: Any) -> tuple[Float[Array, ""], Any]:
        chosen, frozen = split_trainable(model, patterns)
        return jax.value_and_grad(lambda part: loss(eqx.combine(part, frozen), *inputs, **named))(chosen)

    return make_update(loss_and_grad, optimizer, declared, mesh, trainable=patterns)


def make_update(
    loss_and_grad: Callable[..., tuple[Float[Array, ""], Any]],
    optimizer: Optimizer,
    declared: Any,
    mesh: Mesh | AbstractMesh,
    *,
    trainable: str | Iterable[str] | None = None,
) -> Step:
    """`make_step` of a function that gives loss and gradients of the trained leaves by itself.

    `decoder.loss_and_grad` and `qwen3_5.loss_and_grad` are such, for pipelines whose stages run forward and backward in
    turn. Arguments and errors are those of `make_step`.
    """
    patterns = trainable if trainable is None or isinstance(trainable, str) else tuple(trainable)
    whole = [
        f"{path}: {param.dtype} has no gradient"
        for path, param in layout.named(trainable_part(declared, patterns)).items()
        if without_gradient(path, param)
    ]
    fail_if(whole, "make_step: pass trainable= without these leaves")

    def step(model: Any, opt_state: Any, *inputs: Any, **named: Any) -> tuple[Any, Any, Metrics]:
        chosen, frozen = split_trainable(model, patterns)
        value, gradients = loss_and_grad(model, *inputs, **named)
        updates, opt_state = optimizer.update(gradients, opt_state, chosen)
        chosen = jax.tree.map(lambda weight, update: (weight + update).astype(weight.dtype), chosen, updates)
        return eqx.combine(chosen, frozen), opt_state, Metrics(value, global_norm(gradients))

    # Stated, since what the compiler would choose for results need not be how they lay before.
    both = declared, optimizer_state.declare(optimizer, declared, trainable=patterns)
    scalar = NamedSharding(mesh, PartitionSpec())
    lie = (*jax.tree.map(lambda p: p.sharding(mesh), both), Metrics(scalar, scalar))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=lie)


def split_trainable(model: Any, trainable: str | Iterable[str] | None = None) -> tuple[Any, Any]:
    """The trained leaves of a model of any filling and the other ones, each with None in place of the rest."""
    chosen = trainable_part(model, trainable)
    return chosen, jax.tree.map(lambda part, leaf: leaf if part is None else None, chosen, model, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def global_norm(tree: Any) -> Float[Array, ""]:
    """The root of the sum of squares of all leaves, float32 at least."""
    squares = [jnp.sum(jnp.square(x.astype(np.promote_types(x.dtype, np.float32)))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
