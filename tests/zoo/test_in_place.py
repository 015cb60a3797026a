"""Weights that stay in the stack of all layers: products by them, and what the compiled programs copy."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from tiny_qwen3_5 import CONFIG

from shardzoo.zoo import decoder, generate, layout, qwen3_5, qwen3_5_generate
from shardzoo.zoo.in_place import BLOCK, FEW, Stacked
from shardzoo.zoo.layers import RowLinear, contract
from shardzoo.zoo.linears import layer_at, linear_layers
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.weights import Quantized

LAYERS = 3
DTYPES = [np.float32, jnp.bfloat16, np.int8, jnp.float8_e4m3fn]


def on_one_device(f, *args):
    return jax.jit(jax.shard_map(f, mesh=make_mesh(), in_specs=P(), out_specs=P()))(*args)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, FEW, FEW + 1])
@pytest.mark.parametrize("shape", [(2, 7, 48), (5, 33), (3, 1024, 512)], ids=str)
def test_products_are_those_by_the_weight_that_is_read(shape, rows, dtype):
    """In parts of a row, in blocks of the weight, whole; of widths that divide into parts and others."""
    rng = np.random.default_rng(0)
    stack = jnp.asarray(rng.integers(-99, 99, (LAYERS, *shape)), dtype)
    x = jnp.asarray(rng.integers(-9, 9, (rows, 1, shape[-1])), jnp.bfloat16 if dtype == jnp.bfloat16 else np.float32)
    scale = jnp.asarray(rng.random((LAYERS, *shape[:-1])), np.float32)
    whole = np.einsum("rsi,l...i->lrs...", np.float64(x), np.float64(stack))
    whole = whole * np.float64(scale)[:, None, None] if np.dtype(dtype).itemsize == 1 else whole

    def by_layer(stack, scale, x):
        def one(layer):
            weight = Stacked(stack, layer)
            assert (weight.shape, weight.ndim, weight.dtype) == (shape, len(shape), dtype)
            return contract(x, Quantized(weight, scale[layer]) if np.dtype(dtype).itemsize == 1 else weight)

        return jax.lax.map(one, jnp.arange(LAYERS))

    found = on_one_device(by_layer, stack, scale, x)
    assert found.dtype == x.dtype and found.shape == (LAYERS, rows, 1, *shape[:-1])
    np.testing.assert_allclose(np.float64(found), whole, rtol=2e-2 if dtype == jnp.bfloat16 else 1e-6, atol=1e-4)


def test_what_has_to_be_gathered_or_fetched_is_read_first():
    declared = decoder.declare(DECODER).blocks
    rest = layout.split_at_rest(declared, "data", Degrees(data=2), smallest=64)
    for form, stays in ((declared, True), (rest, False), (layout.keep_on_host(declared), False)):
        stacks = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), declared)
        found = []
        on_one_device(lambda s, form=form, found=found: found.append(layer_at(s, jnp.zeros((), int), form)), stacks)
        weights = [layer.weight for layer in linear_layers(found[0]).values()]
        assert weights and all(isinstance(w, Stacked) is stays for w in weights)
        assert not isinstance(found[0].attn_norm.weight, Stacked)


DECODER = decoder.Config(vocab=64, embed=256, layers=3, heads=4, kv_heads=2, head_dim=64, mlp=4608)
HYBRID = dataclasses.replace(CONFIG, vocab=64, embed=256, mlp=4608)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("rows", [1, 4, FEW])
@pytest.mark.parametrize("family", ["decoder", "qwen3_5"])
def test_few_rows_copy_no_layers_weights(family, rows, dtype):
    """Prefill of one token and decoding: up to four rows read all weights where they lie, more those above a block."""
    declared, stacks, run = {
        "decoder": lambda: (decoder.declare(DECODER, dtype), ("blocks",), generate.generate),
        "qwen3_5": lambda: (qwen3_5.declare(HYBRID, dtype), ("delta", "attn"), qwen3_5_generate.generate),
    }[family]()
    mesh, tokens = make_mesh(), np.zeros((rows, 1), np.int32)
    run = run(declared, mesh)
    call = jax.jit(lambda model: run(model, tokens, np.ones(rows, np.int32), max_new_tokens=3))
    text = call.lower(layout.abstract(declared, mesh)).compile().as_text()
    made = {tuple(map(int, dims.split(","))) for dims in re.findall(r"= \w+\[([\d,]+)\]\S* fusion\(", text)}
    layers = [layer for stack in stacks for layer in linear_layers(getattr(declared, stack)).values()]
    seen = 0
    for layer in layers:
        _, *shape = layer.weight.shape
        outputs = shape[0] if isinstance(layer, RowLinear) else math.prod(shape[:-1])
        matrix = (outputs, math.prod(shape) // outputs)
        if rows <= 4 or math.prod(shape) * layer.weight.dtype.itemsize >= 2 * BLOCK:
            assert not made & {(*shape,), (1, *shape), matrix}, matrix
            seen += 1
    assert seen >= (len(layers) if rows <= 4 else len(stacks))
