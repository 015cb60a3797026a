"""The decoder family against transformers: logits, the stream after every layer, gradients, both sides of padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_decoders import CASES, build, values
from torch_values import arrays, error, rms

from shardzoo.zoo import decoder, layout
from shardzoo.zoo.mesh import make_mesh

B, S = 3, 17
LENGTHS = np.array([17, 6, 11])
TOLERANCE = 5e-5
rng = np.random.default_rng(3)
TOKENS = rng.integers(0, 131, (B, S))
COTANGENT = rng.normal(size=(B, S, 131)).astype(np.float32)
MASK = np.stack([np.arange(S) >= 0, np.arange(S) >= 11, np.arange(S) < 9])  # no padding; on the left; on the right
RIGHT = np.arange(S) < LENGTHS[:, None]


def reference(model, mask, dtype=torch.float32):
    """Logits, hidden states [state, batch, seq, embed], and the gradients of sum(logits * COTANGENT on the mask)."""
    model = model.to(dtype)
    model.zero_grad()
    out = model(input_ids=torch.tensor(TOKENS), attention_mask=torch.tensor(mask).long(), output_hidden_states=True)
    weights = torch.tensor(COTANGENT * mask[..., None], dtype=torch.float32)
    (out.logits.float() * weights).sum().backward()
    return out.logits.detach().float().numpy(), np.stack([h.detach().float().numpy() for h in out.hidden_states])


def ours(name_values, config, mask, stored=np.float32, by="mask", **options):
    declared = decoder.declare(config, stored)
    mesh = make_mesh()
    model = layout.place(declared, mesh, layout.fill(declared, {k: v.astype(stored) for k, v in name_values.items()}))
    f = decoder.forward(declared, mesh, hidden_states=True, **options)
    how = {"mask": mask} if by == "mask" else {"lengths": LENGTHS}

    def total(model):
        logits, hidden = f(model, TOKENS, **how)
        return jnp.sum(logits * COTANGENT * mask[..., None], dtype=jnp.float32), (logits, hidden)

    (_, (logits, hidden)), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model)
    wide = [np.asarray(x.astype(jnp.float32)) for x in (logits, hidden)]
    return *wide, {k: np.asarray(v.astype(jnp.float32)) for k, v in layout.named(grads).items()}


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    model, config = build(name)
    want, want_hidden = reference(model, MASK)
    logits, hidden, grads = ours(values(arrays(model), config), config, MASK)
    assert error(logits, want) <= TOLERANCE  # on padding as well
    for i, (a, b) in enumerate(zip(hidden, want_hidden, strict=True)):
        assert error(a, b) <= TOLERANCE, f"hidden state {i}"
    wanted = values(arrays(model, grads=True), config)
    assert grads.keys() == wanted.keys()
    for path, grad in grads.items():
        assert error(grad, wanted[path]) <= TOLERANCE, path


def test_lengths_are_a_mask_on_the_right():
    model, config = build("qwen2")
    want, want_hidden = reference(model, RIGHT)
    logits, hidden, grads = ours(values(arrays(model), config), config, RIGHT, by="lengths")
    assert error(logits * RIGHT[..., None], want * RIGHT[..., None]) <= TOLERANCE
    assert error(hidden * RIGHT[..., None], want_hidden * RIGHT[..., None]) <= TOLERANCE
    wanted = values(arrays(model, grads=True), config)
    assert all(error(g, wanted[path]) <= TOLERANCE for path, g in grads.items())


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])  # one of each model type
def test_bfloat16(name):
    """By root mean square, about as far from the reference in float32 as the reference in bfloat16 is.

    Roundings at the same places, but of differently ordered sums: two such results are about sqrt(2) times as far from
    each other. One draw of weights scatters by a quarter.
    """
    model, config = build(name)
    rounded = {k: v.astype(jnp.bfloat16).astype(np.float32) for k, v in arrays(model).items()}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.copy_(torch.tensor(rounded[path]))
    exact, _ = reference(model, RIGHT)
    half, _ = reference(model, RIGHT, torch.bfloat16)
    logits, _, grads = ours(values(rounded, config), config, RIGHT, jnp.bfloat16)
    spread = rms(half - exact)
    assert rms(logits - exact) <= 1.25 * spread
    assert rms(logits - half) <= 1.75 * spread
    assert all(np.isfinite(g).all() for g in grads.values())


def test_float32_over_bfloat16_weights():
    model, config = build("qwen3")
    rounded = {k: v.astype(jnp.bfloat16).astype(np.float32) for k, v in arrays(model).items()}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            weight.copy_(torch.tensor(rounded[path]))
    exact, _ = reference(model, MASK)
    mixed, _, _ = ours(values(rounded, config), config, MASK, jnp.bfloat16, dtype=jnp.float32)
    assert mixed.dtype == np.float32
    assert error(mixed, exact) <= TOLERANCE


def test_given_positions():
    model, config = build("llama")
    positions = np.arange(S)[None] + np.array([0, 40, 7])[:, None]
    out = model(input_ids=torch.tensor(TOKENS), position_ids=torch.tensor(positions)).logits.detach().numpy()
    declared, mesh = decoder.declare(config), make_mesh()
    live = layout.place(declared, mesh, layout.fill(declared, values(arrays(model), config)))
    got = jax.jit(decoder.forward(declared, mesh))(live, TOKENS, positions=positions)
    assert error(np.asarray(got), out) <= TOLERANCE
