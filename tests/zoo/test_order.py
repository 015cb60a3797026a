"""On CPU devices loops, branches and collectives of a step stand in one order: else they may wait for ever."""

import dataclasses

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from tiny_families import SIZES, TINY

from shardzoo.zoo import layout
from shardzoo.zoo.families import find_family
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import DATA, Degrees, make_mesh

CONFIGS = TINY | {
    "windows": dataclasses.replace(TINY["decoder"], layers=4, sliding_window=5, sliding_layers=(True, False) * 2)
}
OWN_NAMES = {"windows": "decoder"}  # of families
NO_REMAT = ("clip-text", "clip-vision", "image-vae", "wan-vae")
MESHES = [
    (dict(data=2, context=2, tensor=2), [DATA]),
    (dict(data=2, context=4), [DATA, "context"]),
]
QUICK = [("windows", MESHES[1])]


def gradient(name, degrees, axes, **options):
    """The compiled gradient of a sum over what a tiny model of the family gives, by all of its weights."""
    family, mesh = find_family(OWN_NAMES.get(name, name)), make_mesh(**degrees)
    declared = family.declare(CONFIGS[name])
    for axis in axes:
        declared = layout.split_at_rest(declared, axis, Degrees.of(mesh), smallest=64)
    f, arrays = family.trace(declared, mesh, SIZES, **options)

    def total(model, *arrays):
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(f(model, *arrays)))

    return jax.jit(jax.value_and_grad(total)).lower(layout.abstract(declared, mesh), *arrays).compile()


def cases():
    for name in CONFIGS:
        for mesh in MESHES:
            marks = [] if (name, mesh) in QUICK else [pytest.mark.slow]
            yield pytest.param(name, *mesh, marks=marks, id=f"{name}-{mesh[0]}")


@pytest.mark.parametrize("name, degrees, axes", list(cases()))
def test_no_loop_of_a_gradient_may_be_overtaken(name, degrees, axes):
    options = {} if name in NO_REMAT else {"remat": True}
    assert not hlo.overtaking(gradient(name, degrees, axes, **options))


def looped(x, ordered):
    """A loop of sums over the mesh, and one beside it."""
    out, _ = lax.scan(lambda c, _: (lax.pcast(lax.psum(jnp.sin(c), DATA), DATA, to="varying"), None), x, length=3)
    beside = jnp.cos(layout.after(x, out) if ordered else x) @ jnp.ones((4, 4))
    return out + lax.psum(beside, DATA)


@pytest.mark.parametrize("ordered", [False, True])
def test_unordered_pairs_are_found(ordered):
    mesh = make_mesh(data=2)
    shard = jax.shard_map(lambda x: looped(x, ordered), mesh=mesh, in_specs=P(DATA), out_specs=P(DATA))
    compiled = jax.jit(shard).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32)).compile()
    pairs = hlo.unordered(compiled)
    assert len(pairs) == (0 if ordered else 1)
    assert set(hlo.overtaking(compiled)) <= set(pairs)


def test_what_stands_in_turn_has_the_same_gradient():
    """Of weights that wait, of whole numbers among them, which have none, and with an input that waits for them."""
    mesh = make_mesh(data=2)
    declared = {"w": Param("a b", (4, 4)), "n": Param("b", (4,), dtype=np.dtype(np.int32))}
    rng = np.random.default_rng(0)
    x, w, n = rng.normal(size=(4, 4)).astype("f"), rng.normal(size=(4, 4)).astype("f"), np.arange(4, dtype=np.int32)

    def total(run):
        def one(x, weights):
            y, weights = run(x, weights)
            return jnp.sin(y @ weights["w"]) * weights["n"]

        specs = (P(DATA), layout.specs(declared))
        shard = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P(DATA))
        return jax.grad(lambda x, w: jnp.sum(shard(x, {"w": w, "n": n})), argnums=(0, 1))

    plain, ordered = (jax.jit(total(run)) for run in (lambda x, weights: (x, weights), layout.in_turn))
    for a, b in zip(plain(x, w), ordered(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert str(jax.make_jaxpr(plain)(x, w)) != str(jax.make_jaxpr(ordered)(x, w))
