"""LoRA adapters on a sharded model: kept apart beside its weights, or merged into them.

    style = convert.adapters.read("style.safetensors", declared)
    detail = convert.adapters.read("detail.safetensors", declared, strength=0.6)
    declared, model = adapters.attach(declared, model, mesh, [style, detail])
    step = flux.forward(declared, mesh)                 # computes W x + sum_i strength_i * alpha_i / r_i * B_i (A_i x)
    model = adapters.set_strengths(model, {"style": 0.5})
    declared, model = adapters.merge(declared, model)   # or: W + sum_i ..., and the adapters are gone

Apart, an adapter is computed as sharded as the weight that it stands beside: A is split like the weight's inputs and B
like its outputs. Of a column layer that is A whole and B split, with no collective; of a row layer A is split, and the
partial sums join the one reduction that the layer has anyway. Quantized weights take adapters too, apart.

An adapter may also change other leaves: biases, scales of norms, convolutions, tables. What it adds to them stands
beside them in full, split alike, and is added up before they are used (`zoo.differences`).

To train adapters, take the gradient of what `trainable` chooses:

    chosen, rest = eqx.partition(model, adapters.trainable(model))
    grads = jax.grad(lambda chosen: loss(eqx.combine(chosen, rest)))(chosen)

That is A and B; `differences=True` has it choose what is added to other leaves as well, such as biases that were
trained beside B. By patterns, as `training.make_step` takes them, these are "*.lora.*.[ab]" and "*.diff.*.value".

A layer without an adapter in a stack that has them, and ranks below the highest of a stack, are zeros in A and in B,
whose gradients are zero too.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from shardzoo.errors import fail_if
from shardzoo.zoo import layout
from shardzoo.zoo.differences import Difference, Shifted, added_up
from shardzoo.zoo.layers import Linear
from shardzoo.zoo.layout import HOST, LAYER, Param
from shardzoo.zoo.linears import (
    BLOCK,
    input_dims,
    kept,
    linear_layers,
    missing_biases,
    plain,
    shifted_leaves,
    with_leaves,
    with_weights,
)
from shardzoo.zoo.quantize import dequantize, scale_dtype
from shardzoo.zoo.weights import Adapted, Lora, Quantized, Weight, declared_base

RANK = "rank"
Part = TypeVar("Part", Lora, Difference)  # what an adapter has beside one leaf
_UNFIT = "adapters do not fit this model"
_FACTORS = {("lora", "a"), ("lora", "b")}  # where adapters lie and what they are called there
_VALUES = {("diff", "value")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """An adapter's share of one weight, on the host, in the shapes of `declare_lora`; see `Lora`."""

    a: Shaped[np.ndarray, "*lead_rank_in"]
    b: Shaped[np.ndarray, "*lead_out_rank"]
    ratio: Float[np.ndarray, "*lead"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter, on the host, by the paths of the weights and other leaves that it is for.

    Attributes:
        name: what it is called beside the model's leaves.
        strength: how much of it is wanted.
        factors: what it adds to the weights of linear layers.
        differences: what it adds to any other leaves, of their shapes. A bias that a linear layer does not have is
            named as it would be.
        instead: values that are to stand in place of those of such leaves, at a strength of 1; NaN keeps the model's.
    """

    name: str
    strength: float
    factors: Mapping[str, Factors]
    differences: Mapping[str, Shaped[np.ndarray, "..."]] = dataclasses.field(default_factory=dict)
    instead: Mapping[str, Shaped[np.ndarray, "..."]] = dataclasses.field(default_factory=dict)

    @property
    def shifts(self) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Differences and values, of all leaves that are no weights of linear layers."""
        return {**self.differences, **self.instead}


def is_blocked(param: Param) -> bool:
    """Whether a weight's adapters have an A and a B for each of its blocks: projections packed into one weight."""
    outputs = param.names[1:] if param.names[0] == LAYER else param.names
    return outputs[0] == BLOCK and not param.axes(BLOCK)


def lead_dims(param: Param) -> tuple[str, ...]:
    """The dims of a weight that its adapters have one each for: `layer` and `block`, of those it has."""
    layer = param.names[:1] if param.names[0] == LAYER else ()
    return (*layer, BLOCK) if is_blocked(param) else layer


def declare_lora(layer: Linear, rank: int, dtype: Any = None) -> Lora:
    """The declared factors of an adapter of this rank for a declared layer; in the weight's dtype if none is given."""
    param, inputs = declared_base(layer.weight), input_dims(layer)
    lead = lead_dims(param)
    outputs = tuple(dim for dim in param.names if dim not in (*lead, *inputs))
    kind = scale_dtype(layer.weight.dtype) if dtype is None else np.dtype(dtype)
    own = dataclasses.replace(param, dtype=kind, memory="device", fixed=False, rest={})
    number = dataclasses.replace(own, dtype=np.dtype(np.float32), fixed=True)
    into, out = kept(own, (*lead, *inputs)), kept(own, (*lead, *outputs))
    return Lora(
        a=_with_rank(into, len(lead), rank),
        b=_with_rank(out, out.ndim, rank),
        ratio=kept(number, lead),
        strength=kept(number, tuple(dim for dim in lead if dim == LAYER)),
    )


def _with_rank(param: Param, at: int, rank: int) -> Param:
    names, shape = list(param.names), list(param.shape)
    names.insert(at, RANK)
    shape.insert(at, rank)
    return dataclasses.replace(param, dims=" ".join(names), shape=tuple(shape))


def rank_of(a_shape: Sequence[int], layer: Linear) -> int:
    """The rank of an A of this shape for a declared layer."""
    return a_shape[len(a_shape) - len(input_dims(layer)) - 1]


def declare(declared: layout.Tree, adapters: Sequence[Adapter]) -> layout.Tree:
    """The declaration with these adapters beside its weights.

    Raises:
        InputError: names that are taken or cannot be stored; factors and differences for leaves that are not there, or
            of other shapes; all in one message.
    """
    layers = linear_layers(declared)
    fail_if([*_problems(declared, layers, adapters), *_shift_problems(declared, adapters)], _UNFIT)
    weights: dict[str, Weight] = {path: layer.weight for path, layer in layers.items()}
    for adapter in adapters:
        for path, factors in adapter.factors.items():
            lora = declare_lora(layers[path], rank_of(factors.a.shape, layers[path]), factors.a.dtype)
            weights[path] = _beside(weights[path], adapter.name, lora)
    changed = {path for adapter in adapters for path in adapter.factors}
    new = with_weights(declared, {path: weights[path] for path in changed})
    return with_leaves(new, _declared_shifts(declared, adapters))


def declare_difference(leaf: Param) -> Difference:
    """The declared difference of an adapter for a declared leaf."""
    value = dataclasses.replace(leaf, dtype=np.dtype(np.float32), memory="device", fixed=True)
    lead = tuple(dim for dim in leaf.names[:1] if dim == LAYER)
    return Difference(value=value, strength=kept(value, lead))


def _declared_shifts(declared: layout.Tree, adapters: Sequence[Adapter]) -> dict[str, Shifted]:
    there, missing = _other_leaves(declared), missing_biases(declared)
    found: dict[str, Shifted] = {}
    for adapter in adapters:
        for path in adapter.shifts:
            leaf = there.get(path)
            old = found.get(path) or (leaf if isinstance(leaf, Shifted) else Shifted(base=leaf, diff={}))
            param = missing[path] if old.base is None else old.base
            found[path] = Shifted(base=old.base, diff={**old.diff, adapter.name: declare_difference(param)})
    return found


def _other_leaves(declared: Any) -> dict[str, Param | Shifted]:
    """All leaves that are no weights of linear layers, with what is beside them."""
    weights = {*linear_layers(declared)}
    bare = {path: leaf for path, leaf in layout.named(plain(declared)).items() if path not in weights}
    return {**bare, **shifted_leaves(declared)}


def _beside(weight: Weight, name: str, lora: Lora) -> Adapted:
    old = weight if isinstance(weight, Adapted) else Adapted(base=weight, lora={})
    return Adapted(base=old.base, lora={**old.lora, name: lora})


def _strength_problems(name: str, strength: float) -> Iterator[str]:
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(strength)):
            yield f"{name}: strength={strength:g} is no finite number in float32: change it"


