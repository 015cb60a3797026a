"""Qwen-Image on meshes: the same numbers as on one device, the collectives it promises, what it refuses."""

import dataclasses
import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh

from shardzoo.errors import InputError
from shardzoo.zoo import layout, qwen_image
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.qwen_image import Config

CONFIG = Config(
    in_channels=6, out_channels=8, heads=8, head_dim=12, layers=2, mlp=48, text=10, axes=(2, 4, 6),
    zero_cond=True, added_cond=True,
)  # fmt: skip
B, GRIDS, TEXT = 3, ((1, 3, 4), (1, 1, 3)), 7  # 15 tokens and 7: they divide by no degree of the meshes but 3
rng = np.random.default_rng(0)
SEQ = 15
GIVEN = [rng.normal(size=s).astype(np.float32) for s in ((B, SEQ, 6), (B, TEXT, 10))]
TIMES, KINDS = rng.uniform(0, 1, B).astype(np.float32), np.array([0, 1, 1])
MASK = np.arange(TEXT) < np.array([[7], [2], [5]])
COTANGENT = rng.normal(size=(B, SEQ, 8)).astype(np.float32)
CALL = dict(grids=GRIDS, kinds=KINDS)


def run(degrees, at_rest=None, host=False, mask=MASK, **options):
    """The result, and the gradients of a weighted sum of it for the model, the image and the text."""
    declared = qwen_image.declare(CONFIG)
    values = harsh(declared)
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, degrees, smallest=64)
        assert any(p.rest for p in layout.named(declared.double).values())
    declared = layout.keep_on_host(declared, smallest=64) if host else declared
    mesh = make_mesh(data=degrees.data, context=degrees.context, tensor=degrees.tensor)
    f = qwen_image.forward(declared, mesh, **options)

    def total(model, *given):
        out = f(model, *given, TIMES, text_mask=mask, **CALL)
        return jnp.sum(out * COTANGENT), out

    model = layout.place(declared, mesh, values)
    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    (_, out), (grads, *rest) = both(model, *GIVEN)
    return jax.tree.map(np.asarray, (out, layout.named(grads), *rest))


@functools.cache
def one_device(masked=True):
    return run(Degrees(), mask=MASK if masked else None)


MESHES = [
    (dict(tensor=2), dict(host=True)),
    (dict(tensor=2, context=4), dict(residual="seq", at_rest="context")),
]
MORE_MESHES = [
    (dict(tensor=4), dict(residual="seq")),
    (dict(context=4), dict(at_rest="context")),
    (dict(context=3), dict(remat=True)),  # heads do not divide: keys are gathered
    (dict(data=2, tensor=2, context=2), dict(at_rest="data")),
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


@pytest.mark.slow
def test_no_mask_is_a_mask_of_all():
    assert_close(run(Degrees(tensor=2, context=2), mask=None), one_device(masked=False))
    assert_close(run(Degrees(context=4), mask=np.ones_like(MASK)), one_device(masked=False))


def test_hidden_text_changes_nothing_and_alone_it_is_no_nan():
    """Text that the mask hides is not seen; a row of which all is hidden has its image alone."""
    declared, mesh = qwen_image.declare(CONFIG), make_mesh()
    f = jax.jit(qwen_image.forward(declared, mesh), static_argnames="grids")
    model = layout.place(declared, mesh, harsh(declared))
    mask = MASK & np.array([[True], [True], [False]])
    image, text = GIVEN
    want = np.asarray(f(model, image, text, TIMES, text_mask=mask, **CALL))
    other = np.where(mask[..., None], text, rng.normal(size=text.shape).astype(np.float32) * 9)
    got = np.asarray(f(model, image, other, TIMES, text_mask=mask, **CALL))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
    assert np.isfinite(want).all() and not np.allclose(want, f(model, image, other, TIMES, **CALL))


def collectives(degrees, masked=True, **options):
    """Collectives among several devices in the compiled forward pass; those in the body of a scan count once."""
    declared, mesh = qwen_image.declare(CONFIG), make_mesh(**degrees)
    f = qwen_image.forward(declared, mesh, **options)
    mask = MASK if masked else None
    lowered = jax.jit(lambda m, *x: f(m, *x, TIMES, text_mask=mask, **CALL)).lower(
        layout.abstract(declared, mesh), *GIVEN
    )
    return hlo.collectives(lowered.compile())


def test_collectives_are_those_of_the_docstrings():
    """Conditions 1, modulation of all blocks 1; a block 2 x 2; the result 1 all-gather over what splits it.

    The compiler makes one all-reduce of the text's second and the image's first.
    """
    assert collectives(dict(tensor=4)) == {"all-reduce": 1 + 1 + 3}
    seq = {"all-reduce": 1 + 1, "all-gather": 4 + 1, "reduce-scatter": 4}
    assert collectives(dict(tensor=4), residual="seq") == seq
    # Three all-to-all in each attention; the mask is gathered, and the result over both axes: 3 rows are cut out of 4.
    assert collectives(dict(context=4, data=2)) == {"all-gather": 1 + 2, "all-to-all": 3}


def test_everything_that_does_not_go_together_is_refused_at_once():
    declared = qwen_image.declare(CONFIG)
    f, model = qwen_image.forward(declared, make_mesh()), layout.abstract(declared, make_mesh())
    image, text = GIVEN
    with pytest.raises(InputError) as error:
        f(model, image[:, :, :4], text[..., :3], TIMES, grids=((1, 3, 4),))
    for part in ("image: width 4", "text: width 3", "are 12 tokens, image has seq=15", "kinds: missing"):
        assert part in str(error.value)
    with pytest.raises(InputError, match=r"grids=\(\(1, 0, 4\),\) are not"):
        f(model, image, text, TIMES, grids=((1, 0, 4),), kinds=KINDS)
    plain = qwen_image.declare(dataclasses.replace(CONFIG, added_cond=False))
    with pytest.raises(InputError, match="kinds: the model has none"):
        qwen_image.forward(plain, make_mesh())(model, image, text, TIMES, **CALL)
    with pytest.raises((InputError, TypeError), match="residual"):
        qwen_image.forward(declared, make_mesh(), residual="half")
    with pytest.raises(InputError, match="heads=8 does not divide by 3"):
        qwen_image.forward(declared, make_mesh(tensor=3))
    with pytest.raises(InputError) as error:
        Config(head_dim=12, axes=(2, 4), out_channels=6, layers=0)
    for part in ("layers=0", r"axes=(2, 4)", "head_dim=12", "out_channels=6 does not divide by 4"):
        assert part in str(error.value)


def test_presets_are_of_the_published_size():
    counts = {name: sum(np.prod(p.shape) for p in layout.named(qwen_image.declare(c)).values())
              for name, c in qwen_image.PRESETS.items()}  # fmt: skip
    assert counts == {
        "qwen-image": 20_430_401_088,
        "edit-2511": 20_430_401_088,
        "layered": 20_430_401_088 + 2 * 3072,
    }
