"""FLUX.2 on meshes: the same numbers as on one device, the collectives it promises, what it refuses."""

import functools
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh

from shardzoo.errors import InputError
from shardzoo.zoo import flux2, layout
from shardzoo.zoo.flux2 import Config
from shardzoo.zoo.mesh import Degrees, make_mesh

CONFIG = Config(
    in_channels=6, out_channels=5, heads=8, head_dim=12, double_layers=2, single_layers=2, mlp=40, text=10, freq=14,
    axes=(2, 4, 4, 2),
)  # fmt: skip
B, TEXT = 3, 7
IDS = flux2.image_ids(3, 4, ((1, 3), (2, 2)))  # 19 tokens, 7 of the references; no degree of the meshes divides 19 or 7
SEQ = len(IDS)
rng = np.random.default_rng(0)
GIVEN = [rng.normal(size=s).astype(np.float32) for s in ((B, SEQ, 6), (B, TEXT, 10))]
TIMES, GUIDANCE = rng.uniform(0, 1, B).astype(np.float32), rng.uniform(1, 5, B).astype(np.float32)
COTANGENT = rng.normal(size=(B, SEQ, 5)).astype(np.float32)


def run(degrees, at_rest=None, host=False, **options):
    """The result, and the gradients of a weighted sum of it for the model, the image and the text."""
    declared = flux2.declare(CONFIG)
    values = harsh(declared)
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, degrees, smallest=64)
        assert all(any(p.rest for p in layout.named(x).values()) for x in (declared.double, declared.modulation))
    declared = layout.keep_on_host(declared, smallest=64) if host else declared
    mesh = make_mesh(data=degrees.data, context=degrees.context, tensor=degrees.tensor)
    f = flux2.forward(declared, mesh, **options)

    def total(model, *given):
        out = f(model, *given, TIMES, image_ids=IDS, guidance=GUIDANCE)
        return jnp.sum(out * COTANGENT), out

    model = layout.place(declared, mesh, values)
    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
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
    (dict(), dict(remat=True, host=True)),
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


def collectives(degrees, **options):
    """Collectives among several devices in the compiled forward pass; those in the body of a scan count once."""
    declared, mesh = flux2.declare(CONFIG), make_mesh(**degrees)
    f = flux2.forward(declared, mesh, **options)
    lowered = jax.jit(lambda m, *x: f(m, *x, TIMES, image_ids=IDS, guidance=GUIDANCE)).lower(
        layout.abstract(declared, mesh), *GIVEN
    )
    return hlo.collectives(lowered.compile())


def test_collectives_are_those_of_the_docstrings():
    """Conditions 1, modulation 1; a block of two streams 2 x 2, of one 1; the result 1 all-gather over what splits it.

    The compiler makes one all-reduce of the text's second and the image's first.
    """
    assert collectives(dict(tensor=4)) == {"all-reduce": 1 + 1 + 3 + 1}
    seq = {"all-reduce": 1 + 1, "all-gather": 4 + 1 + 1, "reduce-scatter": 4 + 1}
    assert collectives(dict(tensor=4), residual="seq") == seq
    # Three all-to-all in each attention; the mask of the padding is gathered, once where the compiler sees it is one.
    found = collectives(dict(context=4))
    assert 1 < found.pop("all-gather") <= 1 + 2 and found == {"all-to-all": 3 + 3}


def test_queries_and_keys_of_both_streams_are_turned_at_once():
    """Each kind of block swaps the numbers of pairs in one step: compilers write out what there is of them."""
    f = flux2.forward(flux2.declare(CONFIG), make_mesh())
    model = layout.abstract(flux2.declare(CONFIG), make_mesh())
    lowered = jax.jit(lambda m, *x: f(m, *x, TIMES, image_ids=IDS, guidance=GUIDANCE)).lower(model, *GIVEN)
    assert len(re.findall(r"stablehlo\.reverse.* : tensor<.*x2xf32>", lowered.as_text())) == 2


@pytest.mark.parametrize("name", flux2.PRESETS)
def test_tensor_axes_split_all_but_the_smallest_weights(name):
    """Of a published model at most 2% is whole on every device; the modulation is not."""
    declared = flux2.declare(flux2.PRESETS[name])
    whole = {path: p.nbytes for path, p in layout.named(declared).items() if not p.split}
    assert sum(whole.values()) <= 0.02 * sum(p.nbytes for p in layout.named(declared).values())
    assert not [path for path in whole if "modulation" in path]


def test_everything_that_does_not_go_together_is_refused_at_once():
    f = flux2.forward(flux2.declare(CONFIG), make_mesh())
    model = layout.abstract(flux2.declare(CONFIG), make_mesh())
    image, text = GIVEN
    with pytest.raises(InputError) as error:
        f(model, image[:, :, :4], text[:, :, :3], TIMES, image_ids=IDS[:, :3])
    for part in ("image: width 4", "text: width 3", "image_ids: axes=3", "guidance: missing"):
        assert part in str(error.value)
    with pytest.raises((InputError, TypeError), match="residual"):
        flux2.forward(flux2.declare(CONFIG), make_mesh(), residual="half")
    with pytest.raises(InputError, match="heads=8 does not divide by 3"):
        flux2.forward(flux2.declare(CONFIG), make_mesh(tensor=3))
    with pytest.raises(InputError, match=r"axes=\(2, 4\) are 6 dims in all, head_dim=12"):
        Config(head_dim=12, axes=(2, 4))


def test_klein_is_not_told_a_guidance():
    declared = flux2.declare(Config(heads=2, head_dim=8, mlp=8, text=4, guidance=False, axes=(2, 2, 2, 2)))
    assert declared.conditions.guidance is None
    f, text = flux2.forward(declared, make_mesh()), np.zeros((1, 2, 4), np.float32)
    with pytest.raises(InputError, match="guidance: the model is not told it"):
        f(
            layout.abstract(declared, make_mesh()), np.zeros((1, 4, 128), np.float32), text, TIMES[:1],
            image_ids=flux2.image_ids(2, 2), guidance=TIMES[:1],
        )  # fmt: skip
