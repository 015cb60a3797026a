"""The decoder family on meshes: the same numbers as on one device, the collectives it promises, its options."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh

from shardzoo.errors import InputError
from shardzoo.zoo import decoder, layout
from shardzoo.zoo.decoder import Config
from shardzoo.zoo.families import config_from_json, config_to_json, find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.rope import Rope

B, S = 3, 19
CONFIG = Config(
    vocab=48, embed=32, layers=2, heads=8, kv_heads=4, head_dim=6, mlp=48, qkv_bias=True, out_bias=True, mlp_bias=True,
    qk_norm=True, sliding_window=5, sliding_layers=(True, False), max_positions=64,
)  # fmt: skip
WIDE = dataclasses.replace(CONFIG, heads=16, kv_heads=4, tied=True, sliding_layers=None)
CONFIGS = {"windows": CONFIG, "wide": WIDE}
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 48, (B, S))
LENGTHS = np.array([19, 7, 12])
COTANGENT = rng.normal(size=(B, S, 48)).astype(np.float32)
HIDDEN = rng.normal(size=(2, B, S, 32)).astype(np.float32)


def run(config, degrees, at_rest=None, mask=None, **options):
    """Logits and two hidden states where they mean something, and the gradient of a weighted sum of all of them."""
    declared = decoder.declare(config)
    values = harsh(declared)
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, layout.with_kv(declared, degrees), smallest=64)
        assert any(p.rest for p in layout.named(declared.blocks).values())
    mesh = make_mesh(**{f.name: getattr(degrees, f.name) for f in dataclasses.fields(degrees)})
    f = decoder.forward(declared, mesh, hidden_states=(1, 2), **options)
    seen = np.arange(S) < LENGTHS[:, None] if mask is None else mask
    how = {"lengths": LENGTHS} if mask is None else {"mask": mask}

    def total(model):
        logits, hidden = f(model, TOKENS, **how)
        assert logits.shape == (B, S, 48) and hidden.shape == (2, B, S, 32)
        logits, hidden = logits * seen[..., None], hidden * seen[..., None]
        return jnp.sum(logits * COTANGENT) + jnp.sum(hidden * HIDDEN), (logits, hidden)

    model = layout.place(declared, mesh, values)
    (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model)
    return jax.tree.map(np.asarray, (*out, layout.named(grads)))


@pytest.fixture(scope="module")
def one_device():
    return {name: run(config, Degrees()) for name, config in CONFIGS.items()}


@pytest.mark.parametrize(
    "name, degrees, options",
    [
        ("windows", dict(tensor=2), dict()),
        ("windows", dict(tensor=2, context=2), dict(residual="seq", at_rest="context")),
        ("windows", dict(tensor=4), dict(residual="seq", remat=True)),
        ("windows", dict(context=3), dict()),
        ("windows", dict(data=2, context=2, tensor=2), dict(at_rest="data")),
        ("wide", dict(tensor=8, kv_heads=4), dict()),  # KV heads repeat over rep
        ("wide", dict(tensor=4, kv_heads=4, context=2), dict(residual="seq")),
        ("wide", dict(context=8), dict(at_rest="context")),
        ("wide", dict(data=2, tensor=4, kv_heads=4), dict(remat=True)),
        ("windows", dict(context=5), dict()),
    ],
    ids=str,
)
def test_mesh_parity(one_device, name, degrees, options):
    """Forward and gradient on a mesh, at 1e-5 of one device's."""
    assert_close(run(CONFIGS[name], Degrees(**degrees), **options), one_device[name])


def test_context_wider_than_the_heads():
    config = dataclasses.replace(CONFIG, heads=4, kv_heads=2, qk_norm=False)
    assert_close(run(config, Degrees(context=8)), run(config, Degrees()))