def _problems(declared: Any, layers: Mapping[str, Linear], adapters: Sequence[Adapter]) -> Iterator[str]:
    there = set(names(declared))
    for adapter in adapters:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", adapter.name):
            yield f"{adapter.name!r}: an adapter's name is 1 to 60 letters, digits, '_' and '-': name it so"
        if adapter.name in there:
            yield f"{adapter.name!r}: there is an adapter of this name: choose another"
        there.add(adapter.name)
        yield from _strength_problems(adapter.name, adapter.strength)
        for path, factors in adapter.factors.items():
            if path not in layers:
                yield f"{adapter.name}: {path} is not the weight of a linear layer of this model"
                continue
            want = declare_lora(layers[path], rank_of(factors.a.shape, layers[path]))
            for part in ("a", "b", "ratio"):
                shape, expected = getattr(factors, part).shape, getattr(want, part).shape
                if shape != expected:
                    yield f"{adapter.name}: {path}: {part} has shape {shape}, expected {expected}"


def _shift_problems(declared: Any, adapters: Sequence[Adapter]) -> Iterator[str]:
    known = {**missing_biases(declared), **_other_leaves(declared)}
    for adapter in adapters:
        for path, value in adapter.shifts.items():
            if path not in known:
                yield f"{adapter.name}: {path} is no leaf of this model that differences are added to"
            elif value.shape != known[path].shape:
                yield f"{adapter.name}: {path}: the difference has shape {value.shape}, expected {known[path].shape}"
        for path in adapter.differences.keys() & adapter.instead.keys():
            yield f"{adapter.name}: {path} has a difference and a value in its place: leave out one"


