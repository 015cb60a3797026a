"""Generation with Qwen3.5: what one forward pass after another gives, on every mesh, for ragged prompts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from tiny_qwen3_5 import CONFIG, weights

from shardzoo.cli.topology import topology_devices
from shardzoo.errors import InputError
from shardzoo.zoo import layout, qwen3_5
from shardzoo.zoo.families import find_family
from shardzoo.zoo.generate import State, padded_right
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.qwen3_5_generate import ENGINE, complete, generate, stream

CONFIG = dataclasses.replace(CONFIG, vocab=240, layers=6)
NEW = 8
LENGTHS = np.array([19, 1, 12])
TOKENS = np.random.default_rng(0).integers(0, 240, (3, 19))
SAMPLED = dict(temperature=1.5, top_k=50, top_p=0.95)
MESHES = [
    (dict(data=2, context=2, tensor=2), "data"),
    (dict(context=3), None),
    (dict(context=2, tensor=2), "context"),
    (dict(tensor=8, kv_heads=4), None),
    (dict(context=8), None),
]


def live(degrees, at_rest=None, dtype=np.float32):
    """Declaration, mesh and model, the same weights on every mesh."""
    declared, mesh = qwen3_5.declare(CONFIG, dtype), make_mesh(**degrees)
    values = jax.tree.map(lambda v: v.astype(dtype), weights(qwen3_5.declare(CONFIG)))
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, layout.with_kv(declared, Degrees(**degrees)), smallest=64)
    return declared, mesh, layout.place(declared, mesh, values)


@pytest.fixture(scope="module")
def step_by_step():
    """Greedy tokens by a whole forward pass for each of them, without a cache."""
    declared, mesh, model = live({})
    f = jax.jit(qwen3_5.forward(declared, mesh))
    rows = []
    for prompt, length in zip(TOKENS, LENGTHS, strict=True):
        ids = list(prompt[:length])
        for _ in range(NEW):
            padded = np.zeros((1, 32), int)
            padded[0, : len(ids)] = ids
            ids.append(int(jnp.argmax(f(model, padded)[0, len(ids) - 1])))
        rows.append(ids[length:])
    return rows


@pytest.fixture(scope="module")
def sampled():
    declared, mesh, model = live({})
    tokens, _ = generate(declared, mesh)(model, TOKENS, LENGTHS, max_new_tokens=NEW, key=jax.random.key(3), **SAMPLED)
    return np.asarray(tokens)


def test_one_device(step_by_step, sampled):
    declared, mesh, model = live({})
    tokens, counts = generate(declared, mesh)(model, TOKENS, LENGTHS, max_new_tokens=NEW)
    assert np.asarray(tokens).tolist() == step_by_step and np.asarray(counts).tolist() == [NEW] * 3
    assert len(np.unique(sampled)) > 10 and sampled.tolist() != step_by_step


@pytest.mark.parametrize(
    "degrees, at_rest", [MESHES[0], *(pytest.param(*m, marks=pytest.mark.slow) for m in MESHES[1:])], ids=str
)
def test_every_mesh_gives_the_same_tokens(step_by_step, sampled, degrees, at_rest):
    declared, mesh, model = live(degrees, at_rest)
    run = generate(declared, mesh)
    tokens, _ = run(model, TOKENS, LENGTHS, max_new_tokens=NEW)
    assert np.asarray(tokens).tolist() == step_by_step
    tokens, _ = run(model, TOKENS, LENGTHS, max_new_tokens=NEW, key=jax.random.key(3), **SAMPLED)
    np.testing.assert_array_equal(tokens, sampled)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others_or_on_padding(step_by_step):
    declared, mesh, model = live(dict(context=2))
    wide = np.full((2, 33), 7)
    wide[0, :19], wide[1, :12] = TOKENS[0], TOKENS[2][:12]
    run = generate(declared, mesh)
    tokens, counts = run(model, wide, np.array([19, 0]), max_new_tokens=NEW)
    assert np.asarray(tokens)[0].tolist() == step_by_step[0] and np.asarray(counts).tolist() == [NEW, 0]
    tokens, _ = run(model, wide, np.array([19, 12]), max_new_tokens=NEW)
    assert np.asarray(tokens).tolist() == [step_by_step[0], step_by_step[2]]


def on_side(side, width=24):
    """The prompts padded on the left, on the right, or on both sides, and their mask."""
    tokens, mask = np.full((3, width), 239), np.zeros((3, width), bool)
    for row, (prompt, n) in enumerate(zip(TOKENS, LENGTHS, strict=True)):
        at = {"left": width - n, "right": 0, "both": (width - n) // 2}[side]
        tokens[row, at : at + n], mask[row, at : at + n] = prompt[:n], True
    return tokens, mask


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_prompts_padded_on_any_side_are_the_same_prompts(side):
    tokens, lengths = padded_right(*on_side(side))
    assert lengths.tolist() == LENGTHS.tolist() and tokens.shape == (3, 24)
    for row, prompt, n in zip(tokens, TOKENS, LENGTHS, strict=True):
        assert row[:n].tolist() == prompt[:n].tolist() and not row[n:].any()
    torn = on_side(side)[1]
    torn[2, torn[2].argmax() + 1] = False
    with pytest.raises(InputError, match=r"rows \[2\] have padding between their tokens"):
        padded_right(tokens, torn)
    empty, none = padded_right(TOKENS, np.zeros_like(TOKENS, bool))
    assert not empty.any() and none.tolist() == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, dict(context=2, tensor=2)], ids=str)
@pytest.mark.parametrize("side", ["left", "both"])
def test_padding_on_any_side(step_by_step, side, degrees):
    declared, mesh, model = live(degrees)
    tokens, _ = generate(declared, mesh)(model, *padded_right(*on_side(side)), max_new_tokens=NEW)
    assert np.asarray(tokens).tolist() == step_by_step


@pytest.mark.slow
def test_stream_and_stop_tokens(step_by_step):
    declared, mesh, model = live(dict(data=2))
    stop = step_by_step[0][2]
    ends = [row.index(stop) + 1 if stop in row else NEW for row in step_by_step]
    parts = list(stream(declared, mesh, chunk=3)(model, TOKENS, LENGTHS, max_new_tokens=NEW, stop_ids=(stop,)))
    joined = np.concatenate([new for new, _ in parts], axis=1)
    assert parts[0][0].shape == (3, 1) and parts[-1][1].tolist() == ends
    for row, want, end in zip(joined, step_by_step, ends, strict=True):
        assert row[:end].tolist() == want[:end] and not row[end:].any()


@pytest.mark.slow
def test_bfloat16_follows_its_own_forward_pass():
    """Tail, keys and weights are kept as integers on a CPU: the tokens are the argmax of the plain pass."""
    declared, mesh, model = live({}, dtype=jnp.bfloat16)
    tokens, _ = generate(declared, mesh)(model, TOKENS, LENGTHS, max_new_tokens=NEW)
    tokens = np.asarray(tokens)
    f = jax.jit(qwen3_5.forward(declared, mesh))
    for row, (prompt, length) in enumerate(zip(TOKENS, LENGTHS, strict=True)):
        ids = np.zeros((1, 32), int)
        ids[0, : length + NEW] = [*prompt[:length], *tokens[row]]
        logits = np.asarray(f(model, ids), np.float32)[0, length - 1 : length + NEW - 1]
        chosen = logits[np.arange(NEW), tokens[row]]
        assert (logits.max(-1) - chosen <= 0.03 * np.abs(logits).max()).all()  # ties within the rounding


def test_what_else_of_a_prompt_does_not_fit_is_refused():
    declared, mesh, model = live({})
    run = generate(declared, mesh)
    with pytest.raises(InputError, match=r"beside: \['mask'\] are not what this family takes: positions, features"):
        run(model, TOKENS, LENGTHS, max_new_tokens=NEW, beside={"mask": TOKENS})
    with pytest.raises(InputError, match="features and places go together"):
        run(model, TOKENS, LENGTHS, max_new_tokens=NEW, beside={"places": TOKENS})


LONG = qwen3_5.Config(
    vocab=64, embed=128, layers=8, interval=2, mlp=128, heads=4, kv_heads=4, head_dim=128, rotary_dim=32,
    sections=(6, 5, 5), key_heads=4, value_heads=4, key_dim=16, value_dim=16,
)  # fmt: skip


def step_memory(slots, devices, degrees):
    """What the compiled decode step needs, with bfloat16 caches of so many slots that it updates in place."""
    declared, mesh = qwen3_5.declare(LONG, jnp.bfloat16), make_mesh(**degrees, kv_heads=4, devices=devices)
    steps, tokens = 2, jax.ShapeDtypeStruct((1, slots), jnp.int32)
    rows, number = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    ends = functools.partial(ENGINE.gather_ends, declared=declared, to="invarying")

    def sharded(f, *inputs):
        specs = (layout.specs(declared), *inputs)
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(ENGINE.cache_specs, P("data")))

    model = layout.abstract(declared, mesh)
    fill = sharded(
        lambda model, tokens, lengths: ENGINE.prefill(ends(model), declared, tokens, lengths, steps - 1, None),
        *(P("data", "context"), P("data")),
    )
    cache, _ = jax.eval_shape(fill, model, tokens, rows)
    state = State(
        cache=cache, prompt=rows, step=number, token=rows, done=jax.ShapeDtypeStruct((1,), bool),
        running=jax.ShapeDtypeStruct((), bool), tokens=jax.ShapeDtypeStruct((1, steps), jnp.int32), lengths=rows,
    )  # fmt: skip
    step = sharded(lambda model, state: ENGINE.decode_step(ends(model), declared, state, None), ENGINE.state_specs)
    return jax.jit(step, donate_argnums=1).lower(model, state).compile().memory_analysis()


@pytest.mark.parametrize("degrees", [dict(tensor=4), dict(tensor=2, context=2)], ids=str)
def test_a_decode_step_does_not_copy_its_caches(degrees):
    """Compiled for TPUs, with tokens in no whole tiles: temporaries of less than one layer's keys and values."""
    slots = 262142
    memory = step_memory(slots, topology_devices("v5e:2x2"), degrees)
    one_layer = slots * 2 * LONG.head_dim * 2  # bytes on a device, in either case
    assert memory.alias_size_in_bytes > LONG.super_blocks * one_layer
    assert memory.temp_size_in_bytes < one_layer


