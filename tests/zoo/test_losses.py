"""Losses: the numbers and gradients of PyTorch's, on any mesh, without moving a split vocabulary."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from jax import P
from jax.sharding import NamedSharding
from transformers.loss.loss_utils import ForCausalLMLoss

from shardzoo.errors import InputError
from shardzoo.zoo import losses, make_mesh, sampling

B, S, V = 3, 11, 40
rng = np.random.default_rng(0)
LOGITS = (rng.normal(size=(B, S, V)) * 5).astype(np.float32)
TOKENS = rng.integers(0, V, (B, S))


def close(got, want, tolerance=1e-6):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)


def of_torch(labels, dtype=torch.float32):
    """Loss and gradient as transformers takes them for a causal language model."""
    logits = torch.tensor(LOGITS).to(dtype).requires_grad_()
    loss = ForCausalLMLoss(logits, torch.tensor(labels), V)
    loss.backward()
    return loss.item(), logits.grad.float().numpy()


@pytest.mark.parametrize("ignored", ["nothing", "lengths", "mask", "-100"])
def test_next_token_loss_is_that_of_transformers(ignored):
    lengths, mask = np.array([11, 4, 7]), rng.random((B, S)) < 0.5
    kept = {"lengths": np.arange(S) < lengths[:, None], "mask": mask, "-100": mask}.get(ignored, np.ones((B, S), bool))
    want = of_torch(np.where(kept, TOKENS, -100))

    def loss(logits):
        how = {"lengths": dict(lengths=lengths), "mask": dict(mask=mask)}.get(ignored, {})
        tokens = np.where(kept, TOKENS, -100) if ignored == "-100" else TOKENS
        labels, counts = losses.next_tokens(tokens, **how)
        return losses.cross_entropy(logits, labels, counts)

    got = jax.jit(jax.value_and_grad(loss))(LOGITS)
    close(got[0], want[0])
    close(got[1], want[1])


def test_bfloat16_logits_are_reduced_in_float32():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    labels, counts = losses.next_tokens(TOKENS)
    value, gradient = jax.value_and_grad(losses.cross_entropy)(logits, labels, counts)
    want, slope = of_torch(TOKENS, torch.bfloat16)
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    close(value, want)
    close(gradient, slope, 1e-2)


def test_large_logits_and_nothing_to_predict():
    logits = jnp.asarray([[[3e4, -3e4, 0.0]]])
    close(losses.cross_entropy(logits, np.array([[1]])), 6e4)
    value, slope = jax.value_and_grad(losses.cross_entropy)(logits, np.array([[-100]]))
    assert value == 0 and not np.asarray(slope).any()


@pytest.mark.parametrize("degrees", [dict(tensor=4), dict(data=2, context=2, tensor=2), dict(tensor=2, kv_heads=1)])
def test_split_vocabulary_stays_where_it_is(degrees):
    """Loss and gradient at 1e-6 of one device's; in the compiled text no array with a whole vocabulary."""
    mesh = make_mesh(**degrees)
    split = NamedSharding(mesh, P("data", "context", ("kv", "rep")))
    logits, tokens = np.tile(LOGITS, (2, 2, 1))[:4, :20], np.tile(TOKENS, (2, 2))[:4, :20]
    lengths = np.array([20, 3, 14, 9])

    def loss(logits, tokens):
        return losses.cross_entropy(logits, *losses.next_tokens(tokens, lengths=lengths))

    want = jax.value_and_grad(loss)(logits, tokens)
    run = jax.jit(jax.value_and_grad(loss)).lower(jax.device_put(logits, split), tokens).compile()
    got = run(jax.device_put(logits, split), tokens)
    close(got[0], want[0])
    close(got[1], want[1])
    assert got[1].sharding.is_equivalent_to(split, 3)
    text = run.as_text()
    assert not re.search(rf"\[[\d,]*\b{V}\](?!.*sharding)", text), "a whole vocabulary"
    assert not re.search(r" (all-gather|all-to-all)[^=]*f32", text)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_noise_as_diffusers_adds_it(shift):
    data = rng.normal(size=(4, 3, 5, 2)).astype(np.float32)
    noisy = losses.add_noise(jnp.asarray(data), jax.random.key(0), shift=shift)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    noise = torch.tensor(np.asarray(noisy.velocity) + data)
    near = [int(np.abs(scheduler.sigmas.numpy() - level).argmin()) for level in np.asarray(noisy.levels)]
    levels = scheduler.sigmas[near]
    at = losses.add_noise(jnp.asarray(data), jax.random.key(0), levels=jnp.asarray(levels.numpy()))
    want = scheduler.scale_noise(torch.tensor(data), scheduler.timesteps[near], noise)
    close(at.sample, want)
    # From any level one Euler step along the target ends at the data.
    close(noisy.sample - noisy.levels[:, None, None, None] * noisy.velocity, data, 1e-5)


@pytest.mark.parametrize("density", ["uniform", "logit-normal"])
@pytest.mark.parametrize("shift", [1.0, 5.0, math.exp(sampling.image_mu(1024))])
def test_levels_are_drawn_as_said(density, shift):
    data = jnp.zeros((20000, 1))
    levels = np.asarray(losses.add_noise(data, jax.random.key(3), density=density, shift=shift).levels, np.float64)
    base = levels / (shift - (shift - 1) * levels)  # the shift undone
    want = np.random.default_rng(1).uniform(size=20000)
    if density == "logit-normal":
        want = 1 / (1 + np.exp(-np.random.default_rng(1).normal(size=20000)))
    quantiles = np.linspace(0.05, 0.95, 19)
    assert np.abs(np.quantile(base, quantiles) - np.quantile(want, quantiles)).max() < 0.02


def test_noise_is_the_same_on_any_mesh():
    data = jnp.asarray(rng.normal(size=(8, 6)).astype(np.float32))
    run = jax.jit(lambda data, key: losses.add_noise(data, key, density="logit-normal"))
    want = run(data, jax.random.key(1))
    placed = jax.device_put(data, NamedSharding(make_mesh(data=8), P("data")))
    for a, b in zip(run(placed, jax.random.key(1)), want, strict=True):
        close(a, b)


def test_flow_matching_is_the_mean_square_and_its_gradient():
    a, b = (rng.normal(size=(3, 4, 5)).astype(np.float32) for _ in range(2))
    weights = np.array([1.0, 0.5, 3.0], np.float32)
    x = torch.tensor(a, requires_grad=True)
    want = (torch.tensor(weights)[:, None, None] * (x - torch.tensor(b)) ** 2).mean()
    want.backward()
    value, slope = jax.value_and_grad(losses.flow_matching)(jnp.asarray(a), jnp.asarray(b), weights)
    close(value, want.item())
    close(slope, x.grad)
    close(losses.flow_matching(jnp.asarray(a), jnp.asarray(b)), ((a - b) ** 2).mean())


def test_refusals():
    data = jnp.zeros((2, 3))
    with pytest.raises(InputError, match=r"density='cosine' is unknown.*\n.*shift=0"):
        losses.add_noise(data, jax.random.key(0), density="cosine", shift=0)
    with pytest.raises(InputError, match="not the velocity's"):
        losses.flow_matching(data, data[:, :2])
