"""The image autoencoders on meshes: as on one device, with the collectives they promise; tokens, refusals."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close

from shardzoo.errors import InputError
from shardzoo.zoo import image_vae, layout
from shardzoo.zoo.families import TraceSizes, config_from_json, config_to_json, find_preset
from shardzoo.zoo.image_vae import Config
from shardzoo.zoo.mesh import Degrees, make_mesh

UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # these programs run for a moment and compile for long
PLAIN = Config(
    latent_channels=3, widths=(4, 6), decoder_widths=(4, 6), blocks=1, groups=2, scale=0.5, shift=0.3
)  # fmt: skip
FULL = dataclasses.replace(PLAIN, quant=True, post_quant=True, statistics=True)
# At least two channels a group: one alone takes its bias off again, and the gradient of that is nothing but rounding.
DEEP = dataclasses.replace(FULL, widths=(4, 6, 8), decoder_widths=(8, 6, 4), blocks=2, statistics=False)
slow = pytest.mark.slow


def harsh(declared, seed=0):
    """Values of every size about one after each layer, biases off zero, norms and variances about one."""
    rng = np.random.default_rng(seed)

    def draw(path, p):
        if "norm" in path and path.endswith("weight"):
            return 1 + 0.5 * rng.normal(size=p.shape)
        if path.endswith("variance"):
            return rng.uniform(0.2, 2, size=p.shape)
        return rng.normal(size=p.shape) * (0.5 if p.ndim == 1 else math.prod(p.shape[1:]) ** -0.5)

    drawn = [draw(*item).astype(np.float32) for item in layout.named(declared).items()]
    return jax.tree.unflatten(jax.tree.structure(declared), drawn)


def live_on(declared, mesh, dtype=np.float32):
    return layout.place(declared, mesh, jax.tree.map(lambda v: v.astype(dtype), harsh(declared)))


def direction(name, declared, mesh):
    """The function of a direction with one array as its result."""
    if name == "decode":
        return image_vae.decode(declared, mesh, clamp=False)
    run = image_vae.encode(declared, mesh)
    return lambda model, images: jnp.concatenate(run(model, images), axis=1)


def given(shape, dtype=np.float32):
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(dtype)


def run(config, name, shape, degrees):
    declared, mesh = image_vae.declare(config), make_mesh(**degrees)
    f = jax.jit(direction(name, declared, mesh), compiler_options=UNOPTIMIZED)
    return np.asarray(f(live_on(declared, mesh), given(shape)))


def gradient(config, name, shape, degrees, at_rest=None):
    """Gradients for model and input of a weighted sum, in float64: in float32 those of some leaves cancel out."""
    with jax.enable_x64(True):
        declared, mesh = image_vae.declare(config, np.float64), make_mesh(**degrees)
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
    "decode plain": (PLAIN, "decode", (3, 3, 5, 4)),
    "encode plain": (PLAIN, "encode", (3, 3, 11, 5)),
    "decode with statistics": (FULL, "decode", (1, 3, 10, 4)),
    "encode with statistics": (FULL, "encode", (1, 3, 21, 9)),
    "decode deep": (DEEP, "decode", (2, 3, 9, 3)),
    "encode deep": (DEEP, "encode", (2, 3, 37, 9)),
    "decode one row": (PLAIN, "decode", (1, 3, 1, 4)),
}
ONE: dict = {}


def one_device(how, case):
    if (how, case) not in ONE:
        ONE[how, case] = how(*CASES[case], {})
    return ONE[how, case]


MESHES = [
    dict(data=2), dict(context=2), dict(context=3), dict(tensor=4), dict(context=8), dict(data=2, tensor=3),
    dict(context=2, tensor=4), dict(data=2, context=2, tensor=2),
]  # fmt: skip
EVERY = [(case, degrees) for case in CASES for degrees in MESHES]


def marked(quick):
    return [item if item in quick else pytest.param(*item, marks=slow) for item in EVERY]


QUICK = [("decode plain", degrees) for degrees in (dict(context=3), dict(data=2, context=2, tensor=2))]
QUICK += [("encode with statistics", dict(context=2, tensor=4)), ("decode one row", dict(context=8))]


@pytest.mark.parametrize("case, degrees", marked(QUICK), ids=str)
def test_mesh_parity(case, degrees):
    """At 1e-5 of one device's."""
    assert_close(run(*CASES[case], degrees), one_device(run, case))


def test_decode_outside_of_jit():
    declared, mesh = image_vae.declare(PLAIN), make_mesh(context=2)
    got = direction("decode", declared, mesh)(live_on(declared, mesh), given((3, 3, 5, 4)))
    assert_close(np.asarray(got), one_device(run, "decode plain"))


QUICK_GRADIENTS = [("decode with statistics", dict(context=3))]


@pytest.mark.parametrize("case, degrees", marked(QUICK_GRADIENTS), ids=str)
def test_gradients_on_meshes(case, degrees):
    assert_close(gradient(*CASES[case], degrees), one_device(gradient, case), tolerance=1e-9)


@pytest.mark.parametrize("axis", ["data", "context"])
@slow
def test_weights_split_at_rest(axis):
    case = CASES["decode with statistics"]
    assert_close(gradient(*case, {axis: 2}, at_rest=axis), one_device(gradient, "decode with statistics"), 1e-9)


