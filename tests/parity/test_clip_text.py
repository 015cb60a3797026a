"""The CLIP text encoder against transformers: pooled and hidden states, masks, both rules of the end, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_clip_text import CASES, build, texts, values
from torch_values import arrays, error, rms

from shardzoo.zoo import clip_text, layout
from shardzoo.zoo.mesh import make_mesh

B, TOLERANCE = 3, 5e-5
slow = pytest.mark.slow
QUICK = ("published tiny", "ends at the highest id")


def reference(model, ids, mask=None, dtype=torch.float32):
    model = model.to(dtype)
    model.zero_grad()
    mask = None if mask is None else torch.tensor(mask)
    return model(input_ids=torch.tensor(ids).long(), attention_mask=mask, output_hidden_states=True)


def ours(named, config, ids, cotangent=None, stored=np.float32, mask=None, **options):
    declared, mesh = clip_text.declare(config, stored), make_mesh()
    live = layout.place(declared, mesh, layout.fill(declared, {k: v.astype(stored) for k, v in named.items()}))
    f = clip_text.forward(declared, mesh, **options)
    if cotangent is None:
        return np.asarray(jax.jit(f)(live, ids, mask=mask).astype(jnp.float32))
    grads = jax.jit(jax.grad(lambda model: jnp.sum(f(model, ids, mask=mask) * cotangent, dtype=jnp.float32)))(live)
    return {k: np.asarray(v.astype(jnp.float32)) for k, v in layout.named(grads).items()}


def assert_gradients(grads, wanted):
    assert grads.keys() == wanted.keys()
    for path, grad in grads.items():
        if path == "blocks.attn.qkv.bias":  # a bias of all keys changes no softmax: rounding noise on both sides
            assert np.abs(grad[:, 1]).max() <= TOLERANCE * np.abs(grad).max()
            grad, wanted[path] = grad[:, ::2], wanted[path][:, ::2]
        assert error(grad, wanted[path]) <= TOLERANCE, path


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in CASES])
def test_pooled_with_gradients(name):
    """What FLUX.1 takes, for the longest texts and for short ones."""
    model, config = build(name)
    named = values(arrays(model), config)
    for seq in (config.positions, 4):
        ids = texts(config, B, seq)
        want = reference(model, ids).pooler_output
        assert error(ours(named, config, ids), want.detach().numpy()) <= TOLERANCE
    cotangent = np.random.default_rng(1).normal(size=want.shape).astype(np.float32)
    (want * torch.tensor(cotangent)).sum().backward()
    assert_gradients(ours(named, config, ids, cotangent), values(arrays(model, grads=True), config))


def test_the_familys_own_ids():
    """Padded with the end token, as tokenizers of CLIP-L do."""
    model, config = build("published tiny")
    ids = np.full((2, 12), 119, np.int32)
    ids[0, :4], ids[1, :2] = (118, 5, 6, 7), (118, 9)
    want = reference(model, ids)
    named = values(arrays(model), config)
    assert error(ours(named, config, ids), want.pooler_output.detach().numpy()) <= TOLERANCE
    last = ours(named, config, ids, hidden_state="last")
    assert error(last, want.last_hidden_state.detach().numpy()) <= TOLERANCE


@pytest.mark.parametrize("name", [pytest.param("published tiny", marks=slow), "ends at the highest id"])
def test_every_hidden_state(name):
    model, config = build(name)
    ids = texts(config, B, 7)
    out = reference(model, ids)
    named = values(arrays(model), config)
    assert len(out.hidden_states) == config.layers + 1
    for i, want in enumerate(out.hidden_states):
        assert error(ours(named, config, ids, hidden_state=i), want.detach().numpy()) <= TOLERANCE
    assert error(ours(named, config, ids, hidden_state=-1), want.detach().numpy()) <= TOLERANCE
    last = ours(named, config, ids, hidden_state="last")
    assert error(last, out.last_hidden_state.detach().numpy()) <= TOLERANCE


@pytest.mark.parametrize("name", [pytest.param("published tiny", marks=slow), "tokens after the end token"])
def test_masks(name):
    """Hidden on the right, in the middle and, for tokens that see any, on the left; with gradients."""
    model, config = build(name)
    ids = texts(config, B, 9)
    mask = np.ones((B, 9), bool)
    mask[0, 5:], mask[1, 2:4], mask[2, :3] = False, False, False
    seen = np.cumsum(mask, axis=1) > 0
    want = reference(model, ids, mask).last_hidden_state
    named = values(arrays(model), config)
    got = ours(named, config, ids, mask=mask, hidden_state="last")
    assert error(got[seen], want.detach().numpy()[seen]) <= TOLERANCE
    cotangent = np.random.default_rng(2).normal(size=want.shape).astype(np.float32) * seen[..., None]
    (want * torch.tensor(cotangent)).sum().backward()
    grads = ours(named, config, ids, cotangent, mask=mask, hidden_state="last")
    assert_gradients(grads, values(arrays(model, grads=True), config))


@pytest.mark.parametrize("name", ["published tiny", pytest.param("tokens after the end token", marks=slow)])
def test_bfloat16(name):
    """By root mean square, about as far from the reference in float32 as the reference in bfloat16 is."""
    model, config = build(name)
    rounded = {k: v.astype(jnp.bfloat16).astype(np.float32) for k, v in arrays(model).items()}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.copy_(torch.tensor(rounded[path]))
    ids = texts(config, 8, 9)
    with torch.no_grad():
        exact = reference(model, ids).last_hidden_state.numpy()
        half = reference(model, ids, dtype=torch.bfloat16).last_hidden_state.float().numpy()
    named = values(rounded, config)
    got = ours(named, config, ids, stored=jnp.bfloat16, hidden_state="last")
    assert rms(got - exact) <= 1.25 * rms(half - exact)
    mixed = ours(named, config, ids, stored=jnp.bfloat16, dtype=jnp.float32, hidden_state="last")
    assert error(mixed, exact) <= TOLERANCE