def test_a_decode_step_on_a_cpu_copies_no_state_of_all_layers():
    declared, mesh, model = live({})
    run = generate(declared, mesh)
    text = jax.jit(lambda model: run(model, TOKENS, LENGTHS, max_new_tokens=NEW)).lower(model).compile().as_text()
    c = CONFIG
    layers, channels = c.layers - c.super_blocks, 2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim
    shapes = (layers, 3, c.value_heads, c.key_dim, c.value_dim), (layers, 3, c.delta_sizes.taps - 1, channels)
    state, tails = (f"f32[{','.join(map(str, shape))}]" for shape in shapes)
    for stack in (state, tails):
        assert f"= {stack}" in text and not re.findall(rf"= {re.escape(stack)}\S* copy\(.*", text)
    # What writes a layer's new state reads the outputs of the convolution: it does not work them out from the tails.
    fusions = re.findall(rf"^%\S+ \(([^\n]*)\) -> {re.escape(state)}[^\n]*{{$(.*?)^}}", text, re.M | re.S)
    taken = [arguments for arguments, body in fusions if "dynamic-update-slice(" in body]
    assert taken and not any(tails in arguments for arguments in taken), taken


@pytest.mark.slow
def test_the_family_names_its_engine(step_by_step):
    assert find_family("qwen3-5").text == complete.func.__module__.replace("generate", "qwen3_5_generate")
    declared, mesh, model = live({})
    prompts = [row[:n].tolist() for row, n in zip(TOKENS, LENGTHS, strict=True)]
    assert complete(declared, mesh, model, prompts, max_new_tokens=NEW) == step_by_step
    with pytest.raises(InputError, match=r"\[240\] are not in 0 ... 239"):
        complete(declared, mesh, model, [[240]], max_new_tokens=NEW)
    with pytest.raises(InputError, match="60 tokens \\+ max_new_tokens=8 exceed"):
        complete(declared, mesh, model, [[1] * 60], max_new_tokens=NEW)
