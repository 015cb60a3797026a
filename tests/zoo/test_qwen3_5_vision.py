"""Qwen3.5's vision tower on meshes, its features in the text model, collectives, refusals."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh
from tiny_qwen3_5 import CONFIG as TEXT
from tiny_qwen3_5 import weights
from vision_prompt import seen_and_read

from shardzoo.errors import InputError
from shardzoo.zoo import layout, qwen3_5, qwen3_5_inputs, qwen3_5_vision
from shardzoo.zoo.families import config_from_json, config_to_json, find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.qwen3_5_vision import Config

CONFIG = Config(embed=32, mlp=24, layers=2, heads=4, channels=2, patch=3, out=32, positions=20)
IMAGES, VIDEOS = ((1, 8, 10), (1, 2, 6)), ((2, 2, 4),)  # 20 and 3 squares; two frames of 2
IMAGE, VIDEO = 47, 46
rng = np.random.default_rng(0)
PIXELS = rng.normal(size=(108, CONFIG.pixels)).astype(np.float32)
TOKENS = rng.integers(0, 40, (2, 27))
TOKENS[0, 3:23], TOKENS[1, 20:23] = IMAGE, IMAGE
TOKENS[0, 24:26], TOKENS[1, 10:12] = VIDEO, VIDEO
MASK = np.arange(27) >= np.array([[0], [9]])
COTANGENT = rng.normal(size=(2, 27, 48)).astype(np.float32) * MASK[..., None]
WHERE = dict(
    positions=qwen3_5_inputs.positions(TOKENS, IMAGES, IMAGE, videos=VIDEOS, video_token=VIDEO, mask=MASK),
    places=qwen3_5_inputs.places(TOKENS, IMAGE, VIDEO),
)


def run(degrees, at_rest=None, residual="whole", **options):
    """Features, logits of the prompt that they are in, and the gradients of a weighted sum of the latter."""
    parts = qwen3_5_vision.declare(CONFIG), qwen3_5.declare(TEXT)

    def read(declared, mesh):
        forward = qwen3_5.forward(declared, mesh, residual=residual)

        def f(model, features):
            logits = forward(model, TOKENS, mask=MASK, features=features, **WHERE)
            return jnp.sum(logits * COTANGENT), logits * MASK[..., None]

        return f

    see, values = functools.partial(qwen3_5_vision.forward, **options), (harsh(parts[0]), weights(parts[1]))
    return seen_and_read(parts, values, degrees, 4, see, read, PIXELS, IMAGES + VIDEOS, at_rest)


@functools.cache
def one_device():
    return run(Degrees())


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees, options",
    [
        (dict(data=2, tensor=2, context=2), dict(at_rest="data", residual="seq")),
        (dict(tensor=2), dict(residual="seq")),
        (dict(context=3), dict()),
        (dict(tensor=4), dict(remat=True)),
        (dict(context=4), dict(at_rest="context")),
        (dict(context=2, tensor=2), dict(residual="seq", at_rest="context")),
        (dict(context=8), dict()),
        (dict(context=5), dict(remat=True)),
        (dict(data=4, tensor=2), dict(at_rest="data", residual="seq")),
        (dict(context=2, tensor=4), dict(at_rest="context")),
    ],
    ids=str,
)
def test_mesh_parity_in_the_prompt(degrees, options):
    """Both parts, forward and gradient, on a mesh, at 1e-5 of one device's."""
    assert_close(run(Degrees(**degrees), **options), one_device())


def run_tower(at_rest=None, **degrees):
    """Features and the gradients of a weighted sum of them."""
    declared, mesh = qwen3_5_vision.declare(CONFIG), make_mesh(**degrees)
    values = harsh(declared)
    declared = layout.split_at_rest(declared, at_rest, Degrees(**degrees), smallest=64) if at_rest else declared
    see = qwen3_5_vision.forward(declared, mesh, remat=bool(at_rest))
    way = np.random.default_rng(1).normal(size=(27, CONFIG.out)).astype(np.float32)

    def total(model, pixels):
        features = see(model, pixels, grids=IMAGES + VIDEOS)
        return jnp.sum(features * way), features

    both = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, out), (grads, of_pixels) = both(layout.place(declared, mesh, values), PIXELS)
    return jax.tree.map(np.asarray, (out, layout.named(grads), of_pixels))


def test_mesh_parity():
    want = run_tower()
    assert_close(run_tower(context=2, tensor=2, at_rest="context"), want)
    assert_close(run_tower(context=3), want)


def collectives(degrees):
    """Collectives among several devices in the compiled forward pass; those in the body of a scan count once."""
    declared, mesh = qwen3_5_vision.declare(CONFIG), make_mesh(**degrees)
    f = jax.jit(lambda m, x: qwen3_5_vision.forward(declared, mesh)(m, x, grids=IMAGES + VIDEOS))
    text = f.lower(layout.abstract(declared, mesh), PIXELS).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r"replica_groups={{\d+,", line)]
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    return tuple(sum(f" {name}(" in line for line in lines) for name in names)


def test_collectives_are_those_of_the_docstrings():
    assert collectives(dict(tensor=4)) == (2 + 1, 0, 0, 0)  # of a block, of the merger
    assert collectives(dict(context=4)) == (0, 1 + 1, 0, 3)  # segments and features; queries, keys and values, output
    assert collectives(dict(data=4)) == (0, 0, 0, 0)


def test_patches_see_their_own_frame_alone():
    declared, mesh = qwen3_5_vision.declare(CONFIG), make_mesh()
    model = layout.place(declared, mesh, harsh(declared))
    f = jax.jit(lambda m, x: qwen3_5_vision.forward(declared, mesh)(m, x, grids=IMAGES + VIDEOS))
    changed = PIXELS.copy()
    changed[92] += 1  # the first patch of the video: its frame is features 23 and 24
    moved = np.abs(np.asarray(f(model, PIXELS)) - np.asarray(f(model, changed))).max(axis=1) > 0
    assert set(np.flatnonzero(moved)) == {23, 24}


def test_what_does_not_fit_is_refused():
    declared = qwen3_5_vision.declare(CONFIG)
    f, model = qwen3_5_vision.forward(declared, make_mesh()), layout.abstract(declared, make_mesh())
    with pytest.raises(InputError) as error:
        f(model, PIXELS[:, :5], grids=((1, 3, 4),))
    for part in ("qwen3_5_vision.forward", "5 numbers a patch", r"(1, 3, 4) do not divide by merge=2", "seq=108"):
        assert part in str(error.value)
    with pytest.raises(InputError, match="heads=4 does not divide by 8"):
        qwen3_5_vision.forward(declared, make_mesh(tensor=8))
    with pytest.raises(InputError, match=r"embed=36 does not divide by 64"):
        dataclasses.replace(CONFIG, embed=36, heads=16)
    with pytest.raises(InputError) as error:
        dataclasses.replace(CONFIG, positions=0, mlp=0)
    assert "positions=0" in str(error.value) and "mlp=0" in str(error.value)


def test_preset_is_of_the_published_size():
    family, config = find_preset("qwen3-5-vision/qwen3.5-27b")
    declared = family.declare(config)
    assert sum(math.prod(p.shape) for p in layout.named(declared).values()) == 460_730_096
    assert config_from_json(Config, config_to_json(config)) == config
    for tensor in (1, 2, 4, 8, 16):
        layout.audit(declared, Degrees(tensor=tensor, context=2))
