"""Where adapters go: linear layers by the paths of their weights, which may be quantized too, and all other leaves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Int

from shardzoo.zoo.differences import Shifted, is_shifted
from shardzoo.zoo.in_place import Stacked, block_at
from shardzoo.zoo.layers import Linear, RowLinear
from shardzoo.zoo.layout import LAYER, Param, Tree, gather_at_rest
from shardzoo.zoo.mesh import traced_platform
from shardzoo.zoo.weights import Weight, declared_base

BLOCK = "block"  # the dim that packs projections of equal size in one weight


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _path(path: Any) -> str:
    return f"{_name(path)}.weight"


def _is_linear(node: Any) -> bool:
    return isinstance(node, Linear)


def linear_layers(tree: Any) -> dict[str, Linear]:
    """Path of the weight -> layer, of all linear layers of a model of any filling."""
    found = jax.tree.leaves_with_path(tree, is_leaf=_is_linear)
    return {_path(path): node for path, node in found if isinstance(node, Linear)}


def layer_at(stacked: Tree, layer: Int[Array, ""], declared: Tree) -> Tree:
    """One of the stacked layers, for generation: each leaf read where it lies, gathered from a split at rest.

    On a CPU weights of linear layers stay in the stack (`Stacked`), unless something has to be done to them first.
    """
    multiplied = set()
    if traced_platform() == "cpu":
        parts = ("", ".base", ".values", ".base.values")  # of a weight that adapters stand beside, or quantized
        multiplied = {path + part for path in linear_layers(declared) for part in parts}

    def one(path: Any, param: Any, stack: Any, whole: Any) -> Any:
        stays = _name(path) in multiplied and isinstance(param, Param) and not param.rest and param.memory == "device"
        return Stacked(stack, layer) if stays else whole

    whole = gather_at_rest(block_at(stacked, layer), declared, to="invarying")
    return jax.tree.map_with_path(one, declared, stacked, whole, is_leaf=is_shifted)


def with_weights(tree: Tree, weights: Mapping[str, Weight]) -> Tree:
    """The model with the weights at these paths replaced."""

    def one(path: Any, node: Any) -> Any:
        new = weights.get(_path(path)) if _is_linear(node) else None
        return node if new is None else eqx.tree_at(lambda layer: layer.weight, node, new)

    return jax.tree.map_with_path(one, tree, is_leaf=_is_linear)


def shifted_leaves(tree: Any) -> dict[str, Shifted]:
    """Path -> leaf, of all leaves that have differences beside them, in a model of any filling."""
    found = jax.tree.leaves_with_path(tree, is_leaf=is_shifted)
    return {_name(path): leaf for path, leaf in found if isinstance(leaf, Shifted)}


def with_leaves(tree: Tree, leaves: Mapping[str, Any]) -> Tree:
    """The model with the leaves at these paths replaced, and what is beside them; None stands for no leaf."""

    def one(path: Any, node: Any) -> Any:
        return leaves.get(_name(path), node)

    return jax.tree.map_with_path(one, tree, is_leaf=lambda node: node is None or is_shifted(node))


def missing_biases(declared: Any) -> dict[str, Param]:
    """Path -> what it would be, of the biases that linear layers of a declaration do not have."""
    found = {}
    for path, layer in linear_layers(declared).items():
        if layer.bias is None:
            weight = declared_base(layer.weight)
            outputs = tuple(dim for dim in weight.names if dim not in input_dims(layer))
            found[f"{path.removesuffix('weight')}bias"] = kept(weight, outputs, dtype=layer.weight.dtype, fixed=False)
    return found


def plain(declared: Tree) -> Tree:
    """The declaration with every leaf as one array again: paths, dims and shapes as conversion rules have them."""
    layers = linear_layers(declared)
    bare = with_leaves(declared, {path: leaf.base for path, leaf in shifted_leaves(declared).items()})
    return with_weights(bare, {path: _one_array(layer.weight) for path, layer in layers.items()})


def _one_array(weight: Weight) -> Param:
    return dataclasses.replace(declared_base(weight), dtype=weight.dtype, fixed=False)


def input_dims(layer: Linear) -> tuple[str, ...]:
    """Names of those dims of a declared layer's weight that are its inputs."""
    names = declared_base(layer.weight).names
    rows = names[1:] if names[0] == LAYER else names
    return rows[1:] if isinstance(layer, RowLinear) else rows[-1:]


def kept(param: Param, dims: tuple[str, ...], **changes: Any) -> Param:
    """The parameter with these of its dims alone."""
    sizes = {dim: size for dim, size in zip(param.names, param.shape, strict=True) if dim in dims}
    return dataclasses.replace(
        param,
        dims=" ".join(sizes),
        shape=tuple(sizes.values()),
        split={dim: axes for dim, axes in param.split.items() if dim in sizes},
        rest={dim: axis for dim, axis in param.rest.items() if dim in sizes},
        **changes,
    )
