"""The CLIP text encoder on meshes: the same numbers as on one device, the collectives it promises, its options."""

import dataclasses
import math

import equinox as eqx
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh

from shardzoo.errors import InputError
from shardzoo.zoo import clip_text, layout
from shardzoo.zoo.clip_text import Config
from shardzoo.zoo.families import TraceSizes, config_from_json, config_to_json, find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh

B, S = 3, 11
slow = pytest.mark.slow
CONFIG = Config(vocab=64, embed=48, mlp=40, layers=3, heads=8, positions=13, norm_eps=1e-4)
rng = np.random.default_rng(0)
IDS = rng.integers(0, 64, (B, S)).astype(np.int32)
MASK = np.arange(S) < np.array([11, 4, 7])[:, None]
COTANGENT = rng.normal(size=(B, S, 48)).astype(np.float32)


def run(degrees, at_rest=(), **options):
    """The output and the gradients of a weighted sum of it."""
    declared = clip_text.declare(CONFIG)
    values = harsh(declared)
    for axis in at_rest:
        declared = layout.split_at_rest(declared, axis, Degrees(**degrees), smallest=16)
        assert any(axis in p.rest.values() for p in layout.named(declared.blocks).values())
    mesh = make_mesh(**degrees)
    f = clip_text.forward(declared, mesh, **options)

    def total(model):
        out = f(model, IDS, mask=None if options else MASK)
        return jnp.sum(out * (COTANGENT if out.ndim == 3 else COTANGENT[:, 0])), out

    model = layout.place(declared, mesh, values)
    (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model)
    grads = layout.named(grads)
    # A bias of all keys changes no softmax: its gradient is rounding noise.
    grads["blocks.attn.qkv.bias"] = grads["blocks.attn.qkv.bias"][:, ::2]
    return jax.tree.map(np.asarray, (out, grads))


POOLED, LAST = {}, {"hidden_state": "last"}


@pytest.fixture(scope="module")
def one_device():
    return [run({}, **options) for options in (POOLED, LAST)]


@pytest.mark.parametrize(
    "degrees, at_rest, options",
    [
        (dict(tensor=2), (), POOLED),
        (dict(data=2, context=2, tensor=2), ("context", "data"), LAST),
        pytest.param(dict(tensor=8), (), LAST, marks=slow),
        pytest.param(dict(data=2), ("data",), POOLED, marks=slow),
        pytest.param(dict(data=4, tensor=2), (), LAST, marks=slow),
        pytest.param(dict(context=3), (), POOLED, marks=slow),
        pytest.param(dict(context=2, tensor=4), ("context",), LAST, marks=slow),
        pytest.param(dict(data=2, context=2, tensor=2), ("context", "data"), POOLED, marks=slow),
        pytest.param(dict(data=2, context=2, tensor=2), ("data",), LAST, marks=slow),
    ],
    ids=str,
)
def test_mesh_parity(one_device, degrees, at_rest, options):
    """Forward and gradient on a mesh, at 1e-5 of one device's."""
    assert_close(run(degrees, at_rest, **options), one_device[bool(options)])


@pytest.mark.parametrize(
    "degrees, want",
    [
        (dict(tensor=2), {"all-reduce": 3}),
        (dict(tensor=2, context=2, data=2), {"all-reduce": 3}),
        (dict(context=4), {}),
        (dict(data=4), {}),
    ],
    ids=str,
)
def test_collectives(degrees, want):
    """That of the embedding, and what the docstring of `Block` says, once (the scan's body)."""
    declared, mesh = clip_text.declare(CONFIG), make_mesh(**degrees)
    f = jax.jit(clip_text.forward(declared, mesh))
    ids = jax.ShapeDtypeStruct((4, S), jnp.int32)
    compiled = f.lower(layout.abstract(declared, mesh), ids).compile()
    assert hlo.collectives(compiled) == want


def test_blocks_after_the_hidden_state_are_not_run():
    declared, mesh = clip_text.declare(CONFIG), make_mesh(tensor=2)
    values = harsh(declared)
    broken = eqx.tree_at(lambda m: m.norm, values, jax.tree.map(lambda w: w * np.nan, values.norm))
    broken.blocks.attn.qkv.weight[2:] = np.nan
    f = jax.jit(clip_text.forward(declared, mesh, hidden_state=-2))
    assert np.isfinite(np.asarray(f(layout.place(declared, mesh, broken), IDS))).all()


def test_tokens_after_a_token_change_nothing_before_it():
    declared, mesh = clip_text.declare(CONFIG), make_mesh()
    model = layout.place(declared, mesh, harsh(declared))
    f = jax.jit(clip_text.forward(declared, mesh, hidden_state="last"))
    other = IDS.copy()
    other[:, 6:] = 1
    np.testing.assert_allclose(f(model, other)[:, :6], f(model, IDS)[:, :6], atol=1e-5)


def test_refusals():
    declared, mesh = clip_text.declare(CONFIG), make_mesh()
    with pytest.raises(InputError, match="heads=8"):
        clip_text.forward(declared, make_mesh(tensor=3))
    with pytest.raises(InputError, match="pipe=2"):
        clip_text.forward(declared, make_mesh(pipe=2))
    for state in (4, -5):
        with pytest.raises(InputError, match=rf"hidden_state={state} .* use -4 to 3, or 'last' or 'pooled'"):
            clip_text.forward(declared, mesh, hidden_state=state)
    model = layout.place(declared, mesh, harsh(declared))
    with pytest.raises(InputError, match="seq=14 is not within 1 and positions=13: truncate"):
        clip_text.forward(declared, mesh)(model, np.zeros((1, 14), np.int32))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layers=0, positions=-1), r"layers=0(.|\n)*positions=-1"),
        (dict(heads=7), "embed=48 does not divide by heads=7"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_the_preset_has_its_published_size():
    family, config = find_preset("clip-text/clip-l")
    declared = family.declare(config)
    assert sum(math.prod(p.shape) for p in layout.named(declared).values()) == 123_060_480
    assert config_from_json(Config, config_to_json(config)) == config
    assert config_from_json(Config, config_to_json(CONFIG)) == CONFIG
    function, (ids,) = family.trace(declared, make_mesh(), TraceSizes(batch=2))
    assert ids.shape == (2, 77)
    assert jax.eval_shape(function, layout.abstract(declared, make_mesh()), ids).shape == (2, 768)
