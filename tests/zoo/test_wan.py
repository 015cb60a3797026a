"""Wan on meshes: the same numbers as on one device, the collectives it promises, what it refuses."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh

from shardzoo.zoo import layout, wan
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.wan import Config, Timesteps

CONFIG = Config(in_channels=3, out_channels=2, heads=8, head_dim=8, layers=2, mlp=48, text=12, freq=16)
IMAGE = dataclasses.replace(CONFIG, in_channels=5, image=8, image_positions=6)
CONFIGS = {"text": CONFIG, "image": IMAGE}
GRID = (3, 3, 5)  # 45 tokens: they divide by no degree of the meshes but 3
TOKENS, B = math.prod(GRID), 3
VIDEO = (GRID[0], 2 * GRID[1], 2 * GRID[2])
rng = np.random.default_rng(0)
LATENTS = rng.normal(size=(B, 5, *VIDEO)).astype(np.float32)
TEXT = rng.normal(size=(B, 7, 12)).astype(np.float32)
PICTURES = rng.normal(size=(2 * B, 3, 8)).astype(np.float32)
COTANGENT = rng.normal(size=(B, 2, *VIDEO)).astype(np.float32)
FEW = Timesteps(np.array([[0, 900], [0, 40], [3, 700]]), rng.integers(0, 2, (B, TOKENS)))
TIMES = {
    "row": np.array([999.0, 250.5, 30.25], np.float32),
    "few": FEW,
    "token": np.take_along_axis(FEW.values, FEW.index, axis=1),
}


def inputs(config):
    return {"text": TEXT} if config.image is None else {"text": TEXT, "image": PICTURES}


def run(config, degrees, at_rest=None, times="row", kept=False, **options):
    """The result, and the gradients of a weighted sum of it for the model, the latents, the text and the image.

    With `kept` the keys of text and image are made by `wan.context`, and the gradient goes through it.
    """
    declared = wan.declare(config)
    values = harsh(declared)
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, degrees, smallest=64)
        assert any(p.rest for p in layout.named(declared.blocks).values())
    mesh = make_mesh(**{f.name: getattr(degrees, f.name) for f in dataclasses.fields(degrees)})
    f, make = wan.forward(declared, mesh, **options), wan.context(declared, mesh)

    def total(model, latents, given):
        how = {"context": make(model, **given)} if kept else given
        out = f(model, latents, TIMES[times], **how)
        assert out.shape == (B, 2, *VIDEO)
        return jnp.sum(out * COTANGENT), out

    model = layout.place(declared, mesh, values)
    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    (_, out), (grads, *rest) = both(model, LATENTS[:, : config.in_channels], inputs(config))
    return jax.tree.map(np.asarray, (out, layout.named(grads), *rest))


@functools.cache
def one_device(name, times):
    return run(CONFIGS[name], Degrees(), times=times)


MESHES = [
    ("text", dict(tensor=2), dict()),
    ("image", dict(tensor=4), dict(residual="seq", kept=True)),
    ("image", dict(context=2), dict(at_rest="context")),
    ("text", dict(context=3), dict(remat=True)),  # heads do not divide: keys are gathered
    ("image", dict(tensor=2, context=4), dict(residual="seq", at_rest="context")),
    ("text", dict(data=2, tensor=2, context=2), dict(at_rest="data", times="few")),
    ("text", dict(tensor=2, context=2), dict(residual="seq", times="token")),
]
MORE_MESHES = [
    ("image", dict(), dict(kept=True, remat=True)),
    ("image", dict(tensor=2), dict(residual="seq")),
    ("image", dict(context=4), dict(kept=True, at_rest="context")),
    ("image", dict(tensor=2, context=2), dict(residual="whole", kept=True)),
    ("image", dict(tensor=2, context=3), dict(residual="seq")),
    ("image", dict(data=2), dict(at_rest="data", kept=True)),
    ("image", dict(data=4, context=2), dict(residual="seq")),
    ("text", dict(context=8), dict(at_rest="context")),
    ("text", dict(tensor=8), dict(residual="seq", times="few")),
    ("text", dict(tensor=4, context=2), dict(times="token")),
    ("text", dict(context=5), dict(times="few")),
    ("text", dict(tensor=2, context=4), dict(residual="seq", remat=True, times="few")),
]


@pytest.mark.parametrize(
    "name, degrees, options",
    [*MESHES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_MESHES)],
    ids=str,
)
def test_mesh_parity(name, degrees, options):
    """Forward and gradient on a mesh, at 1e-5 of one device's."""
    want = one_device(name, "few" if options.get("times") == "token" else options.get("times", "row"))
    assert_close(run(CONFIGS[name], Degrees(**degrees), **options), want)