def attach(
    declared: layout.Tree, model: layout.Tree, mesh: Mesh, adapters: Sequence[Adapter]
) -> tuple[layout.Tree, layout.Tree]:
    """Declaration and live model with these adapters beside the weights, each on the devices that hold its weight.

    Called by every process of the mesh, each of which has all factors on its host.

    Raises:
        InputError: as `declare`, before anything is placed.
    """
    new = declare(declared, adapters)
    layers, live = linear_layers(new), linear_layers(model)
    weights: dict[str, Weight] = {path: layer.weight for path, layer in live.items()}
    for adapter in adapters:
        for path, factors in adapter.factors.items():
            beside = layers[path].weight
            assert isinstance(beside, Adapted)  # it was declared so above
            lora = _place(beside.lora[adapter.name], factors, adapter.strength, mesh)
            weights[path] = _beside(weights[path], adapter.name, lora)
    changed = {path for adapter in adapters for path in adapter.factors}
    model = with_weights(model, {path: weights[path] for path in changed})
    return new, with_leaves(model, _live_shifts(new, model, mesh, adapters))


def _live_shifts(
    declared: layout.Tree, model: layout.Tree, mesh: Mesh, adapters: Sequence[Adapter]
) -> dict[str, Shifted]:
    params, live = shifted_leaves(declared), {**layout.named(model), **shifted_leaves(model)}
    for adapter in adapters:
        for path, value in adapter.shifts.items():
            leaf = live.get(path)
            old = leaf if isinstance(leaf, Shifted) else Shifted(base=leaf, diff={})
            part = params[path].diff[adapter.name]
            one = _placed(part, {"value": value, "strength": _full(part.strength, adapter.strength)}, mesh)
            one = _from_base(one, old.base) if path in adapter.instead else one
            live[path] = Shifted(base=old.base, diff={**old.diff, adapter.name: one})
    return {path: live[path] for adapter in adapters for path in adapter.shifts}


def _from_base(wanted: Difference, base: Array | None) -> Difference:
    """The difference that makes the base the wanted value, none where that is NaN."""

    def one(value: Array, base: Array | float) -> Array:
        return jnp.where(jnp.isnan(value), 0, value - jnp.asarray(base, value.dtype))

    new = jax.jit(one, out_shardings=wanted.value.sharding)(wanted.value, 0.0 if base is None else _near(base))
    return Difference(value=new, strength=wanted.strength)


def _near(leaf: Array) -> Array:
    """A leaf in the memory of its devices."""
    lies = leaf.sharding
    return jax.device_put(leaf, lies.with_memory_kind("device")) if lies.memory_kind == HOST else leaf


