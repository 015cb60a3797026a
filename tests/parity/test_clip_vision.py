"""The CLIP image encoder against transformers: every hidden state, the pooled output, gradients, bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_clip import CASES, build, values
from torch_values import arrays, error, rms

from shardzoo.zoo import clip_vision, layout
from shardzoo.zoo.mesh import make_mesh

B, TOLERANCE = 3, 5e-5


def inputs(config, shape):
    rng = np.random.default_rng(5)
    pixels = rng.normal(size=(B, config.channels, config.image, config.image)).astype(np.float32)
    return pixels, rng.normal(size=shape).astype(np.float32)


def reference(model, pixels, dtype=torch.float32):
    model = model.to(dtype)
    model.zero_grad()
    out = model(pixel_values=torch.tensor(pixels), output_hidden_states=True)
    return [*out.hidden_states, out.pooler_output]


def ours(named, config, pixels, cotangent=None, stored=np.float32, **options):
    declared, mesh = clip_vision.declare(config, stored), make_mesh()
    live = layout.place(declared, mesh, layout.fill(declared, {k: v.astype(stored) for k, v in named.items()}))
    f = clip_vision.forward(declared, mesh, **options)
    if cotangent is None:
        return np.asarray(jax.jit(f)(live, pixels).astype(jnp.float32))
    grads = jax.jit(jax.grad(lambda model: jnp.sum(f(model, pixels) * cotangent, dtype=jnp.float32)))(live)
    return {k: np.asarray(v.astype(jnp.float32)) for k, v in layout.named(grads).items()}


def assert_gradients(grads, wanted):
    assert grads.keys() == wanted.keys()
    for path, grad in grads.items():
        if path == "blocks.attn.qkv.bias":  # a bias of all keys changes no softmax: rounding noise on both sides
            assert np.abs(grad[:, 1]).max() <= TOLERANCE * np.abs(grad).max()
            grad, wanted[path] = grad[:, ::2], wanted[path][:, ::2]
        assert error(grad, wanted[path]) <= TOLERANCE, path


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    """Wan's choice, the last but one, with its gradients; blocks that are not run get none."""
    model, config = build(name)
    pixels, cotangent = inputs(config, (B, config.tokens, config.embed))
    out = reference(model, pixels)
    (out[-3] * torch.tensor(cotangent)).sum().backward()
    named = values(arrays(model), config)
    got = ours(named, config, pixels)
    assert got.shape == (B, config.tokens, config.embed)
    assert error(got, out[-3].detach().numpy()) <= TOLERANCE
    assert_gradients(ours(named, config, pixels, cotangent), values(arrays(model, grads=True), config))


@pytest.mark.parametrize("name", ["published tiny", "quick gelu"])
def test_every_hidden_state_and_the_pooled_output(name):
    model, config = build(name)
    pixels, _ = inputs(config, ())
    *states, pooled = (x.detach().numpy() for x in reference(model, pixels))
    named = values(arrays(model), config)
    assert len(states) == config.layers + 1
    for i, want in enumerate(states):
        assert error(ours(named, config, pixels, hidden_state=i), want) <= TOLERANCE
    assert error(ours(named, config, pixels, hidden_state=-1), states[-1]) <= TOLERANCE
    assert error(ours(named, config, pixels, hidden_state="pooled"), pooled) <= TOLERANCE


def test_gradients_of_the_pooled_output():
    model, config = build("quick gelu")
    pixels, cotangent = inputs(config, (B, config.embed))
    (reference(model, pixels)[-1] * torch.tensor(cotangent)).sum().backward()
    grads = ours(values(arrays(model), config), config, pixels, cotangent, hidden_state="pooled")
    assert_gradients(grads, values(arrays(model, grads=True), config))


@pytest.mark.parametrize("name", ["published tiny", "quick gelu"])
def test_bfloat16(name):
    """By root mean square, about as far from the reference in float32 as the reference in bfloat16 is."""
    model, config = build(name)
    rounded = {k: v.astype(jnp.bfloat16).astype(np.float32) for k, v in arrays(model).items()}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.copy_(torch.tensor(rounded[path]))
    pixels, _ = inputs(config, ())
    with torch.no_grad():
        exact = reference(model, pixels)[-3].numpy()
        half = reference(model, pixels, torch.bfloat16)[-3].float().numpy()
    named = values(rounded, config)
    got = ours(named, config, pixels, stored=jnp.bfloat16)
    assert rms(got - exact) <= 1.25 * rms(half - exact)
    mixed = ours(named, config, pixels, stored=jnp.bfloat16, dtype=jnp.float32)
    assert error(mixed, exact) <= TOLERANCE
