"""Callers may forbid implicit promotion of ranks and dtypes in their own code, as JAX lets them: models run still."""

import jax
import jax.numpy as jnp
import pytest
from tiny_families import SIZES, TINY

from shardzoo.zoo import layout
from shardzoo.zoo.families import MODULES, find_family
from shardzoo.zoo.mesh import Degrees, make_mesh

DEGREES = Degrees(data=2, context=2, tensor=2)


def traced(name, dtype):
    """The forward pass of a tiny model on a mesh, and abstract arguments."""
    family = find_family(name)
    declared = family.declare(TINY[name], dtype)
    mesh = make_mesh(data=2, context=2, tensor=2, kv_heads=layout.with_kv(declared, DEGREES).kv_heads)
    run, inputs = family.trace(declared, mesh, SIZES)
    return run, (layout.abstract(declared, mesh), *inputs)


@pytest.mark.parametrize("name", MODULES)
def test_forward(name):
    run, given = traced(name, "bfloat16")
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(run, *given)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODULES)
def test_gradient(name, dtype):
    run, given = traced(name, dtype)

    def total(*given):
        return sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(run(*given)))

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(total), *given)
