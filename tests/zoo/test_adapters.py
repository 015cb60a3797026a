"""Adapters on meshes: the same numbers as on one device, the same collectives as without, gradients, refusals."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_files import made
from mesh_parity import assert_close, harsh
from tiny_flux import CONFIG, COTANGENT, GIVEN, call, collectives, result

from shardzoo.errors import InputError
from shardzoo.zoo import adapters, flux, layout, quantize
from shardzoo.zoo.adapters import Adapter, Factors
from shardzoo.zoo.mesh import Degrees, make_mesh


def run(degrees, at_rest=None, host=False, kind=None, **options):
    declared = flux.declare(CONFIG)
    values = harsh(declared)
    both = [made(declared, "one", 2), made(declared, "two", 3, seed=1, strength=-0.4, only="double")]
    mesh = make_mesh(data=degrees.data, context=degrees.context, tensor=degrees.tensor)
    if kind is not None:
        declared, values = quantized(declared, values, kind)
    declared = layout.split_at_rest(declared, at_rest, degrees, smallest=64) if at_rest else declared
    declared = layout.keep_on_host(declared, smallest=64) if host else declared
    declared, model = adapters.attach(declared, layout.place(declared, mesh, values), mesh, both)
    f = flux.forward(declared, mesh, **options)
    chosen, rest = eqx.partition(model, adapters.trainable(model))

    def total(chosen, *given):
        out = call(f, eqx.combine(chosen, rest), given)
        return jnp.sum(out * COTANGENT), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(chosen, *GIVEN)
    return jax.tree.map(np.asarray, (out, layout.named(grads)))


def quantized(declared, values, kind):
    """The declaration and host values with the weights of the blocks quantized."""
    new = quantize.declare(declared, kind)
    host, made = layout.named(values), {}
    for path, param in layout.named(new).items():
        if path in host:
            made[path] = host[path]
        elif path.endswith(quantize.VALUES):
            root, scale = path.removesuffix(quantize.VALUES), layout.named(new)[path.removesuffix("values") + "scale"]
            made[path], made[root + quantize.SCALE] = quantize.quantize(
                host[root], param.ndim - scale.ndim, kind, scale.dtype
            )
    return new, layout.fill(new, made)


@functools.cache
def one_device(kind=None):
    return run(Degrees(), kind=kind)


MESHES = [
    (dict(tensor=4), dict(residual="seq")),
    (dict(context=4), dict(at_rest="context")),
    (dict(data=2, tensor=2, context=2), dict(host=True)),
]
MORE_MESHES = [
    (dict(tensor=2, context=4), dict(residual="seq", at_rest="context", kind="int8")),
    (dict(tensor=8), dict(residual="seq", remat=True)),
    (dict(tensor=2), dict(kind="fp8", host=True)),
    (dict(context=3), dict(kind="int8", remat=True)),
    (dict(tensor=2, context=3), dict()),
    (dict(data=4, tensor=2), dict(at_rest="data", kind="fp8")),
]


@pytest.mark.parametrize(
    "degrees, options", [*MESHES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_MESHES)], ids=str
)
def test_mesh_parity(degrees, options):
    """Forward, and gradients of all factors and of the inputs, at 1e-5 of one device's."""
    assert_close(run(Degrees(**degrees), **options), one_device(options.get("kind")))


@pytest.mark.parametrize(
    "degrees",
    [
        dict(tensor=2, context=2),
        *(pytest.param(slow, marks=pytest.mark.slow) for slow in (dict(tensor=4), dict(context=4))),
    ],
    ids=str,
)
def test_merged_on_a_mesh_is_what_it_is_apart(degrees):
    declared, mesh = flux.declare(CONFIG), make_mesh(**degrees)
    live = layout.place(declared, mesh, harsh(declared))
    declared, model = adapters.attach(
        declared, live, mesh, [made(declared, "one", 2), made(declared, "two", 3, seed=1)]
    )
    apart = result(declared, mesh, model)
    new, merged = adapters.merge(declared, model)
    for path, param in layout.named(new).items():
        assert layout.named(merged)[path].sharding == param.sharding(mesh), path
    assert_close(result(new, mesh, merged), apart)
    assert np.abs(apart - result(new, mesh, live)).max() > 0.1 * np.abs(apart).max()


def test_no_collective_more():
    """What adapters add is reduced with what they are added to."""

    declared = flux.declare(CONFIG)
    adapted = adapters.declare(declared, [made(declared, "one", 2)])
    for degrees, options in ((dict(tensor=4), {}), (dict(tensor=4), dict(residual="seq"))):
        assert collectives(adapted, degrees, **options) == collectives(declared, degrees, **options)


def test_strengths_are_changed_without_compiling_again():
    declared, mesh = flux.declare(CONFIG), make_mesh(tensor=2)
    live = layout.place(declared, mesh, harsh(declared))
    declared, model = adapters.attach(declared, live, mesh, [made(declared, "one", 2)])
    f = flux.forward(declared, mesh)
    step = jax.jit(lambda m: call(f, m))
    results = [np.asarray(step(adapters.set_strengths(model, {"one": s}))) for s in (0.0, 1.0, 0.0)]
    assert step._cache_size() == 1 and np.array_equal(results[0], results[2])
    assert np.abs(results[0] - results[1]).max() > 0.1


def test_everything_wrong_is_said_at_once():
    declared = flux.declare(CONFIG)
    good = made(declared, "one", 2, only="single")
    path = "single.attn.qkv.weight"
    bad = {**good.factors, "single.norm.weight": good.factors[path]}
    bad[path] = Factors(a=good.factors[path].a, b=good.factors[path].b[:, :, :4], ratio=good.factors[path].ratio)
    with pytest.raises(InputError) as caught:
        adapters.declare(declared, [good, Adapter(name="one", strength=1.0, factors={}),
                                    Adapter(name="a b", strength=1.0, factors=bad)])  # fmt: skip
    for part in ("'one': there is an adapter of this name", "'a b': an adapter's name is", "single.norm.weight is not",
                 f"{path}: b has shape (2, 3, 4, 12, 2), expected (2, 3, 8, 12, 2)"):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(InputError, match="'three': there is no such adapter, but one"):
        adapters.set_strengths(adapters.declare(declared, [good]), {"three": 1.0})
    with pytest.raises(InputError, match=r"one: strength=1e\+39 is no finite number"):
        adapters.set_strengths(adapters.declare(declared, [good]), {"one": 1e39})
    with pytest.raises(InputError, match="one: strength=nan is no finite number"):
        adapters.declare(declared, [dataclasses.replace(good, strength=float("nan"))])
    quantized = quantize.declare(declared, "int8")
    adapted = adapters.declare(quantized, [good])
    with pytest.raises(InputError, match=r"stay apart from quantized weights.*\n  single.modulation.weight: is quant"):
        adapters.merge(adapted, adapted)
