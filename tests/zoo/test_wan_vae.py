"""The Wan autoencoders on meshes: as on one device, piece by piece as at once, with the collectives they promise."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close

from shardzoo.errors import InputError
from shardzoo.zoo import layout, wan_vae
from shardzoo.zoo.families import TraceSizes, config_from_json, config_to_json, find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.wan_vae import Config

UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # these programs run for a moment and compile for long
PLAIN = Config(
    latent_channels=3, width=4, decoder_width=4, multipliers=(1, 2), blocks=1, halve_time=(True,),
    latent_mean=(0.1, 0.2, -0.3), latent_std=(1.0, 2.0, 0.5),
)  # fmt: skip
SHORT = dataclasses.replace(PLAIN, shortcuts=True, patch=2, multipliers=(1, 1))
ONE_LEVEL = dataclasses.replace(PLAIN, multipliers=(2,), halve_time=())
DEEP = dataclasses.replace(PLAIN, multipliers=(1, 2, 3), halve_time=(False, True), decoder_width=6)
slow = pytest.mark.slow


def harsh(declared, seed=0):
    """Values of every size about one after each layer, biases off zero, norms off one."""
    rng = np.random.default_rng(seed)

    def draw(path, p):
        if "norm" in path:
            return 1 + 0.5 * rng.normal(size=p.shape)
        return rng.normal(size=p.shape) * (0.5 if p.ndim == 1 else math.prod(p.shape[1:]) ** -0.5)

    drawn = [draw(*item).astype(np.float32) for item in layout.named(declared).items()]
    return jax.tree.unflatten(jax.tree.structure(declared), drawn)


def live_on(declared, mesh, dtype=np.float32):
    return layout.place(declared, mesh, jax.tree.map(lambda v: v.astype(dtype), harsh(declared)))


def direction(name, declared, mesh, **options):
    """The function of a direction with one array as its result."""
    run = getattr(wan_vae, name)(declared, mesh, **options)
    return run if name == "decode" else lambda model, video: jnp.concatenate(run(model, video), axis=1)


def given(shape, dtype=np.float32):
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(dtype)


def run(config, name, shape, degrees):
    declared, mesh = wan_vae.declare(config), make_mesh(**degrees)
    f = jax.jit(direction(name, declared, mesh), compiler_options=UNOPTIMIZED)
    return np.asarray(f(live_on(declared, mesh), given(shape)))


def gradient(config, name, shape, degrees, at_rest=None):
    """Gradients for model and input of a weighted sum, in float64: in float32 those of some leaves cancel out."""
    with jax.enable_x64(True):
        declared, mesh = wan_vae.declare(config, np.float64), make_mesh(**degrees)
        if at_rest:
            declared = layout.split_at_rest(declared, at_rest, Degrees(**degrees), smallest=4)
        f = direction(name, declared, mesh)

        def total(model, x):
            out = f(model, x)
            return jnp.sum(out * np.random.default_rng(3).normal(size=out.shape))

        grad = jax.jit(jax.grad(total, (0, 1)), compiler_options=UNOPTIMIZED)
        model, x = grad(live_on(declared, mesh, np.float64), given(shape, np.float64))
        return jax.tree.map(np.asarray, (layout.named(model), x))


CASES = {  # heights that do not divide, and batches; the encoder's are odd at a level
    "decode one level": (ONE_LEVEL, "decode", (3, 3, 2, 5, 4)),
    "decode plain": (PLAIN, "decode", (3, 3, 3, 5, 4)),
    "encode plain": (PLAIN, "encode", (3, 3, 5, 11, 5)),
    "decode with shortcuts": (SHORT, "decode", (1, 3, 3, 5, 2)),
    "encode with shortcuts": (SHORT, "encode", (1, 3, 5, 20, 8)),
    "decode deep": (DEEP, "decode", (2, 3, 2, 9, 3)),
    "encode deep": (DEEP, "encode", (2, 3, 5, 37, 9)),
}
ONE: dict = {}


def one_device(how, case):
    if (how, case) not in ONE:
        ONE[how, case] = how(*CASES[case], {})
    return ONE[how, case]


MESHES = [dict(context=2), dict(context=3), dict(context=8), dict(data=2, context=2, tensor=2), dict(tensor=4)]
QUICK = [("decode plain", dict(context=3)), ("encode plain", dict(data=2, context=2, tensor=2))]
EVERY = [(case, degrees) for case in CASES for degrees in MESHES]


def marked(quick):
    return [item if item in quick else pytest.param(*item, marks=slow) for item in EVERY]


@pytest.mark.parametrize("case, degrees", marked(QUICK), ids=str)
def test_mesh_parity(case, degrees):
    """At 1e-5 of one device's."""
    assert_close(run(*CASES[case], degrees), one_device(run, case))


@pytest.mark.parametrize("case, degrees", marked([("decode one level", dict(context=3))]), ids=str)
def test_gradients_on_meshes(case, degrees):
    assert_close(gradient(*CASES[case], degrees), one_device(gradient, case), tolerance=1e-9)


@pytest.mark.parametrize("axis", ["data", "context"])
@slow
def test_weights_split_at_rest(axis):
    case = "decode one level"
    assert_close(gradient(*CASES[case], {axis: 2}, at_rest=axis), one_device(gradient, case), tolerance=1e-9)


