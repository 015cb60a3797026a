"""Stacked blocks that lie in host memory: the same numbers, and little of the device's own memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardzoo import zoo
from shardzoo.cli.topology import topology_devices
from shardzoo.zoo import decoder, layout
from shardzoo.zoo.generate import generate
from shardzoo.zoo.mesh import Degrees, make_mesh

TINY = decoder.Config(vocab=96, embed=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=48, qk_norm=True, tied=True)
rng = np.random.default_rng(5)
TOKENS, LENGTHS = rng.integers(0, 96, (2, 11)), np.array([11, 7], np.int32)


def run(declared, mesh, values):
    """Logits, gradients and generated tokens."""
    model = layout.place(declared, mesh, layout.fill(declared, values))
    forward = decoder.forward(declared, mesh)

    def total(model):
        logits = forward(model, TOKENS)
        return jnp.sum(logits.astype(jnp.float32) ** 2), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model)
    tokens = generate(declared, mesh)(model, TOKENS, LENGTHS, max_new_tokens=5)
    return jax.tree.map(np.asarray, (logits, layout.named(grads), tokens)), model


@pytest.mark.parametrize("degrees", [{}, {"tensor": 2, "context": 2}, {"data": 2, "context": 2}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_numbers(degrees, dtype):
    mesh = make_mesh(**degrees)
    declared = layout.split_at_rest(decoder.declare(TINY, dtype), "context", Degrees(**degrees), smallest=16)
    values = {p: (0.3 * rng.normal(size=q.shape)).astype(q.dtype) for p, q in layout.named(declared).items()}
    want, _ = run(declared, mesh, values)
    got, model = run(layout.keep_on_host(declared, smallest=16), mesh, values)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    kinds = {path: leaf.sharding.memory_kind for path, leaf in layout.named(model.blocks).items()}
    assert {kind for path, kind in kinds.items() if "norm" not in path} == {layout.HOST}
    assert model.embed.weight.sharding.memory_kind == "device"


def test_small_leaves_stay_on_the_device():
    declared = layout.keep_on_host(decoder.declare(TINY), smallest=16)  # norms have 3 * 32, but one dim in a block
    assert declared.blocks.attn_norm.weight.memory == "device" and declared.blocks.attn.out.weight.memory == "host"
    declared = layout.keep_on_host(decoder.declare(TINY), smallest=3 * 32 * 48)
    assert declared.blocks.attn.out.weight.memory == "device" and declared.blocks.mlp.down.weight.memory == "host"


def test_a_tpu_holds_no_more_than_two_blocks():
    """Compiled for four TPU chips: the stack does not count as memory of the chips, and neither does a copy of it."""
    config = decoder.Config(vocab=512, embed=1024, layers=12, heads=16, kv_heads=8, head_dim=64, mlp=4096)
    mesh = zoo.make_mesh(tensor=4, kv_heads=8, devices=topology_devices("v5e:2x2"))
    declared = layout.keep_on_host(decoder.declare(config, "bfloat16"))
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    compiled = jax.jit(decoder.forward(declared, mesh)).lower(layout.abstract(declared, mesh), tokens).compile()
    memory = compiled.memory_analysis()
    stack = sum(p.nbytes for p in jax.tree.leaves(declared.blocks)) // 4
    assert memory.host_argument_size_in_bytes > 0.99 * stack
    assert memory.argument_size_in_bytes < 0.05 * stack
    assert memory.temp_size_in_bytes < 3 * stack / 12
