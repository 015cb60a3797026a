"""The CLIP image encoder on meshes: the same numbers as on one device, the collectives it promises, its options."""

import dataclasses
import math

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh

from shardzoo.errors import InputError
from shardzoo.zoo import clip_vision, layout
from shardzoo.zoo.clip_vision import Config
from shardzoo.zoo.families import config_from_json, config_to_json, find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh

B = 3
CONFIG = Config(embed=48, mlp=40, layers=3, heads=8, image=21, patch=7, norm_eps=1e-4)
rng = np.random.default_rng(0)
PIXELS = rng.normal(size=(B, 3, 21, 21)).astype(np.float32)
COTANGENT = rng.normal(size=(B, 10, 48)).astype(np.float32)


def run(degrees, at_rest=(), config=CONFIG, **options):
    """The output and the gradients of a weighted sum of it, for weights and pixels."""
    declared = clip_vision.declare(config)
    values = harsh(declared)
    for axis in at_rest:
        declared = layout.split_at_rest(declared, axis, Degrees(**degrees), smallest=16)
        assert any(axis in p.rest.values() for p in layout.named(declared.blocks).values())
    mesh = make_mesh(**degrees)
    f = clip_vision.forward(declared, mesh, **options)

    def total(model, pixels):
        out = f(model, pixels)
        return jnp.sum(out * (COTANGENT if out.ndim == 3 else COTANGENT[:, 0])), out

    model = layout.place(declared, mesh, values)
    (_, out), (grads, pixels) = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(model, PIXELS)
    grads = layout.named(grads)
    # A bias of all keys changes no softmax: its gradient is rounding noise.
    grads["blocks.attn.qkv.bias"] = grads["blocks.attn.qkv.bias"][:, ::2]
    return jax.tree.map(np.asarray, (out, grads, pixels))


@pytest.fixture(scope="module")
def one_device():
    return {state: run({}, hidden_state=state) for state in (-2, "pooled")}


@pytest.mark.parametrize(
    "degrees, at_rest, state",
    [
        (dict(tensor=2), (), -2),
        (dict(tensor=8), (), "pooled"),
        (dict(data=2), ("data",), -2),
        (dict(context=3), (), -2),
        (dict(context=2, tensor=4), ("context",), -2),
        (dict(data=2, context=2, tensor=2), ("context", "data"), -2),
        (dict(data=2, context=2, tensor=2), ("data",), "pooled"),
    ],
    ids=str,
)
def test_mesh_parity(one_device, degrees, at_rest, state):
    """Forward and gradient on a mesh, at 1e-5 of one device's."""
    assert_close(run(degrees, at_rest, hidden_state=state), one_device[state])


@pytest.mark.parametrize(
    "degrees, want",
    [
        (dict(tensor=2), {"all-reduce": 2}),
        (dict(tensor=2, context=2, data=2), {"all-reduce": 2}),
        (dict(context=4), {}),
        (dict(data=4), {}),
    ],
    ids=str,
)
def test_collectives(degrees, want):
    """What the docstring of `Block` says, once (the scan's body)."""
    declared, mesh = clip_vision.declare(CONFIG), make_mesh(**degrees)
    pixels = jax.ShapeDtypeStruct((4, 3, 21, 21), jnp.float32)
    f = jax.jit(clip_vision.forward(declared, mesh))
    compiled = f.lower(layout.abstract(declared, mesh), pixels).compile()
    assert hlo.collectives(compiled) == want


def test_blocks_after_the_hidden_state_are_not_run():
    declared, mesh = clip_vision.declare(CONFIG), make_mesh(tensor=2)
    values = harsh(declared)
    broken = dataclasses.replace(values, norm=jax.tree.map(lambda w: w * np.nan, values.norm))
    broken.blocks.attn.qkv.weight[2:] = np.nan
    f = jax.jit(clip_vision.forward(declared, mesh))
    assert np.isfinite(np.asarray(f(layout.place(declared, mesh, broken), PIXELS))).all()


def test_refusals():
    declared, mesh = clip_vision.declare(CONFIG), make_mesh()
    with pytest.raises(InputError, match="heads=8"):
        clip_vision.forward(declared, make_mesh(tensor=3))
    with pytest.raises(InputError, match="pipe=2"):
        clip_vision.forward(declared, make_mesh(pipe=2))
    for state in (4, -5):
        with pytest.raises(InputError, match=f"hidden_state={state} is not one of the 4: use -4 to 3"):
            clip_vision.forward(declared, mesh, hidden_state=state)
    model = layout.place(declared, mesh, harsh(declared))
    with pytest.raises(InputError, match=r"\[3, 28, 21\] where the model takes \[3, 21, 21\]"):
        clip_vision.forward(declared, mesh)(model, np.zeros((1, 3, 28, 21), np.float32))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layers=0, mlp=-1), r"mlp=-1(.|\n)*layers=0"),
        (dict(heads=7), "embed=48 does not divide by heads=7"),
        (dict(patch=22), "image=21 is smaller than patch=22"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_the_preset_has_its_published_size():
    family, config = find_preset("clip-vision/vit-h-14")
    assert sum(math.prod(p.shape) for p in layout.named(family.declare(config)).values()) == 630_766_080
    assert config.tokens == 257 and config_from_json(Config, config_to_json(config)) == config
