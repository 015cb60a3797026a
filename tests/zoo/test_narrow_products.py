"""16-bit floats on CPUs: products that are not widened, arithmetic that is rounded once."""

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from tiny_families import SIZES, TINY

from shardzoo.zoo import layers, layout
from shardzoo.zoo.families import find_family
from shardzoo.zoo.mesh import TP, make_mesh

rng = np.random.default_rng(5)
ROUNDED = 2.0**-8  # of a bfloat16: half of the step to the next number, relative, is at most this
FAMILIES = ["clip-text", "clip-vision", "qwen2.5-vl-vision", "qwen3-5", "qwen3-5-vision"]
# Gradients of modulations are sums over the rows of a batch, of which there are too few for a product of narrow floats.
CASES = [("decoder", False), ("decoder", True), ("t5", False), ("t5", True)]
SLOW = [(name, gradient) for name in FAMILIES for gradient in (False, True)] + [("flux", False)]


def narrow(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def exact(*arrays):
    return tuple(np.asarray(x.astype(jnp.float32), np.float64) for x in arrays)


WHOLE = P()


def on_cpu(f, mesh=None, in_specs=WHOLE, out_specs=WHOLE):
    """f inside of a `shard_map`, where layers know their platform."""
    return jax.jit(jax.shard_map(f, mesh=mesh or make_mesh(), in_specs=in_specs, out_specs=out_specs))


@pytest.mark.parametrize(
    ("name", "gradient"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_no_product_of_a_family_is_widened(name, gradient):
    """XLA multiplies bfloat16 as it is where the result is float32; attention's products are float32, as asked for."""
    family, mesh = find_family(name), make_mesh()
    declared = family.declare(TINY[name], "bfloat16")
    run, inputs = family.trace(declared, mesh, SIZES)

    def total(*given):
        return sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(run(*given)))

    compiled = jax.jit(jax.grad(total) if gradient else run).lower(layout.abstract(declared, mesh), *inputs).compile()
    found = hlo.products(compiled)
    assert len(found) >= 4
    assert set(found) == {("bf16", "bf16", "f32")}


@pytest.mark.parametrize("degrees", [dict(), dict(data=2, tensor=4)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradients_of_a_product(degrees, dtype):
    """A float32 weight's gradient is of float32 sums that nothing rounds, whatever the devices that add it up."""
    x, weight, d_y = narrow(4, 6, 32), jnp.asarray(narrow(16, 2, 32), dtype), narrow(4, 6, 16, 2)
    run = on_cpu(layers.contract, make_mesh(**degrees), (P("data"), P(TP)), P("data", None, TP))
    y, back = jax.vjp(run, x, weight)
    d_x, d_weight = back(d_y)
    x64, weight64, d_y64 = exact(x, weight, d_y)
    for got, want, limit in (
        (y, np.einsum("bsi,ohi->bsoh", x64, weight64), ROUNDED),
        (d_x, np.einsum("bsoh,ohi->bsi", d_y64, weight64), 4 * ROUNDED),  # of 4 devices, each rounded
        (d_weight, np.einsum("bsoh,bsi->ohi", d_y64, x64), 4 * ROUNDED if dtype == jnp.bfloat16 else 1e-6),
    ):
        assert np.abs(exact(got)[0] - want).max() <= limit * np.abs(want).max()
    assert (y.dtype, d_x.dtype, d_weight.dtype) == (jnp.bfloat16, jnp.bfloat16, dtype)


def test_a_gate_is_rounded_once():
    x, d_y = narrow(2, 3, 2, 40), narrow(2, 3, 40)
    y, back = jax.vjp(on_cpu(lambda x: layers.gated(jax.nn.silu, x)), x)
    gate, up, d = *np.moveaxis(exact(x)[0], 2, 0), exact(d_y)[0]
    share = 1 / (1 + np.exp(-gate))
    assert np.all(np.abs(exact(y)[0] - gate * share * up) <= ROUNDED * np.abs(gate * share * up))
    d_gate, d_up = d * up * share * (1 + gate * (1 - share)), d * gate * share
    want = np.stack([d_gate, d_up], axis=2)
    np.testing.assert_allclose(exact(back(d_y)[0])[0], want, rtol=ROUNDED, atol=1e-6)


def test_gradients_of_packed_projections_are_joined_without_adding():
    x = jax.ShapeDtypeStruct((2, 16, 3, 4, 8), jnp.float32)

    def total(x):
        q, k, v = layers.unpacked(x)
        return jnp.sum(jnp.sin(q) * jnp.cos(k) * v)

    text = jax.jit(jax.grad(on_cpu(total))).lower(x).as_text()
    assert "stablehlo.concatenate" in text and "stablehlo.pad" not in text
