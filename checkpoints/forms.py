"""The forms in which a weight may be stored: one array, values and scales, either with adapters beside it.

A plain weight is the leaf "....weight"; a quantized one "....weight.values" and "....weight.scale"; with adapters
"....weight.base" (of either form) and "....weight.lora.<name>.a", "b", "ratio" and "strength". Any other leaf with
what adapters add to it is "....base", unless the model has none by itself, and "....diff.<name>.value" and "strength".
"""

from collections.abc import Mapping
from typing import Any

from shardzoo.checkpoints.grid import LeafSpec
from shardzoo.zoo import adapters, quantize
from shardzoo.zoo.differences import Difference, Shifted
from shardzoo.zoo.layers import Linear
from shardzoo.zoo.layout import Param, Tree, named
from shardzoo.zoo.linears import linear_layers, missing_biases, with_leaves, with_weights
from shardzoo.zoo.weights import Adapted, Quantized, Weight, declared_base

VALUES, SCALE, BASE, LORA, DIFF = quantize.VALUES, quantize.SCALE, ".base", ".lora.", ".diff."


def as_stored(declared: Tree, stored: Mapping[str, LeafSpec]) -> Tree:
    """The declaration with each leaf in the form in which these leaves hold it."""
    layers = linear_layers(declared)
    new = with_weights(declared, {path: _form(path, layer, stored) for path, layer in layers.items()})
    return with_leaves(new, _shifted(declared, stored))


def _shifted(declared: Tree, stored: Mapping[str, LeafSpec]) -> dict[str, Shifted]:
    """The leaves that these hold with differences beside them."""
    own = named(declared)
    params = {**missing_biases(declared), **own}
    found: dict[str, dict[str, Difference]] = {}
    for path in stored:
        leaf, _, rest = path.partition(DIFF)
        if rest.endswith(".value") and leaf in params:
            found.setdefault(leaf, {})[rest.removesuffix(".value")] = adapters.declare_difference(params[leaf])
    return {path: Shifted(base=own.get(path), diff=diff) for path, diff in found.items()}


def _form(path: str, layer: Linear, stored: Mapping[str, LeafSpec]) -> Weight:
    start = path + LORA
    names = {p.removeprefix(start).rpartition(".")[0] for p in stored if p.startswith(start) and p.endswith(".a")}
    base = _base(path + BASE if names else path, layer, stored)
    lora = {name: _lora(layer, stored[f"{start}{name}.a"]) for name in sorted(names)}
    return Adapted(base=base, lora=lora) if names else base


def _base(path: str, layer: Linear, stored: Mapping[str, LeafSpec]) -> Param | Quantized:
    param, values = declared_base(layer.weight), stored.get(path + VALUES)
    if values is None or values.dtype not in quantize.KINDS:
        return param
    return quantize.declared_quantized(layer, param, quantize.KINDS[values.dtype])


def _lora(layer: Linear, a: LeafSpec) -> Any:
    return adapters.declare_lora(layer, adapters.rank_of(a.shape, layer), a.dtype)


def whole_path(path: str) -> str:
    """The path that the weight has as one array, of a leaf that holds all of its values in another form."""
    return path.removesuffix(VALUES).removesuffix(BASE)


def quantized_leaves(leaves: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Path of a quantized weight, without suffix -> the paths of its values and of its scales."""
    roots = [path.removesuffix(VALUES) for path in leaves if path.endswith(VALUES)]
    return {root: (root + VALUES, root + SCALE) for root in roots if root + SCALE in leaves}