def collectives(name, shape, degrees):
    declared, mesh = image_vae.declare(DEEP), make_mesh(**degrees)
    f = jax.jit(direction(name, declared, mesh))
    text = f.lower(layout.abstract(declared, mesh), jax.ShapeDtypeStruct(shape, jnp.float32)).as_text()
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
    found = {kind: len(re.findall(rf"stablehlo\.{kind}\b", text)) for kind in kinds}
    return {kind: n for kind, n in found.items() if n}


def promised(name):
    """Two permutations for each convolution of 3 x 3 pixels, one for each of stride 2; an all-gather for each norm and
    one for the attention."""
    levels, halved = len(DEEP.widths), len(DEEP.widths) - 1
    blocks = 2 + levels * (DEEP.blocks if name == "encode" else DEEP.blocks + 1)
    permutations = 2 * (2 * blocks + 2) + (halved if name == "encode" else 2 * halved)
    return {"collective_permute": permutations, "all_gather": 2 * blocks + 1 + 1 + 1}


@pytest.mark.parametrize("name", ["encode", "decode"])
@pytest.mark.parametrize("degrees", [dict(context=4), dict(context=2, tensor=2)], ids=str)
def test_collectives(name, degrees):
    shape = (1, 3, 32, 8) if name == "encode" else (1, 3, 8, 4)
    assert collectives(name, shape, degrees) == promised(name)


def test_the_batch_alone_needs_no_exchange():
    assert "collective_permute" not in collectives("decode", (2, 3, 8, 4), dict(data=2))


def test_tokens_and_latents():
    """All places of a channel in a square come together, row by row; the inverse undoes it."""
    latents = np.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6).astype(np.float32)
    tokens = image_vae.pack(latents)
    assert tokens.shape == (2, 6, 12)
    np.testing.assert_array_equal(tokens[1, 4], latents[1, :, 2:4, 2:4].reshape(-1))
    np.testing.assert_array_equal(image_vae.unpack(tokens, 4, 6), latents)
    np.testing.assert_array_equal(image_vae.unpack(image_vae.pack(latents, patch=1), 4, 6, patch=1), latents)
    with pytest.raises(InputError, match="height=3 of latents does not divide by 2"):
        image_vae.pack(latents[:, :, :3])
    with pytest.raises(InputError, match=r"seq=6 are not the 2 x 4 tokens(.|\n)*packed=11"):
        image_vae.unpack(tokens[:, :, :11], 4, 8)


@pytest.mark.parametrize("preset", ["flux1-vae", "flux2-vae"])
def test_units_are_undone(preset):
    config = dataclasses.replace(find_preset(f"image-vae/{preset}")[1], widths=(4,), decoder_widths=(4,), groups=1)
    model = live_on(image_vae.declare(config), make_mesh())
    latents = given((2, config.latent_channels, 4, 6))
    back = image_vae.denormalize(model, image_vae.normalize(model, latents))
    np.testing.assert_allclose(back, latents, atol=1e-5)
    if preset == "flux1-vae":
        np.testing.assert_allclose(image_vae.normalize(model, latents), (latents - 0.1159) * 0.3611, atol=1e-6)


def test_refusals():
    declared, mesh = image_vae.declare(FULL), make_mesh()
    model = live_on(declared, mesh)
    encode, decode = image_vae.encode(declared, mesh), image_vae.decode(declared, mesh)
    with pytest.raises(InputError, match="pipe=2"):
        image_vae.decode(declared, make_mesh(pipe=2))
    with pytest.raises(InputError, match=r"channels=4 are not the 3(.|\n)*width=1 is less than 2"):
        encode(model, given((1, 4, 4, 1)))
    with pytest.raises(InputError, match="height=3 of latents does not divide by 2"):
        encode(model, given((1, 3, 6, 4)))
    with pytest.raises(InputError, match="channels=4 are not the 3"):
        decode(model, given((1, 4, 2, 2)))
    with pytest.raises(InputError, match="width=3 of latents does not divide by 2"):
        decode(model, given((1, 3, 2, 3)))
    for f, name, shape in ((encode, "images", (0, 3, 4, 4)), (decode, "latents", (0, 3, 2, 2))):
        with pytest.raises(InputError, match=f"{name}=.*holds nothing"):
            f(model, given(shape))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(blocks=0, patch=0), r"blocks=0(.|\n)*patch=0"),
        (dict(widths=()), r"widths=\(\) are not at least one"),
        (dict(widths=(4, 7)), r"widths=\(4, 7\) do not divide by groups=2"),
        (dict(decoder_widths=(4,)), "decoder_widths has 1 entries where widths has 2"),
        (dict(scale=0.0), "scale=0.0"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(PLAIN, **change)


@pytest.mark.parametrize("preset, parameters", [("flux1-vae", 83_819_683), ("flux2-vae", 84_046_115 + 256)])
def test_presets_have_their_published_sizes(preset, parameters):
    family, config = find_preset(f"image-vae/{preset}")
    declared = family.declare(config)
    assert sum(math.prod(p.shape) for p in layout.named(declared).values()) == parameters
    assert config_from_json(Config, config_to_json(config)) == config
    function, (latents,) = family.trace(declared, make_mesh(), TraceSizes(height=64, width=96))
    images = jax.eval_shape(function, layout.abstract(declared, make_mesh()), latents)
    assert images.shape == (1, 3, 64, 96)
