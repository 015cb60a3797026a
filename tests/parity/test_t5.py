"""The T5 family against transformers: outputs, gradients, padding on both sides, bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_t5 import CASES, build, values
from torch_values import arrays, error, rms

from shardzoo.zoo import layout, t5
from shardzoo.zoo.mesh import make_mesh

B, S = 3, 17
LENGTHS = np.array([17, 6, 11])
TOLERANCE = 5e-5
rng = np.random.default_rng(3)
TOKENS = rng.integers(0, 128, (B, S))
COTANGENT = rng.normal(size=(B, S, 64)).astype(np.float32)
MASK = np.stack([np.arange(S) >= 0, np.arange(S) >= 11, np.arange(S) < 9])  # no padding; on the left; on the right
RIGHT = np.arange(S) < LENGTHS[:, None]
EVERY = np.ones((B, S), bool)


def reference(model, mask, dtype=torch.float32, tokens=TOKENS, weigh=EVERY):
    """The output; leaves the gradients of sum(output * COTANGENT where `weigh`)."""
    model = model.to(dtype)
    model.zero_grad()
    how = {} if mask is None else {"attention_mask": torch.tensor(mask).long()}
    out = model(input_ids=torch.tensor(tokens), **how).last_hidden_state
    if tokens is TOKENS:
        weights = torch.tensor(COTANGENT[..., : out.shape[-1]] * weigh[..., None])
        (out.float() * weights).sum().backward()
    return out.detach().float().numpy()


def ours(name_values, config, stored=np.float32, weigh=EVERY, options=None, gradients=True, **how):
    """The output, and the gradients of the same sum where asked for."""
    declared = t5.declare(config, stored)
    mesh = make_mesh()
    model = layout.place(declared, mesh, layout.fill(declared, {k: v.astype(stored) for k, v in name_values.items()}))
    f = t5.forward(declared, mesh, **(options or {}))

    def total(model):
        out = f(model, TOKENS, **how)
        return jnp.sum(out * COTANGENT[..., : config.embed] * weigh[..., None], dtype=jnp.float32), out

    if not gradients:
        return np.asarray(jax.jit(total)(model)[1].astype(jnp.float32)), {}
    (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model)
    grads = {k: np.asarray(v.astype(jnp.float32)) for k, v in layout.named(grads).items()}
    return np.asarray(out.astype(jnp.float32)), grads


def assert_gradients(grads, model, config):
    wanted = values(arrays(model, grads=True), config)
    assert grads.keys() == wanted.keys()
    for path, grad in grads.items():
        assert error(grad, wanted[path]) <= TOLERANCE, path


QUICK = ("umt5", "t5", "umt5, odd sizes", "t5, few buckets")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES])
def test_float32(name):
    model, config = build(name)
    want = reference(model, MASK)
    got, grads = ours(values(arrays(model), config), config, mask=MASK)
    assert error(got, want) <= TOLERANCE  # on padding as well
    assert_gradients(grads, model, config)


@pytest.mark.parametrize("name", ["t5, odd sizes", pytest.param("umt5, odd sizes", marks=pytest.mark.slow)])
def test_without_a_mask_padding_is_text_like_any_other(name):
    model, config = build(name)
    want = reference(model, None)
    got, grads = ours(values(arrays(model), config), config)
    assert error(got, want) <= TOLERANCE
    assert_gradients(grads, model, config)


def test_lengths_are_a_mask_on_the_right():
    model, config = build("umt5")
    want = reference(model, RIGHT, weigh=RIGHT)
    got, grads = ours(values(arrays(model), config), config, weigh=RIGHT, lengths=LENGTHS)
    assert error(got * RIGHT[..., None], want * RIGHT[..., None]) <= TOLERANCE
    assert_gradients(grads, model, config)


@pytest.mark.parametrize("name", ["umt5, odd sizes", "t5, odd sizes"])
def test_distances_beyond_the_last_bucket(name):
    """300 tokens reach past max_distance 128 on both sides."""
    model, config = build(name)
    tokens = np.random.default_rng(4).integers(0, 131, (1, 300))
    declared, mesh = t5.declare(config), make_mesh()
    live = layout.place(declared, mesh, layout.fill(declared, values(arrays(model), config)))
    got = jax.jit(t5.forward(declared, mesh))(live, tokens)
    assert error(np.asarray(got), reference(model, None, tokens=tokens)) <= TOLERANCE


@pytest.mark.parametrize("name", ["umt5", "t5"])
def test_bfloat16(name):
    """By root mean square, about as far from the reference in float32 as the reference in bfloat16 is."""
    model, config = build(name)
    rounded = {k: v.astype(jnp.bfloat16).astype(np.float32) for k, v in arrays(model).items()}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.copy_(torch.tensor(rounded[path]))
    exact = reference(model, RIGHT)[RIGHT]
    half = reference(model, RIGHT, torch.bfloat16)[RIGHT]
    got, grads = ours(
        values(rounded, config), config, jnp.bfloat16, weigh=RIGHT, gradients=name == "t5", lengths=LENGTHS
    )
    assert rms(got[RIGHT] - exact) <= 1.25 * rms(half - exact)
    assert all(np.isfinite(g).all() for g in grads.values())


def test_float32_over_bfloat16_weights():
    model, config = build("umt5, odd sizes")
    rounded = {k: v.astype(jnp.bfloat16).astype(np.float32) for k, v in arrays(model).items()}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.copy_(torch.tensor(rounded[path]))
    wide = {"dtype": jnp.float32}
    mixed, _ = ours(values(rounded, config), config, jnp.bfloat16, mask=MASK, options=wide, gradients=False)
    assert error(mixed, reference(model, MASK)) <= TOLERANCE


def test_the_form_that_wan_takes():
    """Encoded with padding to 23, cut at the true length, zeros added: whatever the padding was."""
    model, config = build("umt5, odd sizes")
    longer = np.pad(TOKENS, ((0, 0), (0, 6)))
    out = reference(model, np.pad(RIGHT, ((0, 0), (0, 6))), tokens=longer)
    want = np.stack([np.pad(row[:n], ((0, 23 - n), (0, 0))) for row, n in zip(out, LENGTHS, strict=True)])
    declared, mesh = t5.declare(config), make_mesh()
    live = layout.place(declared, mesh, layout.fill(declared, values(arrays(model), config)))
    f = jax.jit(t5.forward(declared, mesh, zero_padded_to=23))
    for tokens, mask in ((TOKENS, RIGHT), (longer, np.pad(RIGHT, ((0, 0), (0, 6))))):
        for how in ({"lengths": LENGTHS}, {"mask": mask}):
            got = np.asarray(f(live, tokens, **how))
            assert got.shape == want.shape and error(got, want) <= TOLERANCE
            assert (got[want == 0] == 0).all()