def _place(declared: Lora, factors: Factors, strength: float, mesh: Mesh) -> Lora:
    values = {part.name: getattr(factors, part.name) for part in dataclasses.fields(factors)}
    return _placed(declared, {**values, "strength": _full(declared.strength, strength)}, mesh)


def _full(declared: Any, strength: float) -> Shaped[np.ndarray, "..."]:
    return np.full(declared.shape, strength)


def _placed(declared: Part, values: Mapping[str, Any], mesh: Mesh) -> Part:
    def one(name: str, param: Param) -> Array:
        return _on_devices(np.asarray(values[name]).astype(param.dtype), param.sharding(mesh))

    return dataclasses.replace(declared, **{name: one(name, getattr(declared, name)) for name in values})


def _on_devices(host: Shaped[np.ndarray, "..."], sharding: Any) -> Array:
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def names(tree: Any) -> list[str]:
    """The adapters beside a model's leaves."""
    adapted = [layer.weight for layer in linear_layers(tree).values() if isinstance(layer.weight, Adapted)]
    found: list[Mapping[str, Any]] = [weight.lora for weight in adapted]
    found += [leaf.diff for leaf in shifted_leaves(tree).values()]
    return list(dict.fromkeys(name for parts in found for name in parts))


def _unknown(absent: Iterable[str], known: Sequence[str]) -> list[str]:
    return [f"{name!r}: there is no such adapter, but {', '.join(known) or 'none'}" for name in absent]


def set_strengths(model: layout.Tree, strengths: Mapping[str, float]) -> layout.Tree:
    """The live model with some adapters at another strength; what was compiled for it stays good.

    Raises:
        InputError: no adapter of such a name; strengths that are no numbers.
    """
    known = names(model)
    problems = _unknown((n for n in strengths if n not in known), known)
    problems += [p for n, value in strengths.items() for p in _strength_problems(n, value)]
    fail_if(problems, "adapters.set_strengths")

    def at(parts: Mapping[str, Part]) -> dict[str, Part]:
        return {n: _at_strength(part, strengths[n]) if n in strengths else part for n, part in parts.items()}

    return _each(
        model,
        lambda weight: Adapted(base=weight.base, lora=at(weight.lora)),
        lambda leaf: Shifted(base=leaf.base, diff=at(leaf.diff)),
    )


def _at_strength(part: Part, strength: float) -> Part:
    old: Any = part.strength
    return dataclasses.replace(part, strength=_on_devices(np.full(old.shape, strength, old.dtype), old.sharding))


def _each(tree: layout.Tree, change: Callable[[Adapted], Weight], change_leaf: Callable[[Shifted], Any]) -> layout.Tree:
    layers = linear_layers(tree)
    adapted = {path: layer.weight for path, layer in layers.items() if isinstance(layer.weight, Adapted)}
    new = with_weights(tree, {path: change(weight) for path, weight in adapted.items()})
    return with_leaves(new, {path: change_leaf(leaf) for path, leaf in shifted_leaves(tree).items()})


def _base(node: Adapted | Shifted) -> Any:
    return node.base


def detach(declared: layout.Tree, model: layout.Tree) -> tuple[layout.Tree, layout.Tree]:
    """Declaration and live model without their adapters."""
    return _each(declared, _base, _base), _each(model, _base, _base)


def trainable(model: layout.Tree, only: Collection[str] | None = None, *, differences: bool = False) -> layout.Tree:
    """True at A and B of adapters, False at all other leaves: for `equinox.partition`.

    Args:
        model: declared or live.
        only: names of the adapters; None is all.
        differences: True as well at what adapters add to other leaves, which is as large as these are.

    Raises:
        InputError: no adapter of such a name.
    """
    known = names(model)
    chosen = set(known if only is None else [only] if isinstance(only, str) else only)
    fail_if(_unknown(chosen - {*known}, known), "adapters.trainable")

    def one(path: Any, _: Any) -> bool:
        parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        if len(parts) < 4 or parts[-2] not in chosen:
            return False
        return (parts[-3], parts[-1]) in (_FACTORS | _VALUES if differences else _FACTORS)

    return jax.tree.map_with_path(one, model)