@pytest.mark.parametrize(
    "config, name, shape",
    [(PLAIN, "decode", (1, 3, 4, 3, 4)), pytest.param(SHORT, "encode", (3, 3, 13, 12, 8), marks=slow)],
)
def test_pieces_are_the_whole(config, name, shape):
    """Through the caches as explicit state, on a mesh, from pieces as they come."""
    declared, mesh = wan_vae.declare(config), make_mesh(context=2)
    model, video = live_on(declared, mesh), given(shape)
    stream = getattr(wan_vae, f"{name}_stream")(declared, mesh)
    assert [piece.shape[2] for piece in stream.cut(video)] == [1] + [stream.piece] * ((shape[2] - 1) // stream.piece)
    pieces = [jnp.concatenate(p, axis=1) if name == "encode" else p for p in stream.run(model, stream.cut(video))]
    whole = jax.jit(direction(name, declared, mesh), compiler_options=UNOPTIMIZED)(model, video)
    np.testing.assert_allclose(np.concatenate(pieces, axis=2), whole, rtol=1e-5, atol=1e-5)


def test_padded_rows_may_hold_anything():
    """The output of one row does not change with the mesh's padding, also where it is most of the frame."""
    shape = (1, 3, 1, 1, 4)  # one latent row on eight devices
    assert_close(run(PLAIN, "decode", shape, dict(context=8)), run(PLAIN, "decode", shape, {}))


def collectives(name, shape, degrees):
    declared, mesh = wan_vae.declare(DEEP), make_mesh(**degrees)
    f = jax.jit(direction(name, declared, mesh))
    text = f.lower(layout.abstract(declared, mesh), jax.ShapeDtypeStruct(shape, jnp.float32)).as_text()
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
    found = {kind: len(re.findall(rf"stablehlo\.{kind}\b", text)) for kind in kinds}
    return {kind: n for kind, n in found.items() if n}


def step_permutations(name):
    """Two for each convolution of 3 x 3 pixels, one for each of stride 2, by the config."""
    levels, halved = len(DEEP.multipliers), len(DEEP.halve_time)
    middle_and_ends = 2 * 2 + 2
    if name == "encode":
        return 2 * (middle_and_ends + levels * 2 * DEEP.blocks) + halved
    return 2 * (middle_and_ends + levels * 2 * (DEEP.blocks + 1) + halved)


@pytest.mark.parametrize("name", ["encode", "decode"])
@pytest.mark.parametrize("degrees", [dict(context=4), dict(context=2, tensor=2)], ids=str)
def test_collectives(name, degrees):
    """Of two steps, the first and the scan's body, as the docstrings derive."""
    shape = (1, 3, 9, 32, 8) if name == "encode" else (1, 3, 3, 8, 4)
    want = {"collective_permute": 2 * step_permutations(name), "all_gather": 2}
    assert collectives(name, shape, degrees) == want


def test_the_batch_alone_needs_no_exchange():
    assert "collective_permute" not in collectives("decode", (2, 3, 3, 8, 4), dict(data=2))


def test_temporaries_do_not_grow_with_the_frames():
    declared, mesh = wan_vae.declare(PLAIN), make_mesh()
    f = jax.jit(wan_vae.decode(declared, mesh), compiler_options=UNOPTIMIZED)

    def temporaries(frames):
        latents = jax.ShapeDtypeStruct((1, 3, frames, 16, 16), jnp.float32)
        return f.lower(layout.abstract(declared, mesh), latents).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(21) <= 1.02 * temporaries(5)


def test_refusals():
    declared, mesh = wan_vae.declare(SHORT), make_mesh()
    model = live_on(declared, mesh)
    encode, decode = wan_vae.encode(declared, mesh), wan_vae.decode(declared, mesh)
    with pytest.raises(InputError, match="pipe=2"):
        wan_vae.decode(declared, make_mesh(pipe=2))
    with pytest.raises(InputError, match=r"frames=4 are not 1 \+ a multiple of 4(.|\n)*height=6 does not divide by 4"):
        encode(model, given((1, 3, 4, 6, 8)))
    with pytest.raises(InputError, match="channels=4 are not the 3"):
        decode(model, given((1, 4, 1, 2, 2)))
    plain = wan_vae.declare(PLAIN)
    with pytest.raises(InputError, match="width=1 is less than 2"):
        wan_vae.encode(plain, mesh)(live_on(plain, mesh), given((1, 3, 1, 4, 1)))
    with pytest.raises(InputError, match="frames=2"):
        next(wan_vae.decode_stream(declared, mesh).run(model, [given((1, 3, 2, 2, 2))]))
    with pytest.raises(InputError, match=r"video=\(0, 3, 1, 2, 2\) holds nothing"):
        decode(model, given((0, 3, 1, 2, 2)))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(blocks=0), "blocks=0"),
        (dict(halve_time=()), "halve_time has 0 entries where 1 levels"),
        (dict(latent_mean=(1.0,)), "latent_mean has 1 numbers for latent_channels=3"),
        (dict(latent_std=(1.0, 0.0, 2.0)), "latent_std"),
        (dict(multipliers=()), "multipliers"),
        (dict(decoder_width=5, multipliers=(1, 1)), "decoder_width=5 gives odd widths"),
        (dict(shortcuts=True, multipliers=(1, 3)), "do not divide by 12"),
        (dict(multipliers=(1,) * 4, halve_time=(True,) * 3), "halves more than twice"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(PLAIN, **change)


@pytest.mark.parametrize("preset, parameters", [("wan2.1-vae", 126_892_531), ("wan2.2-vae", 704_688_668)])
def test_presets_have_their_published_sizes(preset, parameters):
    family, config = find_preset(f"wan-vae/{preset}")
    declared = family.declare(config)
    assert sum(math.prod(p.shape) for p in layout.named(declared).values()) == parameters
    assert config_from_json(Config, config_to_json(config)) == config
    function, (latents,) = family.trace(declared, make_mesh(), TraceSizes(frames=5, height=64, width=96))
    video = jax.eval_shape(function, layout.abstract(declared, make_mesh()), latents)
    assert video.shape == (1, 3, 5, 64, 96)