def test_masks_on_any_side_over_a_mesh():
    mask = rng.random((B, S)) < 0.6
    assert_close(run(CONFIG, Degrees(context=2, tensor=2), mask=mask), run(CONFIG, Degrees(), mask=mask))
    assert_close(run(CONFIG, Degrees(context=3), mask=mask), run(CONFIG, Degrees(), mask=mask))


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(config, degrees, **options):
    """How often each collective over more than one device stands in the compiled forward pass."""
    declared, mesh = decoder.declare(config), make_mesh(**degrees)
    f = jax.jit(decoder.forward(declared, mesh, **options))
    tokens = jax.ShapeDtypeStruct((4, 24), jnp.int32)  # divides by every mesh below
    text = f.lower(layout.abstract(declared, mesh), tokens).compile().as_text()
    found = dict.fromkeys(KINDS, 0)
    for kind, groups in re.findall(rf"= [^=]*? ({'|'.join(KINDS)})(?:-start)?\(.*?replica_groups=(\S+)", text):
        lone = re.match(r"\{\{\d+\}", groups) or re.match(r"\[\d+,1\]", groups)
        found[kind] += not lone
    return {k: n for k, n in found.items() if n}


PLAIN = Config(vocab=48, embed=32, layers=3, heads=8, kv_heads=4, head_dim=6, mlp=48)


@pytest.mark.parametrize(
    "degrees, options, block, ends",
    [
        (dict(tensor=2), {}, {"all-reduce": 2}, {"all-reduce": 1}),
        (
            dict(tensor=2),
            dict(residual="seq"),
            {"all-gather": 2, "reduce-scatter": 2},
            {"all-gather": 1, "reduce-scatter": 1},
        ),
        (dict(context=4), {}, {"all-to-all": 3}, {}),
        (dict(context=3), {}, {"all-gather": 1}, {}),
        (dict(context=2, tensor=2), {}, {"all-to-all": 3, "all-reduce": 2}, {"all-reduce": 1}),
        (dict(data=4), {}, {}, {}),
    ],
    ids=str,
)
def test_collectives(degrees, options, block, ends):
    """What the docstrings of `Block` and `attention` say, once each (the scan's body), and those of the two ends."""
    want = {k: block.get(k, 0) + ends.get(k, 0) for k in {*block, *ends}}
    assert collectives(PLAIN, degrees, **options) == want


def test_hidden_states_without_logits_run_no_further_layer():
    declared, mesh = decoder.declare(CONFIG), make_mesh(tensor=2)
    values = harsh(declared)
    broken = dataclasses.replace(values, norm=jax.tree.map(lambda w: w * np.nan, values.norm))
    q = values.blocks.attn.q.weight.copy()
    q[1] = np.nan  # the second layer
    broken = jax.tree.unflatten(
        jax.tree.structure(broken),
        [q if k == "blocks.attn.q.weight" else v for k, v in layout.named(broken).items()],
    )
    f = decoder.forward(declared, mesh, hidden_states=(0, 1), logits=False)
    got = np.asarray(jax.jit(f)(layout.place(declared, mesh, broken), TOKENS))
    both = decoder.forward(declared, mesh, hidden_states=True)
    _, want = jax.jit(both)(layout.place(declared, mesh, values), TOKENS)
    np.testing.assert_allclose(got, np.asarray(want)[:2], rtol=1e-6, atol=1e-6)


MASK = np.arange(S) >= np.array([[0], [7], [3]])  # padding on the left


@pytest.mark.parametrize("states", [(0, 1), (1,), (1, 2), None])
def test_encode_gives_the_states_of_the_chosen_layers_of_a_model_that_has_no_more(states):
    declared, mesh = decoder.declare(CONFIG), make_mesh(data=2, tensor=2)
    values = harsh(declared)
    _, hidden = decoder.forward(declared, mesh, hidden_states=True)(
        layout.place(declared, mesh, values), TOKENS, mask=MASK
    )
    want = np.concatenate([np.asarray(hidden[i]) for i in states or (2,)], axis=-1)
    part = decoder.encoder_part(declared, states)
    last = (states or (2,))[-1]
    assert part.head is None and part.blocks.attn.q.weight.shape[0] == last
    cut = dataclasses.replace(values, head=None, blocks=jax.tree.map(lambda w: w[:last], values.blocks))
    for model in (layout.place(part, mesh, cut), layout.place(declared, mesh, values)):
        for given in (part, declared):
            got = jax.jit(decoder.encode(given, mesh, layers=states))(model, TOKENS, MASK)
            np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-6 * np.abs(want).max())
    if last < 2:
        with pytest.raises(InputError, match=f"model has {last} blocks, and hidden state 2 comes after 2"):
            decoder.encode(declared, mesh)(layout.place(part, mesh, cut), TOKENS)


