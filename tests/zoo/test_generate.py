"""Generation: what one forward pass after another gives, on every mesh, for ragged prompts, greedy and sampled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import harsh

from shardzoo.errors import InputError
from shardzoo.zoo import decoder, layout
from shardzoo.zoo.decoder import Config
from shardzoo.zoo.generate import complete, generate, stream
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.next_token import Sampling, choose

CONFIG = Config(
    vocab=240, embed=32, layers=2, heads=16, kv_heads=4, head_dim=6, mlp=48, qkv_bias=True, qk_norm=True,
    sliding_window=5, sliding_layers=(True, False), max_positions=64,
)  # fmt: skip
NEW = 9
LENGTHS = np.array([19, 1, 12])
TOKENS = np.random.default_rng(0).integers(0, 240, (3, 19))
SAMPLED = dict(temperature=1.5, top_k=50, top_p=0.95)
MESHES = [
    (dict(context=3), None),
    (dict(data=2, context=2, tensor=2), "data"),
    (dict(context=2, tensor=2), "context"),
    (dict(tensor=8, kv_heads=4), None),
    (dict(context=8), None),
]


def live(degrees, at_rest=None, dtype=np.float32, config=CONFIG):
    """Declaration, mesh and model, the same weights on every mesh."""
    declared, mesh = decoder.declare(config, dtype), make_mesh(**degrees)
    values = jax.tree.map(lambda v: v.astype(dtype), harsh(decoder.declare(config)))
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, layout.with_kv(declared, Degrees(**degrees)), smallest=64)
    return declared, mesh, layout.place(declared, mesh, values)


@pytest.fixture(scope="module")
def step_by_step():
    """Greedy tokens by a whole forward pass for each of them, without a cache."""
    declared, mesh, model = live({})
    f = jax.jit(decoder.forward(declared, mesh))
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


@pytest.mark.parametrize("degrees, at_rest", MESHES, ids=str)
def test_every_mesh_gives_the_same_tokens(step_by_step, sampled, degrees, at_rest):
    declared, mesh, model = live(degrees, at_rest)
    run = generate(declared, mesh)
    tokens, _ = run(model, TOKENS, LENGTHS, max_new_tokens=NEW)
    assert np.asarray(tokens).tolist() == step_by_step
    tokens, _ = run(model, TOKENS, LENGTHS, max_new_tokens=NEW, key=jax.random.key(3), **SAMPLED)
    np.testing.assert_array_equal(tokens, sampled)


def test_stop_tokens_end_rows_and_the_loop(sampled):
    """Rows end at their stop token, which is kept; others go on as before; zeros follow."""
    declared, mesh, model = live(dict(data=2))
    stop = (int(sampled[0, 3]), int(sampled[2, 0]))
    ends = [next((i + 1 for i, t in enumerate(row) if t in stop), NEW) for row in sampled.tolist()]
    assert ends[2] == 1 and ends[0] <= 4
    options = dict(max_new_tokens=NEW, key=jax.random.key(3), stop_ids=stop, **SAMPLED)
    tokens, counts = generate(declared, mesh)(model, TOKENS, LENGTHS, **options)
    assert np.asarray(counts).tolist() == ends
    for row, want, end in zip(np.asarray(tokens), sampled, ends, strict=True):
        assert row[:end].tolist() == want[:end].tolist() and not row[end:].any()
    parts = list(stream(declared, mesh, chunk=2)(model, TOKENS, LENGTHS, **options))
    assert parts[0][0].shape == (3, 1)  # the first token comes by itself
    joined = np.concatenate([new for new, _ in parts], axis=1)
    np.testing.assert_array_equal(joined, np.asarray(tokens)[:, : joined.shape[1]])
    assert parts[-1][1].tolist() == ends


def test_a_row_does_not_depend_on_the_others_or_on_padding(step_by_step):
    declared, mesh, model = live(dict(context=2))
    wide = np.full((2, 33), 7)
    wide[0, :19], wide[1, :12] = TOKENS[0], TOKENS[2][:12]
    tokens, counts = generate(declared, mesh)(model, wide[1:], LENGTHS[2:], max_new_tokens=NEW)
    assert np.asarray(tokens).tolist() == step_by_step[2:]
    tokens, counts = generate(declared, mesh)(model, wide, np.array([19, 0]), max_new_tokens=NEW)
    assert np.asarray(tokens)[0].tolist() == step_by_step[0] and np.asarray(counts).tolist() == [NEW, 0]


def test_bfloat16_follows_its_own_forward_pass():
    """The cache and the weights are kept as integers on a CPU: the tokens are the argmax of the plain pass."""
    declared, mesh, model = live({}, dtype=jnp.bfloat16, config=dataclasses.replace(CONFIG, layers=2))
    tokens, _ = generate(declared, mesh)(model, TOKENS, LENGTHS, max_new_tokens=NEW)
    tokens = np.asarray(tokens)
    f = jax.jit(decoder.forward(declared, mesh))
    for row, (prompt, length) in enumerate(zip(TOKENS, LENGTHS, strict=True)):
        ids = np.zeros((1, 32), int)
        ids[0, : length + NEW] = [*prompt[:length], *tokens[row]]
        logits = np.asarray(f(model, ids), np.float32)[0, length - 1 : length + NEW - 1]
        chosen = logits[np.arange(NEW), tokens[row]]
        assert (logits.max(-1) - chosen <= 0.03 * np.abs(logits).max()).all()  # ties within the rounding


def test_complete(step_by_step):
    declared, mesh, model = live({})
    prompts = [row[:n].tolist() for row, n in zip(TOKENS, LENGTHS, strict=True)]
    stop = step_by_step[1][4]
    want = [row[: row.index(stop)] if stop in row else row for row in step_by_step]
    assert complete(declared, mesh, model, prompts, max_new_tokens=NEW, stop_ids=(stop,)) == want
    assert complete(declared, mesh, model, [], max_new_tokens=NEW) == []
    with pytest.raises(InputError) as caught:
        complete(declared, mesh, model, [[], [240], [1] * 60], max_new_tokens=NEW)
    assert all(x in str(caught.value) for x in ("prompt 0 is empty", "[240]", "60 tokens + max_new_tokens=9 exceed"))


def test_wide_numbers_and_whole_ones_and_prompts_of_arrays(step_by_step):
    """JAX in 64 bits; a temperature of 1 and one that leaves nothing but the likeliest token."""
    declared, mesh, model = live(dict(context=2))
    prompts = [row[:n] for row, n in zip(TOKENS, LENGTHS, strict=True)]
    with jax.enable_x64(True):
        assert complete(declared, mesh, model, prompts, max_new_tokens=NEW) == step_by_step
        options = dict(max_new_tokens=2, temperature=1, top_p=1, top_k=1)
        assert complete(declared, mesh, model, prompts, **options) == [row[:2] for row in step_by_step]
    logits = jnp.array([[50.0, 60.0, 59.9]])
    for cold in (5e-324, 1e-38, 1e-20):
        assert choose(logits, Sampling(temperature=cold), jax.random.key(0), jnp.array([0]), jnp.int32(0)) == 1


def test_numpys_numbers_arrays_of_jax_and_keys_of_the_old_kind(step_by_step, sampled):
    declared, mesh, model = live({})
    prompts = [jnp.asarray(row[:n]) for row, n in zip(TOKENS, LENGTHS, strict=True)]
    assert complete(declared, mesh, model, prompts, max_new_tokens=np.int64(NEW)) == step_by_step
    options = dict(temperature=np.float32(1.5), top_k=np.int64(50), top_p=np.float64(0.95), stop_ids=np.array([240]))
    for key in (jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))):
        found, _ = generate(declared, mesh)(model, TOKENS, LENGTHS, max_new_tokens=np.int32(NEW), key=key, **options)
        np.testing.assert_array_equal(found, sampled)


def test_refusals():
    declared, mesh, model = live({})
    run = generate(declared, mesh)
    outside = np.concatenate([[[240, -1]], TOKENS[:1]], axis=1)
    with pytest.raises(InputError, match=r"tokens: \[-1, 240\] are not in 0 ... 239 \(vocab\)"):
        run(model, outside, LENGTHS[:1], max_new_tokens=1)
    with pytest.raises(InputError, match="tokens: 3 rows of 0 are none"):
        run(model, TOKENS[:, :0], LENGTHS, max_new_tokens=1)
    with pytest.raises(InputError, match=r"lengths: \[-1, 20\] are not in 0 ... 19 \(seq\)"):
        run(model, TOKENS, np.array([-1, 3, 20]), max_new_tokens=1)
    for options, message in [
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(max_new_tokens=1, temperature=-1.0), "temperature"),
        (dict(max_new_tokens=1, top_k=0), "top_k=0"),
        (dict(max_new_tokens=1, top_p=1.5), "top_p=1.5"),
    ]:
        with pytest.raises(InputError, match=message):
            run(model, TOKENS, LENGTHS, **options)
    with pytest.raises(InputError, match="chunk=0 is not at least 1"):
        stream(declared, mesh, chunk=0)
    with pytest.raises(InputError, match="pipe=3"):
        generate(declared, make_mesh(pipe=3))


def test_sampling_follows_the_distribution():
    """Frequencies of many draws against the exact probabilities after temperature, top-k and top-p."""
    logits = jnp.asarray([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0, -9.0])
    rows = 20000
    draw = jax.jit(choose, static_argnums=1)

    def frequencies(**options):
        many = jnp.broadcast_to(logits, (rows, 8))
        ids = draw(many, Sampling(**options), jax.random.key(0), jnp.arange(rows), jnp.int32(4))
        return np.bincount(np.asarray(ids), minlength=8) / rows

    def exact(temperature, keep):
        p = np.exp(np.asarray(logits) / temperature) * (np.arange(8) < keep)
        return p / p.sum()

    np.testing.assert_allclose(frequencies(temperature=1.0), exact(1.0, 8), atol=0.015)
    np.testing.assert_allclose(frequencies(temperature=0.5), exact(0.5, 8), atol=0.015)
    np.testing.assert_allclose(frequencies(temperature=2.0, top_k=3), exact(2.0, 3), atol=0.015)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_p=0.6), exact(1.0, 2), atol=0.015)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_p=1e-6), exact(1.0, 1), atol=0)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=4, top_p=0.5), exact(1.0, 2), atol=0.015)
