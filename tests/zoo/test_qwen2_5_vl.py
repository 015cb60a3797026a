"""Qwen2.5-VL's vision tower on meshes, the features in its language tower, collectives, refusals."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh
from vision_prompt import seen_and_read

from shardzoo.errors import InputError
from shardzoo.zoo import decoder, layout, qwen2_5_vl, qwen2_5_vl_inputs
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.qwen2_5_vl import Config
from shardzoo.zoo.rope import Rope

CONFIG = Config(embed=32, mlp=24, layers=3, heads=4, channels=2, patch=3, window=18, whole=(1,), out=16)
TEXT = decoder.Config(
    vocab=40, embed=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24, qkv_bias=True,
    rope=Rope(sections=(2, 1, 1)),
)  # fmt: skip
GRIDS = ((1, 8, 10), (1, 2, 6))  # 23 squares
IMAGE = 39
rng = np.random.default_rng(0)
PIXELS = rng.normal(size=(92, CONFIG.pixels)).astype(np.float32)
TOKENS = rng.integers(0, 30, (2, 27))
TOKENS[0, 3:23], TOKENS[1, 20:23] = IMAGE, IMAGE
MASK = np.arange(27) >= np.array([[0], [9]])
COTANGENT = rng.normal(size=(2, 27, 32)).astype(np.float32)
WHERE = dict(
    positions=qwen2_5_vl_inputs.positions(TOKENS, GRIDS, IMAGE, mask=MASK),
    places=qwen2_5_vl_inputs.places(TOKENS, IMAGE),
)


def run(degrees, at_rest=None, residual="whole", **options):
    """Features, two states of the prompt that they are in, and the gradients of a weighted sum of the latter."""
    parts = qwen2_5_vl.declare(CONFIG), decoder.encoder_part(decoder.declare(TEXT), (1, 2))

    def read(declared, mesh):
        encode = decoder.encode(declared, mesh, layers=(1, 2), residual=residual)

        def f(model, features):
            states = encode(model, TOKENS, MASK, features=features, **WHERE)
            return jnp.sum(states * COTANGENT), states

        return f

    see = functools.partial(qwen2_5_vl.forward, **options)
    return seen_and_read(parts, [*map(harsh, parts)], degrees, 2, see, read, PIXELS, GRIDS, at_rest)


@functools.cache
def one_device():
    return run(Degrees())


@pytest.mark.parametrize(
    "degrees, options",
    [
        (dict(tensor=2), dict(residual="seq")),
        (dict(data=2, tensor=2, context=2), dict(at_rest="data")),
        (dict(context=3), dict()),
        pytest.param(dict(tensor=4), dict(remat=True), marks=pytest.mark.slow),
        pytest.param(dict(context=4), dict(at_rest="context"), marks=pytest.mark.slow),
        pytest.param(dict(context=2, tensor=2), dict(residual="seq", at_rest="context"), marks=pytest.mark.slow),
        pytest.param(dict(context=8), dict(), marks=pytest.mark.slow),
        pytest.param(dict(context=5), dict(remat=True), marks=pytest.mark.slow),
        pytest.param(dict(data=4, tensor=2), dict(at_rest="data", residual="seq"), marks=pytest.mark.slow),
        pytest.param(dict(context=2, tensor=4), dict(at_rest="context"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mesh_parity(degrees, options):
    """Both towers, forward and gradient, on a mesh, at 1e-5 of one device's."""
    assert_close(run(Degrees(**degrees), **options), one_device())


def collectives(degrees):
    """Collectives among several devices in the compiled forward pass; those in the body of a scan count once."""
    declared, mesh = qwen2_5_vl.declare(CONFIG), make_mesh(**degrees)
    f = jax.jit(lambda m, x: qwen2_5_vl.forward(declared, mesh)(m, x, grids=GRIDS))
    text = f.lower(layout.abstract(declared, mesh), PIXELS).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r"replica_groups={{\d+,", line)]
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    return tuple(sum(f" {name}(" in line for line in lines) for name in names)


def test_collectives_are_those_of_the_docstrings():
    assert collectives(dict(tensor=4)) == (2 + 1, 0, 0, 0)  # of a block, of the merger
    reduced, gathered, scattered, exchanged = collectives(dict(context=4))
    assert (reduced, scattered, exchanged) == (0, 0, 3) and gathered == 1 + 1  # segments; features
    assert collectives(dict(data=4)) == (0, 0, 0, 0)


def test_windows_see_nothing_outside_themselves():
    """Without a block that attends to the whole frame, a square's feature depends on its window alone."""
    config = Config(embed=32, mlp=24, layers=2, heads=4, channels=2, patch=3, window=12, whole=(), out=16)
    declared, mesh = qwen2_5_vl.declare(config), make_mesh()
    model = layout.place(declared, mesh, harsh(declared))
    f = jax.jit(lambda m, x: qwen2_5_vl.forward(declared, mesh)(m, x, grids=((1, 8, 12),)))
    pixels = rng.normal(size=(96, config.pixels)).astype(np.float32)
    changed = pixels.copy()
    changed[:4] += 1  # the first square: its window is squares 0, 1 and, of the next row of 6, 6, 7
    moved = np.abs(np.asarray(f(model, pixels)) - np.asarray(f(model, changed))).max(axis=1) > 0
    assert set(np.flatnonzero(moved)) == {0, 1, 6, 7}


def test_what_does_not_fit_is_refused():
    declared = qwen2_5_vl.declare(CONFIG)
    f, model = qwen2_5_vl.forward(declared, make_mesh()), layout.abstract(declared, make_mesh())
    with pytest.raises(InputError) as error:
        f(model, PIXELS[:, :5], grids=((1, 3, 4),))
    for part in ("5 numbers a patch", r"(1, 3, 4) do not divide by merge=2", "are 12 patches, pixels has seq=92"):
        assert part in str(error.value)
    with pytest.raises(InputError, match="heads=4 does not divide by 5"):
        qwen2_5_vl.forward(declared, make_mesh(tensor=5))
    with pytest.raises(InputError) as error:
        Config(embed=36, layers=2, whole=(2,))
    for part in ("embed=36 does not divide by 64", "whole=(2,): 2 is no block from 0 to 1"):
        assert part in str(error.value)
    with pytest.raises(InputError, match="window=20 is smaller than a feature's 28"):
        Config(window=20)


def test_preset_is_of_the_published_size():
    declared = layout.named(qwen2_5_vl.declare(qwen2_5_vl.PRESETS["qwen2.5-vl-7b"]))
    assert sum(math.prod(p.shape) for p in declared.values()) == 676_550_144
