"""The image autoencoders against diffusers: moments, images, units of latents, tokens, gradients, over odd sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import Flux2Pipeline, FluxPipeline
from torch_image_vae import CASES, arrays, build, values
from torch_values import error, rms

from shardzoo.zoo import image_vae, layout
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # these programs run for a moment and compile for long
slow = pytest.mark.slow


@functools.cache
def both(name):
    """The torch model, our config, declaration and live model of the same weights."""
    model, _, config = build(name)
    declared = image_vae.declare(config)
    live = layout.place(declared, make_mesh(), layout.fill(declared, values(arrays(model), config)))
    return model, config, declared, live


def compiled(f):
    return jax.jit(f, compiler_options=UNOPTIMIZED)


def uniform(*shape, seed=1):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


SIZES = [  # case, batch, height and width of images
    ("flux1", 1, 32, 48),  # the tiny cases of both families
    pytest.param("flux2", 1, 32, 48, marks=slow),
    ("two levels", 2, 13, 6),
    ("two levels, statistics", 3, 5, 12),
    pytest.param("two levels", 1, 2, 3, marks=slow),
    pytest.param("flux1", 2, 41, 23, marks=slow),
    pytest.param("flux2", 2, 39, 64, marks=slow),
    ("three levels, narrow decoder", 2, 11, 22),
    ("one level, no attention", 2, 7, 5),
]


@pytest.mark.parametrize("name, batch, height, width", SIZES)
def test_encode(name, batch, height, width):
    model, _, declared, live = both(name)
    images = uniform(batch, 3, height, width)
    with torch.no_grad():
        want = model.encode(torch.tensor(images)).latent_dist
    got = compiled(image_vae.encode(declared, make_mesh(), normalized=False))(live, images)
    assert error(got.mean, want.mean) <= TOLERANCE
    assert error(got.log_variance, want.logvar) <= TOLERANCE


@pytest.mark.parametrize("name, batch, height, width", SIZES)
def test_decode(name, batch, height, width):
    model, config, declared, live = both(name)
    factor = config.space_factor
    latents = normal(batch, config.latent_channels, height // factor, width // factor)
    with torch.no_grad():
        want = model.decode(torch.tensor(latents)).sample
    got = compiled(image_vae.decode(declared, make_mesh(), normalized=False, clamp=False))(live, latents)
    assert np.abs(np.asarray(got)).max() > 1 and error(got, want) <= TOLERANCE


def theirs_as_tokens(model, config, latents):
    """Raw latents as the pipelines of diffusers give them to the transformer."""
    batch, channels, height, width = latents.shape
    latents = torch.tensor(latents)
    if config.statistics:
        latents = Flux2Pipeline._patchify_latents(latents)
        mean, std = _statistics(model)
        return Flux2Pipeline._pack_latents((latents - mean) / std).numpy()
    latents = (latents - model.config.shift_factor) * model.config.scaling_factor
    return FluxPipeline._pack_latents(latents, batch, channels, height, width).numpy()


def theirs_as_images(model, config, tokens, height, width):
    """Such tokens as images of this size."""
    tokens, factor = torch.tensor(tokens), config.space_factor
    if config.statistics:
        rows, columns = height // (2 * factor), width // (2 * factor)
        latents = tokens.reshape(len(tokens), rows, columns, -1).permute(0, 3, 1, 2)
        mean, std = _statistics(model)
        latents = Flux2Pipeline._unpatchify_latents(latents * std + mean)
    else:
        latents = FluxPipeline._unpack_latents(tokens, height, width, factor)
        latents = latents / model.config.scaling_factor + model.config.shift_factor
    return model.decode(latents).sample.detach().numpy()


def _statistics(model):
    mean, variance = model.bn.running_mean.view(1, -1, 1, 1), model.bn.running_var.view(1, -1, 1, 1)
    return mean, torch.sqrt(variance + model.config.batch_norm_eps)


@pytest.mark.parametrize("name", ["two levels", "two levels, statistics"])
def test_from_images_to_tokens_and_back(name):
    """As the pipelines do it, units and order of a token included; sizes whose latents are even."""
    model, config, declared, live = both(name)
    images = uniform(2, 3, 12, 20)
    with torch.no_grad():
        raw = model.encode(torch.tensor(images)).latent_dist.mean.numpy()
    want = theirs_as_tokens(model, config, raw)
    posterior = compiled(image_vae.encode(declared, make_mesh()))(live, images)
    tokens = image_vae.pack(posterior.mean)
    assert tokens.shape == (2, 15, 12) and error(tokens, want) <= TOLERANCE
    assert error(image_vae.pack(image_vae.normalize(live, raw)), want) <= TOLERANCE
    latents = image_vae.unpack(want, 6, 10)
    assert error(image_vae.denormalize(live, latents), raw) <= TOLERANCE
    got = compiled(image_vae.decode(declared, make_mesh(), clamp=False))(live, latents)
    pipeline = theirs_as_images(model, config, want, 12, 20)
    assert error(got, pipeline) <= TOLERANCE
    clamped = compiled(image_vae.decode(declared, make_mesh()))(live, latents)
    assert error(clamped, pipeline.clip(-1, 1)) <= TOLERANCE


@pytest.mark.parametrize("name", ["two levels", "two levels, statistics"])
def test_latents_are_drawn_from_the_posterior(name):
    """In raw and in normalised units alike, with the reference's variance."""
    model, _, declared, live = both(name)
    images, key = uniform(1, 3, 8, 8), jax.random.key(3)
    with torch.no_grad():
        want = model.encode(torch.tensor(images)).latent_dist
    raw = compiled(image_vae.encode(declared, make_mesh(), normalized=False))(live, images)
    noise = (raw.sample(key) - raw.mean) / want.std.numpy()
    assert error(noise, jax.random.normal(key, noise.shape)) <= TOLERANCE
    normalized = compiled(image_vae.encode(declared, make_mesh()))(live, images)
    assert error(image_vae.denormalize(live, normalized.sample(key)), raw.sample(key)) <= TOLERANCE