def test_features_stand_in_for_embeddings():
    """Rows of the embedding itself, given as features, change nothing; positions along axes that agree neither."""
    config = dataclasses.replace(CONFIG, rope=Rope(sections=(1, 2, 0)))
    declared = decoder.declare(config)
    values = harsh(declared)
    places = np.where(rng.random((B, S)) < 0.5, TOKENS, -1)
    positions = np.repeat(np.arange(S)[None, :, None], 3, axis=-1).repeat(B, axis=0)
    for degrees, options in ((dict(), {}), (dict(data=2, tensor=2, context=2), dict(residual="seq"))):
        mesh = make_mesh(**degrees)
        model, f = layout.place(declared, mesh, values), jax.jit(decoder.encode(declared, mesh, **options))
        other = np.where(places < 0, TOKENS, 0)
        got = f(model, other, MASK, features=values.embed.weight, places=places, positions=positions)
        want = np.asarray(f(model, TOKENS, MASK))
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-6 * np.abs(want).max())
    with pytest.raises(InputError) as error:
        f(model, TOKENS, MASK, features=np.ones((4, 3), np.float32), positions=positions[..., :2])
    for words in ("features and places go together", "features: width 3", "positions: axes (2,)"):
        assert words in str(error.value)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_weights_read_in_place_give_the_same(dtype):
    declared, mesh = decoder.declare(CONFIG, dtype), make_mesh(context=2)
    model = layout.place(declared, mesh, jax.tree.map(lambda v: v.astype(dtype), harsh(declared)))
    got, want = (
        np.asarray(jax.jit(decoder.forward(declared, mesh, in_place=x))(model, TOKENS), np.float32)
        for x in (True, False)
    )
    assert np.abs(got - want).max() <= (1e-6 if dtype == np.float32 else 2e-2) * np.abs(want).max()


def test_refusals():
    declared = decoder.declare(CONFIG)
    with pytest.raises(
        InputError, match=r"layer=2 does not divide by 4 \(pipe=4\): use pipe=1, 2\n(.|\n)*\(pipe=2,context=2\)"
    ):
        decoder.forward(declared, make_mesh(pipe=4))
    with pytest.raises(InputError, match="heads=8"):
        decoder.forward(declared, make_mesh(tensor=3))
    mesh = make_mesh()
    with pytest.raises(InputError, match="hidden_states=\\(1, 3\\)"):
        decoder.forward(declared, mesh, hidden_states=(1, 3))
    with pytest.raises(InputError, match="hidden_states"):
        decoder.forward(declared, mesh, logits=False)
    f, model = decoder.forward(declared, mesh), layout.place(declared, mesh, harsh(declared))
    with pytest.raises(InputError, match="lengths and mask"):
        f(model, TOKENS, lengths=LENGTHS, mask=TOKENS > 3)
    for none in (TOKENS[:0], TOKENS[:, :0]):
        with pytest.raises(InputError, match=r"tokens: \d+ rows of \d+ are none"):
            f(model, none)
    other = dataclasses.replace(CONFIG, norm_eps=0.5)
    with pytest.raises(InputError, match=r"model.config is not the declared one: norm_eps=0.5 \(was"):
        f(dataclasses.replace(model, config=other), TOKENS)
    with pytest.raises(InputError, match="model: is a Block, declared is a Decoder"):
        f(model.blocks, TOKENS)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kv_heads=3), "heads=8 does not divide by kv_heads=3"),
        (dict(head_dim=7), "head_dim=7 is odd"),
        (dict(layers=0), "layers=0"),
        (dict(sliding_layers=(True,)), "sliding_layers"),
        (dict(sliding_window=0), "sliding_window=0"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **change)


PUBLISHED = {  # parameters, a tied head not counted
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-small-3.2-24b": 23_572_403_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-vl-7b": 8_292_166_656 - 676_550_144,  # without the vision tower
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


def test_presets_have_their_published_sizes():
    assert decoder.PRESETS.keys() == PUBLISHED.keys()
    for name, count in PUBLISHED.items():
        family, config = find_preset(f"decoder/{name}")
        declared = layout.named(family.declare(config))
        assert sum(math.prod(p.shape) for p in declared.values()) == count, name
        assert config_from_json(Config, config_to_json(config)) == config
