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

To train adapters, take the gradient of what `trainable` chooses:

    chosen, rest = eqx.partition(model, adapters.trainable(model))
    grads = jax.grad(lambda chosen: loss(eqx.combine(chosen, rest)))(chosen)

A layer without an adapter in a stack that has them, and ranks below the highest of a stack, are zeros in A and in B,
whose gradients are zero too.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from shardzoo.errors import fail_if
from shardzoo.zoo import layout
from shardzoo.zoo.layers import Linear
from shardzoo.zoo.layout import HOST, LAYER, Param
from shardzoo.zoo.linears import BLOCK, input_dims, kept, linear_layers, plain, with_weights
from shardzoo.zoo.quantize import dequantize, scale_dtype
from shardzoo.zoo.weights import Adapted, Lora, Quantized, Weight, declared_base

RANK = "rank"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """An adapter's share of one weight, on the host, in the shapes of `declare_lora`; see `Lora`."""

    a: Shaped[np.ndarray, "*lead_rank_in"]
    b: Shaped[np.ndarray, "*lead_out_rank"]
    ratio: Float[np.ndarray, "*lead"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter: its name, how much of it is wanted, and its factors by the path of the weight they are for."""

    name: str
    strength: float
    factors: Mapping[str, Factors]


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
        InputError: names that are taken or cannot be stored; factors for weights that are not there, or of other
            shapes; all in one message.
    """
    layers = linear_layers(declared)
    fail_if(_problems(layers, adapters), "adapters do not fit this model")
    weights: dict[str, Weight] = {path: layer.weight for path, layer in layers.items()}
    for adapter in adapters:
        for path, factors in adapter.factors.items():
            lora = declare_lora(layers[path], rank_of(factors.a.shape, layers[path]), factors.a.dtype)
            weights[path] = _beside(weights[path], adapter.name, lora)
    changed = {path for adapter in adapters for path in adapter.factors}
    return with_weights(declared, {path: weights[path] for path in changed})


def _beside(weight: Weight, name: str, lora: Lora) -> Adapted:
    old = weight if isinstance(weight, Adapted) else Adapted(base=weight, lora={})
    return Adapted(base=old.base, lora={**old.lora, name: lora})


def _strength_problems(name: str, strength: float) -> Iterator[str]:
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(strength)):
            yield f"{name}: strength={strength:g} is no finite number in float32: change it"


def _problems(layers: Mapping[str, Linear], adapters: Sequence[Adapter]) -> Iterator[str]:
    there = {name for layer in layers.values() if isinstance(layer.weight, Adapted) for name in layer.weight.lora}
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
    return new, with_weights(model, {path: weights[path] for path in changed})


def _place(declared: Lora, factors: Factors, strength: float, mesh: Mesh) -> Lora:
    assert isinstance(declared.strength, Param)
    values = {
        **{part.name: getattr(factors, part.name) for part in dataclasses.fields(factors)},
        "strength": np.full(declared.strength.shape, strength),
    }

    def one(name: str, param: Param) -> Array:
        return _on_devices(np.asarray(values[name]).astype(param.dtype), param.sharding(mesh))

    return Lora(**{name: one(name, getattr(declared, name)) for name in values})


def _on_devices(host: Shaped[np.ndarray, "..."], sharding: Any) -> Array:
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def names(tree: Any) -> list[str]:
    """The adapters beside a model's weights."""
    adapted = [layer.weight for layer in linear_layers(tree).values() if isinstance(layer.weight, Adapted)]
    return list(dict.fromkeys(name for weight in adapted for name in weight.lora))


def set_strengths(model: layout.Tree, strengths: Mapping[str, float]) -> layout.Tree:
    """The live model with some adapters at another strength; what was compiled for it stays good.

    Raises:
        InputError: no adapter of such a name; strengths that are no numbers.
    """
    known = names(model)
    problems = [
        f"{n!r}: there is no such adapter, but {', '.join(known) or 'none'}" for n in strengths if n not in known
    ]
    fail_if(
        problems + [p for n, value in strengths.items() for p in _strength_problems(n, value)], "adapters.set_strengths"
    )

    def one(weight: Adapted) -> Adapted:
        lora = {n: _at_strength(part, strengths[n]) if n in strengths else part for n, part in weight.lora.items()}
        return Adapted(base=weight.base, lora=lora)

    return _each(model, one)


def _at_strength(lora: Lora, strength: float) -> Lora:
    old = lora.strength
    assert isinstance(old, jax.Array)
    return dataclasses.replace(lora, strength=_on_devices(np.full(old.shape, strength, old.dtype), old.sharding))


def _each(tree: layout.Tree, change: Any) -> layout.Tree:
    layers = linear_layers(tree)
    adapted = {path: layer.weight for path, layer in layers.items() if isinstance(layer.weight, Adapted)}
    return with_weights(tree, {path: change(weight) for path, weight in adapted.items()})


def detach(declared: layout.Tree, model: layout.Tree) -> tuple[layout.Tree, layout.Tree]:
    """Declaration and live model without their adapters."""
    return _each(declared, lambda weight: weight.base), _each(model, lambda weight: weight.base)


def trainable(model: layout.Tree) -> layout.Tree:
    """True at A and B of every adapter, False at all other leaves: for `equinox.partition`."""

    def one(path: Any, _: Any) -> bool:
        parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        return len(parts) > 3 and parts[-3] == "lora" and parts[-1] in ("a", "b")

    return jax.tree.map_with_path(one, model)


def merge(
    declared: layout.Tree, model: layout.Tree, *, dequantize: bool = False, donate: bool = False
) -> tuple[layout.Tree, layout.Tree]:
    """Declaration and live model with the adapters added to the weights, `W + sum_i strength_i * ratio_i * B_i A_i`.

    Computed where the weights lie, one layer of a stack at a time, in float32, and rounded to the weight's dtype once.

    Args:
        dequantize: quantized weights that have adapters become plain ones, in the dtype of their scales.
        donate: reuse the memory of the weights, which must then not be used again.

    Raises:
        InputError: quantized weights, all by name, without `dequantize`: they keep their adapters apart.
    """
    layers = linear_layers(declared)
    adapted = {path: layer for path, layer in layers.items() if isinstance(layer.weight, Adapted)}
    quantized = [path for path, layer in adapted.items() if isinstance(layer.weight.base, Quantized)]
    fail_if(
        [] if dequantize else [f"{path}: is quantized" for path in quantized],
        "merge: adapters stay apart from quantized weights; merge first and quantize then, or pass dequantize=True",
    )
    live, whole = linear_layers(model), linear_layers(plain(declared))
    merged = {path: _merged(layer, live[path].weight, donate) for path, layer in adapted.items()}
    return with_weights(declared, {path: whole[path].weight for path in adapted}), with_weights(model, merged)


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
