"""FLUX.1 on meshes: the same numbers as on one device, the collectives it promises, what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh
from tiny_flux import CONFIG, COTANGENT, GIVEN, IDS, TIMES, call, collectives

from shardzoo.errors import InputError
from shardzoo.zoo import flux, layout
from shardzoo.zoo.flux import Config
from shardzoo.zoo.mesh import Degrees, make_mesh


def run(degrees, at_rest=None, host=False, **options):
    """The result, and the gradients of a weighted sum of it for the model, the image, the text and the pooled text."""
    declared = flux.declare(CONFIG)
    values = harsh(declared)
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, degrees, smallest=64)
        assert any(p.rest for p in layout.named(declared.double).values())
    declared = layout.keep_on_host(declared, smallest=64) if host else declared
    mesh = make_mesh(data=degrees.data, context=degrees.context, tensor=degrees.tensor)
    f = flux.forward(declared, mesh, **options)

    def total(model, *given):
        out = call(f, model, given)
        return jnp.sum(out * COTANGENT), out

    model = layout.place(declared, mesh, values)
    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))
    (_, out), (grads, *rest) = both(model, *GIVEN)
    return jax.tree.map(np.asarray, (out, layout.named(grads), *rest))


@functools.cache
def one_device():
    return run(Degrees())


MESHES = [
    (dict(tensor=2), dict(host=True)),
    (dict(tensor=4), dict(residual="seq")),
    (dict(context=4), dict(at_rest="context")),
    (dict(context=3), dict(remat=True)),  # heads do not divide: keys are gathered
    (dict(tensor=2, context=4), dict(residual="seq", at_rest="context")),
    (dict(data=2, tensor=2, context=2), dict(at_rest="data")),
]
MORE_MESHES = [
    (dict(), dict(remat=True)),
    (dict(context=2), dict()),
    (dict(context=8), dict(at_rest="context", host=True)),
    (dict(context=6), dict(residual="seq")),
    (dict(tensor=8), dict(residual="seq", remat=True)),
    (dict(tensor=2, context=2), dict(residual="seq")),
    (dict(tensor=2, context=3), dict(residual="seq")),
    (dict(data=4, tensor=2), dict(at_rest="data", residual="seq")),
]


@pytest.mark.parametrize(
    "degrees, options", [*MESHES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_MESHES)], ids=str
)
def test_mesh_parity(degrees, options):
    """Forward and gradient on a mesh, at 1e-5 of one device's."""
    assert_close(run(Degrees(**degrees), **options), one_device())


def test_collectives_are_those_of_the_docstrings():
    """Conditions 1, modulation 1; a block of two streams 2 x 2, of one 1; the result 1 all-gather over what splits it.

    The compiler makes one all-reduce of the text's second and the image's first.
    """
    declared = flux.declare(CONFIG)
    assert collectives(declared, dict(tensor=4)) == {"all-reduce": 1 + 1 + 3 + 1}
    seq = {"all-reduce": 1 + 1, "all-gather": 4 + 1 + 1, "reduce-scatter": 4 + 1}
    assert collectives(declared, dict(tensor=4), residual="seq") == seq
    # Three all-to-all in each attention; the mask of the padding is gathered, once where the compiler sees it is one.
    found = collectives(declared, dict(context=4))
    assert 1 < found.pop("all-gather") <= 1 + 2 and found == {"all-to-all": 3 + 3}


def test_everything_that_does_not_go_together_is_refused_at_once():
    f = flux.forward(flux.declare(CONFIG), make_mesh())
    model = layout.abstract(flux.declare(CONFIG), make_mesh())
    image, text, pooled = GIVEN
    with pytest.raises(InputError) as error:
        f(model, image[:, :, :4], text, pooled[:, :2], TIMES, image_ids=IDS[:, :2])
    for part in ("image: width 4", "pooled: width 2", "image_ids: axes=2", "guidance: missing"):
        assert part in str(error.value)
    with pytest.raises((InputError, TypeError), match="residual"):
        flux.forward(flux.declare(CONFIG), make_mesh(), residual="half")
    with pytest.raises(InputError, match="heads=8 does not divide by 3"):
        flux.forward(flux.declare(CONFIG), make_mesh(tensor=3))
    with pytest.raises(InputError, match=r"axes=\(2, 4\) are 6 dims in all, head_dim=12"):
        Config(head_dim=12, axes=(2, 4))
