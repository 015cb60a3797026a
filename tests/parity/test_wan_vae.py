"""The Wan autoencoders against diffusers: moments, videos, gradients, over lengths, batches and odd sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_values import arrays, error, rms
from torch_wan_vae import CASES, build, values

from shardzoo.zoo import layout, wan_vae
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # these programs run for a moment and compile for long
CODERS = ("encode", "decode")
slow = pytest.mark.slow


@functools.cache
def both(name):
    """The torch model, our config, declaration and live model of the same weights."""
    model, _, config = build(name)
    declared = wan_vae.declare(config)
    live = layout.place(declared, make_mesh(), layout.fill(declared, values(arrays(model), config)))
    return model, config, declared, live


def compiled(f):
    return jax.jit(f, compiler_options=UNOPTIMIZED)


def uniform(*shape, seed=1):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def statistics(config):
    return [np.asarray(x, np.float32)[:, None, None, None] for x in (config.latent_mean, config.latent_std)]


SIZES = [  # case, batch, frames, rows and columns of latents
    ("2.1", 1, 9, 4, 4),  # the tiny case of the family
    ("2.2", 1, 9, 4, 4),
    pytest.param("2.1", 2, 1, 3, 5, marks=slow),
    pytest.param("2.1", 1, 13, 5, 2, marks=slow),
    pytest.param("2.2", 2, 5, 1, 3, marks=slow),
    pytest.param("2.2", 1, 17, 3, 2, marks=slow),
    ("qwen-image", 1, 1, 4, 4),  # one frame, as for images
    pytest.param("qwen-image", 2, 1, 3, 5, marks=slow),
    pytest.param("qwen-image, four channels", 1, 1, 5, 2, marks=slow),
    pytest.param("2.1, narrow", 2, 9, 5, 7, marks=slow),
    pytest.param("2.1, two levels", 1, 5, 2, 7, marks=slow),
    pytest.param("2.1, one level", 1, 5, 9, 6, marks=slow),
    pytest.param("2.2, no patches", 2, 17, 3, 5, marks=slow),
]


@pytest.mark.parametrize("name, batch, frames, rows, columns", SIZES)
def test_encode(name, batch, frames, rows, columns):
    model, config, declared, live = both(name)
    video = uniform(batch, config.channels, frames, rows * config.space_factor, columns * config.space_factor)
    with torch.no_grad():
        want = model.encode(torch.tensor(video)).latent_dist
    got = compiled(wan_vae.encode(declared, make_mesh(), normalized=False))(live, video)
    assert error(got.mean, want.mean) <= TOLERANCE
    assert error(got.log_variance, want.logvar) <= TOLERANCE


@pytest.mark.parametrize("name, batch, frames, rows, columns", SIZES)
def test_decode(name, batch, frames, rows, columns):
    """From normalised latents, as the pipelines call it."""
    model, config, declared, live = both(name)
    latents = normal(batch, config.latent_channels, 1 + (frames - 1) // config.time_factor, rows, columns)
    mean, std = statistics(config)
    with torch.no_grad():
        want = model.decode(torch.tensor(latents * std + mean)).sample
    got = compiled(wan_vae.decode(declared, make_mesh()))(live, latents)
    assert error(got, want) <= TOLERANCE


def test_normalized_moments():
    _, config, declared, live = both("2.1, two levels")
    video = uniform(1, 3, 1, 8, 8)
    raw = compiled(wan_vae.encode(declared, make_mesh(), normalized=False))(live, video)
    got = compiled(wan_vae.encode(declared, make_mesh()))(live, video)
    mean, std = statistics(config)
    np.testing.assert_allclose(got.mean, (raw.mean - mean) / std, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.log_variance, raw.log_variance - 2 * np.log(std), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("height, width", [(21, 14), pytest.param(13, 27, marks=slow)])
def test_sizes_that_halve_to_odd_ones(height, width):
    """As the source, the encoder drops what is left over at the right and the bottom, level by level."""
    model, _, declared, live = both("2.1, narrow")
    video = uniform(1, 3, 1, height, width)
    with torch.no_grad():
        want = model.encode(torch.tensor(video)).latent_dist.mean
    got = compiled(wan_vae.encode(declared, make_mesh(), normalized=False))(live, video)
    assert error(got.mean, want) <= TOLERANCE


def test_black_pixels_and_unclamped_values():
    """Channels that are all zero before a norm, and pixels beyond 1."""
    model, _, declared, live = both("2.1, narrow")
    latents = 3 * normal(1, 4, 1, 2, 3)
    with torch.no_grad():
        inner = model.post_quant_conv(torch.tensor(latents))
        model.clear_cache()
        model._conv_idx = [0]
        want = model.decoder(inner, feat_cache=model._feat_map, feat_idx=model._conv_idx, first_chunk=True)
        model.clear_cache()
    got = compiled(wan_vae.decode(declared, make_mesh(), normalized=False, clamp=False))(live, latents)
    assert np.abs(np.asarray(got)).max() > 1 and error(got, want) <= TOLERANCE


def gradients(name, coder, batch, frames, rows, columns):
    """Per parameter the gradient of a weighted sum of what comes out, theirs and ours."""
    model, config, declared, live = both(name)
    model.zero_grad()
    if coder == "encode":
        given = uniform(batch, config.channels, frames, rows * config.space_factor, columns * config.space_factor)
        out = model._encode(torch.tensor(given))
        run = wan_vae.encode(declared, make_mesh(), normalized=False, remat=True)
    else:
        given = normal(batch, config.latent_channels, 1 + (frames - 1) // config.time_factor, rows, columns)
        out = model.decode(torch.tensor(given)).sample
        run = wan_vae.decode(declared, make_mesh(), normalized=False)
    cotangent = normal(*out.shape, seed=2)
    (out * torch.tensor(cotangent)).sum().backward()

    def total(live):
        result = run(live, given)
        result = jnp.concatenate(result, axis=1) if coder == "encode" else result
        return jnp.sum(result * cotangent)

    return values(arrays(model, grads=True), config), layout.named(compiled(jax.grad(total))(live))


@pytest.mark.parametrize(
    "name, coder",
    [("2.1, two levels", "decode"), pytest.param("2.1, two levels", "encode", marks=slow)]
    + [pytest.param(n, c, marks=slow) for n in CASES if "level" not in n and "qwen" not in n for c in CODERS],
)
def test_gradients(name, coder):
    want, got = gradients(name, coder, 2, 9, 2, 3)
    theirs = ("encoder.", "quant.") if coder == "encode" else ("decoder.", "post_quant.")
    for path, grad in got.items():
        if path.startswith(theirs):
            assert error(grad, want[path]) <= TOLERANCE, path
        else:
            assert not np.asarray(grad).any() and not want[path].any(), path


@pytest.mark.parametrize(
    "name", ["2.1, two levels", *(pytest.param(n, marks=slow) for n in ("2.1, narrow", "2.1", "2.2"))]
)
def test_bfloat16(name):
    """By root mean square, as far from the reference in float32 as the reference in bfloat16 is, and a quarter."""
    model, _, config = build(name)
    rounded = {k: v.astype(jnp.bfloat16).astype(np.float32) for k, v in arrays(model).items()}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.copy_(torch.tensor(rounded[path]))
    latents = normal(2, config.latent_channels, 3, 4, 5).astype(jnp.bfloat16).astype(np.float32)
    with torch.no_grad():
        exact = model.decode(torch.tensor(latents)).sample.numpy()
        half = model.to(torch.bfloat16).decode(torch.tensor(latents).bfloat16()).sample.float().numpy()
    declared = wan_vae.declare(config, jnp.bfloat16)
    filled = {k: v.astype(jnp.bfloat16) for k, v in values(rounded, config).items()}
    live = layout.place(declared, make_mesh(), layout.fill(declared, filled))
    got = compiled(wan_vae.decode(declared, make_mesh(), normalized=False))(live, latents)
    assert got.dtype == jnp.bfloat16
    assert rms(np.asarray(got, np.float32) - exact) <= 1.25 * rms(half - exact)


def test_every_case_is_used():
    assert {getattr(size, "values", size)[0] for size in SIZES} == set(CASES)