def merge(
    declared: layout.Tree, model: layout.Tree, *, dequantize: bool = False, donate: bool = False
) -> tuple[layout.Tree, layout.Tree]:
    """Declaration and live model with the adapters added to the weights, `W + sum_i strength_i * ratio_i * B_i A_i`.

    Computed where the weights lie, one layer of a stack at a time, in float32, and rounded to the weight's dtype once;
    so are differences of other leaves.

    Args:
        dequantize: quantized weights that have adapters become plain ones, in the dtype of their scales.
        donate: reuse the memory of the weights, which must then not be used again.

    Raises:
        InputError: quantized weights, all by name, without `dequantize`: they keep their adapters apart; biases of
            layers that have none by themselves.
    """
    shifted = shifted_leaves(declared)
    fail_if(
        [f"{path}: there is no such bias in this model" for path, leaf in shifted.items() if leaf.base is None],
        "merge: these adapters stay apart, as they have biases that the model has not",
    )
    layers = linear_layers(declared)
    adapted = {path: layer for path, layer in layers.items() if isinstance(layer.weight, Adapted)}
    quantized = [path for path, layer in adapted.items() if isinstance(layer.weight.base, Quantized)]
    fail_if(
        [] if dequantize else [f"{path}: is quantized" for path in quantized],
        "merge: adapters stay apart from quantized weights; merge first and quantize then, or pass dequantize=True",
    )
    live, whole = linear_layers(model), linear_layers(plain(declared))
    merged = {path: _merged(layer, live[path].weight, donate) for path, layer in adapted.items()}
    plain_leaves = {path: leaf.base for path, leaf in shifted.items()}
    new = with_leaves(with_weights(declared, {path: whole[path].weight for path in adapted}), plain_leaves)
    added = {path: _merged_leaf(leaf, donate) for path, leaf in shifted_leaves(model).items()}
    return new, with_leaves(with_weights(model, merged), added)


def _merged_leaf(leaf: Shifted, donate: bool) -> Array:
    base = _near(leaf.base)
    add = jax.jit(
        lambda base, diff: added_up(Shifted(base=base, diff=diff)),
        out_shardings=base.sharding,
        donate_argnums=0 if donate or base is not leaf.base else (),
    )
    return jax.device_put(add(base, leaf.diff), leaf.base.sharding)


def _merged(declared: Linear, live: Adapted, donate: bool) -> Array:
    param, base = declared_base(declared.weight), live.base
    lies = base.values.sharding if isinstance(base, Quantized) else base.sharding
    if lies.memory_kind == HOST:
        here = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("device")), base)
        return jax.device_put(_merged(declared, Adapted(base=here, lora=live.lora), True), lies)
    add = jax.jit(
        functools.partial(_add, stacked=param.names[0] == LAYER, blocked=is_blocked(param)),
        out_shardings=lies,
        donate_argnums=0 if donate and not isinstance(base, Quantized) else (),
    )
    return add(base, list(live.lora.values()))


def _add(
    base: Float[Array, "*shape"] | Quantized, loras: list[Lora], *, stacked: bool, blocked: bool
) -> Float[Array, "*shape"]:
    def one(base: Array | Quantized, loras: list[Lora]) -> Array:
        whole = np.dtype(np.float32)
        begin = dequantize(base.values, base.scale, whole) if isinstance(base, Quantized) else base.astype(whole)
        return sum((_product(lora, blocked) for lora in loras), begin).astype(base.dtype)

    return lax.map(lambda both: one(*both), (base, loras)) if stacked else one(base, loras)


def _product(lora: Lora, blocked: bool) -> Float[Array, "*out_in"]:
    """strength * ratio * B A in float32, in the dims of the weight."""
    a, b = jnp.asarray(lora.a, jnp.float32), jnp.asarray(lora.b, jnp.float32)
    strength = jnp.asarray(lora.ratio * lora.strength)
    lead = (0,) if blocked else ()
    numbers = (((b.ndim - 1,), (len(lead),)), (lead, lead))
    product = lax.dot_general(b, a, numbers, precision=lax.Precision.HIGHEST)
    return product * strength.reshape(strength.shape + (1,) * (product.ndim - strength.ndim))
