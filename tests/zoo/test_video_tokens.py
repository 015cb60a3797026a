"""Rotation of pairs: the CPU's way and the other platforms' give the same numbers, forwards and backwards."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.video_tokens import grid_rotary, rotate_pairs

GRID, HEAD_DIM = (2, 3, 5), 16
X = np.random.default_rng(0).normal(size=(2, 30, 3, HEAD_DIM)).astype(np.float32)


def turned(x):
    return rotate_pairs(x, grid_rotary(HEAD_DIM, GRID, jnp.arange(30)))


def both(f):
    """f of X, and the gradient of a sum that weighs each number of it differently."""
    weights = np.linspace(-1, 1, X.size, dtype=np.float32).reshape(X.shape)
    return jax.jit(lambda x: (f(x), jax.grad(lambda x: (f(x) * weights).sum())(x)))(X)


def test_both_ways_are_the_definition():
    on_cpu = jax.shard_map(turned, mesh=make_mesh(), in_specs=P(), out_specs=P())
    cos, sin = (np.asarray(table)[:, :, None] for table in grid_rotary(HEAD_DIM, GRID, jnp.arange(30)))
    pairs = X.reshape(*X.shape[:-1], -1, 2)[..., ::-1].reshape(X.shape)
    (cpu, cpu_gradient), (product, product_gradient) = both(on_cpu), both(turned)  # outside of a mesh: no platform
    np.testing.assert_allclose(cpu, X * cos + pairs * sin, atol=1e-6)
    np.testing.assert_allclose(product, cpu, atol=1e-6)
    np.testing.assert_allclose(product_gradient, cpu_gradient, atol=1e-6)


def test_a_cpu_multiplies_by_no_permutation():
    on_cpu = jax.shard_map(turned, mesh=make_mesh(), in_specs=P(), out_specs=P())
    assert "dot_general" not in jax.jit(on_cpu).lower(X).as_text()
    assert "dot_general" in jax.jit(turned).lower(X).as_text()
