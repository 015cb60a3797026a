"""Leaves with what adapters add to them as it is: biases, scales of norms, convolutions, tables.

A weight that is multiplied by has its adapters as products of two factors (`zoo.weights.Lora`); all other leaves have
whole differences beside them. These are added up where a block's weights are made ready for use,
`layout.gather_at_rest`: layers get one array and need know nothing of it, and a bias is added once wherever that is.
"""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped


class Difference(eqx.Module):
    """What one adapter adds to one leaf: `strength * value`.

    Attributes:
        value: in float32, split as the leaf is.
        strength: how much of it is wanted; with the leaf's `layer` dim, if it has one.
    """

    value: Any
    strength: Any


class Shifted(eqx.Module):
    """A leaf and, by name, the differences beside it; of the leaf's shape and dtype.

    The base is None for a bias of a layer that has none by itself.
    """

    base: Any
    diff: dict[str, Difference]

    @property
    def leaf(self) -> Any:
        """The base, or what has its shape."""
        return next(iter(self.diff.values())).value if self.base is None else self.base

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape

    @property
    def ndim(self) -> int:
        return self.leaf.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.leaf.dtype


def is_shifted(node: Any) -> bool:
    return isinstance(node, Shifted)


def has_shifted(tree: Any) -> bool:
    return any(map(is_shifted, jax.tree.leaves(tree, is_leaf=is_shifted)))


def without_gradient(path: str, leaf: Any) -> bool:
    """Whether a declared leaf has none: whole numbers, quantized values, an adapter's ratio and strength."""
    value = re.fullmatch(r".*\.diff\.[^.]+\.value", path)
    return not jnp.issubdtype(leaf.dtype, np.floating) or (leaf.fixed and value is None)


def added_up(leaf: Shifted) -> Shaped[Array, "..."]:
    """The leaf with its differences, added in float32 at least and rounded to its dtype once."""
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    total = 0 if leaf.base is None else leaf.base.astype(wide)
    for one in leaf.diff.values():
        strength = one.strength.reshape(one.strength.shape + (1,) * (one.value.ndim - one.strength.ndim))
        total = total + (strength * one.value).astype(wide)
    return total.astype(leaf.dtype)
