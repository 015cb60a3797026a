"""Qwen3.5 with its layers in host memory: the same numbers, and little of the device's own memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_qwen3_5 import CONFIG, weights

from shardzoo import zoo
from shardzoo.cli.topology import topology_devices
from shardzoo.errors import InputError
from shardzoo.zoo import layout, qwen3_5
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.qwen3_5_generate import generate

TINY = dataclasses.replace(CONFIG, layers=6)
rng = np.random.default_rng(5)
TOKENS, LENGTHS = rng.integers(0, 48, (2, 12)), np.array([12, 7], np.int32)
MASK = np.arange(12) >= np.array([[0], [5]])


def run(declared, mesh, values):
    """Logits and generated tokens."""
    model = layout.place(declared, mesh, layout.fill(declared, values))
    logits = jax.jit(qwen3_5.forward(declared, mesh))(model, TOKENS, mask=MASK)
    tokens = generate(declared, mesh)(model, TOKENS, LENGTHS, max_new_tokens=5)
    return jax.tree.map(np.asarray, (logits, tokens)), model


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, dict(tensor=2, context=2), dict(data=2, context=2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_numbers(degrees, dtype):
    mesh = make_mesh(**degrees)
    declared = layout.split_at_rest(qwen3_5.declare(TINY, dtype), "context", Degrees(**degrees), smallest=16)
    values = {k: v.astype(dtype) for k, v in layout.named(weights(qwen3_5.declare(TINY))).items()}
    want, _ = run(declared, mesh, values)
    got, model = run(layout.keep_on_host(declared, smallest=16), mesh, values)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for stack in (model.delta, model.attn):
        kinds = {path: leaf.sharding.memory_kind for path, leaf in layout.named(stack).items()}
        assert {kinds[path] for path in kinds if path.startswith("mlp.")} == {layout.HOST}
        assert kinds["mixer.out.weight"] == layout.HOST
    assert model.embed.weight.sharding.memory_kind == "device"


def test_gradients_of_layers_in_host_memory_are_refused():
    """Those of other weights are not."""
    declared, mesh = layout.keep_on_host(qwen3_5.declare(TINY), smallest=16), make_mesh()
    model, forward = layout.abstract(declared, mesh), qwen3_5.forward(declared, mesh)
    with pytest.raises(InputError, match="layers in host memory have no gradient here"):
        jax.eval_shape(jax.grad(lambda model: jnp.sum(forward(model, TOKENS))), model)

    def total(norm, model):
        return jnp.sum(forward(dataclasses.replace(model, norm=norm), TOKENS))

    assert jax.eval_shape(jax.grad(total), model.norm, model).weight.shape == (TINY.embed,)


def test_a_tpu_holds_no_more_than_a_few_layers():
    """Compiled for four TPU chips: the stacks do not count as memory of the chips, and neither does a copy of them."""
    config = qwen3_5.Config(
        vocab=512, embed=1024, layers=24, interval=3, mlp=4096, heads=16, kv_heads=4, head_dim=64, rotary_dim=16,
        sections=(3, 3, 2), key_heads=8, value_heads=16, key_dim=32, value_dim=32,
    )  # fmt: skip
    mesh = zoo.make_mesh(tensor=4, kv_heads=4, devices=topology_devices("v5e:2x2"))
    declared = layout.keep_on_host(qwen3_5.declare(config, "bfloat16"))
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    compiled = jax.jit(qwen3_5.forward(declared, mesh)).lower(layout.abstract(declared, mesh), tokens).compile()
    memory = compiled.memory_analysis()
    stacks = sum(p.nbytes for p in jax.tree.leaves((declared.delta, declared.attn))) // 4
    assert memory.host_argument_size_in_bytes > 0.95 * stacks
    assert memory.argument_size_in_bytes < 0.1 * stacks
    assert memory.temp_size_in_bytes < 4 * stacks / config.layers