def gradients(name, coder, remat):
    """Per parameter the gradient of a weighted sum of what comes out, theirs and ours."""
    model, config, declared, live = both(name)
    model.zero_grad()
    factor = config.space_factor
    if coder == "encode":
        given = uniform(2, 3, 3 * factor, 5 * factor)
        out = model.encode(torch.tensor(given)).latent_dist.parameters
    else:
        given = normal(2, config.latent_channels, 3, 5)
        out = model.decode(torch.tensor(given)).sample
    cotangent = normal(*out.shape, seed=2)
    (out * torch.tensor(cotangent)).sum().backward()
    options = dict(normalized=False, remat=remat) | ({"clamp": False} if coder == "decode" else {})
    run = getattr(image_vae, coder)(declared, make_mesh(), **options)

    def total(live):
        result = run(live, given)
        return jnp.sum((jnp.concatenate(result, axis=1) if coder == "encode" else result) * cotangent)

    return values(arrays(model, grads=True), config), layout.named(compiled(jax.grad(total))(live))


def assert_gradients(name, coder, remat=False):
    want, got = gradients(name, coder, remat)
    theirs = ("encoder.", "quant.") if coder == "encode" else ("decoder.", "post_quant.")
    for path, grad in got.items():
        if path.endswith("attn.qkv.bias"):  # a bias of all keys changes no softmax: rounding noise on both sides
            assert np.abs(grad[1]).max() <= TOLERANCE * np.abs(grad).max() or not path.startswith(theirs)
            grad, want[path] = grad[::2], want[path][::2]
        if path.startswith(theirs):
            assert error(grad, want[path]) <= TOLERANCE, path
        else:
            assert not np.asarray(grad).any() and not want[path].any(), path


@pytest.mark.parametrize(
    "name, coder",
    [("two levels, statistics", "encode"), ("two levels", "decode")]
    + [pytest.param(name, coder, marks=slow) for name in CASES for coder in ("encode", "decode")],
)
def test_gradients(name, coder):
    assert_gradients(name, coder)


@pytest.mark.parametrize("coder", ["encode", "decode"])
@slow
def test_gradients_computed_again(coder):
    assert_gradients("two levels", coder, remat=True)


@pytest.mark.parametrize("name", ["two levels", pytest.param("flux1", marks=slow), pytest.param("flux2", marks=slow)])
def test_bfloat16(name):
    """By root mean square, as far from the reference in float32 as the reference in bfloat16 is, and a quarter."""
    model, _, config = build(name)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().float())
    named = arrays(model)
    latents = normal(2, config.latent_channels, 6, 10).astype(jnp.bfloat16).astype(np.float32)
    with torch.no_grad():
        exact = model.decode(torch.tensor(latents)).sample.numpy()
        half = model.to(torch.bfloat16).decode(torch.tensor(latents).bfloat16()).sample.float().numpy()
    declared = image_vae.declare(config, jnp.bfloat16)
    filled = {k: v.astype(jnp.bfloat16) for k, v in values(named, config).items()}
    live = layout.place(declared, make_mesh(), layout.fill(declared, filled))
    got = compiled(image_vae.decode(declared, make_mesh(), normalized=False, clamp=False))(live, latents)
    assert got.dtype == jnp.bfloat16
    assert rms(np.asarray(got, np.float32) - exact) <= 1.25 * rms(half - exact)


def test_every_case_is_used():
    assert {getattr(size, "values", size)[0] for size in SIZES} == set(CASES)
