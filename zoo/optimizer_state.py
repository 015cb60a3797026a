"""The state of an optimizer, declared like a model: what its leaves are, and that they lie like their parameters.

An optimizer is anything with optax's `init(params)`. Its state holds trees of the parameters' own structure (moments,
accumulated gradients) and a few values of its own (counts, learning rates). A leaf of the first kind ends with the path
and has the shape of its parameter, so it takes that parameter's dims and splits, also those at rest; all other leaves
are whole on every device.

    declared = zoo.optimizer_state.declare(optimizer, declared_model, trainable=["blocks.*"])
    opt_state = zoo.optimizer_state.init(optimizer, model, declared_model, mesh, trainable=["blocks.*"])
"""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh

from shardzoo.errors import fail_if
from shardzoo.zoo.layout import Param, abstract, named

Tree = TypeVar("Tree")


@runtime_checkable
class Optimizer(Protocol):
    """What is asked of an optimizer: `optax.GradientTransformation` is one."""

    @property
    def init(self) -> Any:
        """Parameters -> state."""


def trainable_part(tree: Tree, trainable: str | Iterable[str] | None) -> Tree:
    """The tree with None at each leaf that no pattern of `trainable` matches: what an optimizer is given.

    Of a declared, live or gradient tree alike. All of it where `trainable` is None.

    Raises:
        InputError: a pattern that matches no leaf.
    """
    if trainable is None:
        return tree
    patterns = [trainable] if isinstance(trainable, str) else list(trainable)
    paths = list(named(tree))
    unused = [p for p in patterns if not fnmatch.filter(paths, p)]
    fail_if([f"trainable={p!r} matches no leaf" for p in unused],
            f"trainable: there are {len(paths)} leaves, such as {', '.join(paths[:3])}")  # fmt: skip
    kept = {p for p in paths if any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)}
    leaves = [leaf if path in kept else None for path, leaf in named(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def declare(optimizer: Optimizer, declared: Any, *, trainable: str | Iterable[str] | None = None) -> Any:
    """The optimizer's state with a `Param` at each leaf: the dtypes that the optimizer gives, splits of the parameters.

    Nothing is computed. `declared` may lie split at rest (FSDP): the state then does too.
    """
    part = trainable_part(declared, trainable)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), part)
    state = jax.eval_shape(optimizer.init, shapes)
    params = {tuple(path): param for path, param in jax.tree.leaves_with_path(part)}
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _like_its_parameter(tuple(path), leaf, params), state)


def _like_its_parameter(path: tuple, leaf: Any, params: dict[tuple, Param]) -> Param:
    for start in range(len(path)):
        param = params.get(path[start:])
        if param is not None and param.shape == tuple(leaf.shape):
            return dataclasses.replace(param, dtype=leaf.dtype, fixed=False)
    return Param(" ".join(f"dim{i}" for i in range(len(leaf.shape))), tuple(leaf.shape), {}, leaf.dtype)


def init(
    optimizer: Optimizer,
    model: Any,
    declared: Any,
    mesh: Mesh,
    *,
    trainable: str | Iterable[str] | None = None,
) -> Any:
    """The optimizer's first state of a live model, made where it will lie: split like its parameters."""
    state = declare(optimizer, declared, trainable=trainable)
    shardings = jax.tree.map(lambda p: p.sharding(mesh), state)
    return jax.jit(optimizer.init, out_shardings=shardings)(trainable_part(model, trainable))


def abstract_state(
    optimizer: Optimizer,
    declared: Any,
    mesh: Mesh | AbstractMesh,
    *,
    trainable: str | Iterable[str] | None = None,
) -> Any:
    """The abstract filling of the state on `mesh`: to trace or compile a training step with."""
    return abstract(declare(optimizer, declared, trainable=trainable), mesh)
