"""Qwen3.5 on meshes: the same numbers as on one device, the collectives it promises, what it refuses."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from mesh_parity import assert_close, harsh, on_mesh
from tiny_qwen3_5 import CONFIG, weights

from shardzoo.errors import InputError
from shardzoo.kernels.gated_delta import gated_delta
from shardzoo.zoo import delta_net, layout, qwen3_5
from shardzoo.zoo.delta_net import DeltaNet, Recurrent, _silu, delta_over_context, last_tokens, tokens_before
from shardzoo.zoo.families import config_from_json, config_to_json, find_preset
from shardzoo.zoo.mesh import TP, Degrees, make_mesh
from shardzoo.zoo.qwen3_5 import Config, pair_axes

B, S = 3, 19
SPLIT = P("data", "context")
OTHER = dataclasses.replace(
    CONFIG, layers=4, interval=2, heads=24, kv_heads=4, key_heads=16, value_heads=48, key_dim=6, value_dim=7, taps=5,
    tied=True,
)  # fmt: skip
CONFIGS = {"thirds": CONFIG, "published heads": OTHER}
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 48, (B, S))
LENGTHS = np.array([19, 7, 12])
COTANGENT = rng.normal(size=(B, S, 48)).astype(np.float32)
LEFT = np.arange(S) >= np.array([0, 11, 5])[:, None]


def run(config, degrees, at_rest=None, mask=None, **options):
    """Logits where they mean something, and the gradient of a weighted sum of them."""
    declared = qwen3_5.declare(config)
    values = weights(declared)
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, layout.with_kv(declared, degrees), smallest=64)
        assert any(p.rest for p in layout.named(declared.delta).values())
    mesh = make_mesh(**{f.name: getattr(degrees, f.name) for f in dataclasses.fields(degrees)})
    f = qwen3_5.forward(declared, mesh, **options)
    seen = np.arange(S) < LENGTHS[:, None] if mask is None else mask
    how = {"lengths": LENGTHS} if mask is None else {"mask": mask}

    def total(model):
        logits = f(model, TOKENS, **how)
        assert logits.shape == (B, S, 48)
        logits = logits * seen[..., None]
        return jnp.sum(logits * COTANGENT), logits

    (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(layout.place(declared, mesh, values))
    return jax.tree.map(np.asarray, (out, layout.named(grads)))


@functools.cache
def one_device(name):
    return run(CONFIGS[name], Degrees())


MESHES = [
    ("thirds", dict(context=3), dict()),
    ("thirds", dict(tensor=2, context=2), dict(residual="seq", at_rest="context")),
]
MORE = [
    ("published heads", dict(tensor=8, kv_heads=4), dict()),  # KV heads repeat over rep
    ("thirds", dict(tensor=2), dict()),
    ("thirds", dict(data=2, context=2, tensor=2), dict(at_rest="data", remat=True)),
    ("thirds", dict(context=8), dict()),
    ("thirds", dict(tensor=4), dict(residual="seq", remat=True)),
    ("thirds", dict(context=2), dict()),
    ("thirds", dict(context=4, tensor=2), dict()),
    ("thirds", dict(context=5), dict(at_rest="context")),
    ("published heads", dict(context=4, tensor=2), dict(residual="seq")),
    ("published heads", dict(context=7), dict()),
    ("published heads", dict(tensor=4, context=2), dict()),
    ("published heads", dict(data=3, context=2), dict()),
]


@pytest.mark.parametrize(
    "name, degrees, options", [*MESHES, *(pytest.param(*m, marks=pytest.mark.slow) for m in MORE)], ids=str
)
def test_mesh_parity(name, degrees, options):
    """Forward and gradient on a mesh, at 1e-5 of one device's."""
    assert_close(run(CONFIGS[name], Degrees(**degrees), **options), one_device(name))


@pytest.mark.parametrize("piece", [3, 13, 40])  # tokens of three rows: 1, 4 and 13 of each, which 19 leave 0, 3 and 6
def test_a_sequence_in_pieces_is_the_sequence(monkeypatch, piece):
    """Outputs and gradients, of ragged rows and of rows with masks."""
    want = one_device("thirds"), run(CONFIG, Degrees(), mask=LEFT)
    monkeypatch.setattr(delta_net, "CPU_PIECE", piece)
    monkeypatch.setattr(delta_net, "CPU_STEP", 1)
    assert_close((run(CONFIG, Degrees()), run(CONFIG, Degrees(), mask=LEFT)), want)


def delta_layer(call, inputs, out_specs):
    """A layer on one device: the jitted call, and weights for it."""
    declared = DeltaNet.declare(CONFIG.delta_sizes)
    return on_mesh(declared, make_mesh(), call, inputs, out_specs), harsh(declared)


@pytest.mark.parametrize("piece, dtype", [(3, "float32"), (13, "float32"), (13, "bfloat16"), (6, "float32")])
def test_decoding_goes_on_from_a_prompt_in_pieces(monkeypatch, piece, dtype):
    """The state and the tail, also of rows that are shorter than the convolution, or empty."""
    lengths = np.array([19, 2, 0])
    x = jnp.asarray(np.random.default_rng(3).normal(size=(B, S, CONFIG.embed)), dtype)

    def prefill():
        kept = Recurrent(tail=P("data", None, TP), state=P("data", TP))
        f, model = delta_layer(lambda m, x, n: m.prefill(x, n), (SPLIT, P("data")), (SPLIT, kept))
        out, kept = f(jax.tree.map(lambda w: w.astype(dtype), model), x, lengths)
        return np.asarray(out, np.float32)[np.arange(S) < lengths[:, None]], np.asarray(kept.tail), kept.state

    want = prefill()
    monkeypatch.setattr(delta_net, "CPU_PIECE", piece)
    monkeypatch.setattr(delta_net, "CPU_STEP", 1)
    got = prefill()
    assert want[1].any() and not want[1][2].any()
    np.testing.assert_array_equal(got[1], want[1])
    digits = dict(float32=2e-5, bfloat16=2e-2)[dtype]
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=digits * np.abs(want[0]).max())
    np.testing.assert_allclose(got[2], want[2], rtol=0, atol=2e-5 * np.abs(want[2]).max())


def test_silu_of_a_cpu_holds_at_any_size():
    x = jnp.concatenate([jnp.linspace(-1e3, 1e3, 4001), jnp.array([-1e30, 1e30])])
    for f, wanted in ((_silu, jax.nn.silu), (jax.vmap(jax.grad(_silu)), jax.vmap(jax.grad(jax.nn.silu)))):
        np.testing.assert_allclose(f(x), wanted(x), rtol=2e-6, atol=1e-30)


def test_a_sequence_in_pieces_sums_gradients_over_data_once(monkeypatch):
    monkeypatch.setattr(delta_net, "CPU_PIECE", 64)
    declared, mesh = DeltaNet.declare(CONFIG.delta_sizes), make_mesh(data=2)
    layer = jax.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=(layout.specs(declared), SPLIT), out_specs=SPLIT)
    step = jax.jit(jax.grad(lambda m, x: jnp.sum(jnp.sin(layer(m, x)))))
    text = step.lower(harsh(declared), jnp.ones((2, 256, CONFIG.embed))).compile().as_text()
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    loops = [c for c in re.split(r"\n(?=%)", text) if c.removeprefix("%").split(" ")[0] in bodies]
    both = re.compile(r" all-reduce\(.*replica_groups=(\{\{0,1\}|\[1,2\])")
    assert len(loops) == len(bodies) > 0 and both.search(text)
    assert not any(both.search(loop) for loop in loops)


def test_what_a_cpu_holds_beside_input_and_output_does_not_grow_with_the_sequence():
    layer, model = delta_layer(lambda m, x: m(x), (SPLIT,), SPLIT)

    def temporaries(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, CONFIG.embed), jnp.float32)
        return layer.lower(model, x).compile().memory_analysis().temp_size_in_bytes

    short, long = (temporaries(n * delta_net.CPU_PIECE) for n in (2, 10))
    assert long - short <= 2 * 8 * delta_net.CPU_PIECE * CONFIG.embed * 4, (short, long)


@pytest.mark.slow
def test_masks_over_a_mesh():
    assert_close(run(CONFIG, Degrees(context=2, tensor=2), mask=LEFT), run(CONFIG, Degrees(), mask=LEFT))


@pytest.mark.parametrize(
    "degree, seq", [(3, 7), (8, 200), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 130), (8, 8)))]
)
def test_the_rule_over_context(degree, seq):
    """Outputs, final state on every device, and gradients of both: those of the whole sequence at once."""
    degrees, (batch, keys, heads, key_dim, value_dim) = dict(context=degree), (2, 2, 4, 5, 3)
    draw = np.random.default_rng(1)
    seq += -seq % degree
    q, k = draw.normal(size=(2, batch, seq, keys, key_dim)) / key_dim**0.5
    v, fall = draw.normal(size=(batch, seq, heads, value_dim)), draw.exponential(0.2, (batch, seq, heads))
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, -fall, draw.random((batch, seq, heads)))]
    mask = jnp.arange(seq) < jnp.asarray([[seq], [seq // 3]])
    way = [jnp.asarray(draw.normal(size=x), jnp.float32) for x in (v.shape, (batch, heads, key_dim, value_dim))]

    def loss(f):
        def total(arrays):
            out, state = f(arrays)
            out = out * mask[..., None, None]
            return jnp.sum(out * way[0]) + jnp.sum(state * way[1]), (out, state)

        return jax.jit(jax.value_and_grad(total, has_aux=True))(arrays)

    split = P("data", "context")

    def shard(keep):
        """The state as it is: that of the last device; or known to be the same on all."""

        def f(arrays, mask):
            out, state = delta_over_context(*arrays, mask=mask, keep=keep)
            return out, state if keep else lax.pmean(state, "context")

        specs = ([split] * 5, split)
        return jax.shard_map(f, mesh=make_mesh(**degrees), in_specs=specs, out_specs=(split, P("data")))

    (_, want), want_grads = loss(lambda x: gated_delta(*x, mask=mask))
    (_, got), grads = loss(lambda x: shard(False)(x, mask))
    out, state = jax.jit(shard(True))(arrays, mask)
    found = (got, grads, (out * mask[..., None, None], state))
    assert_close(*jax.tree.map(np.asarray, (found, (want, want_grads, want))))


@pytest.mark.parametrize("degree, share, count", [(4, 5, 3), (4, 2, 3), (8, 1, 4), (2, 1, 3), (1, 4, 3), (3, 2, 0)])
def test_tokens_across_the_borders_of_shards(degree, share, count):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, degree * share, 3)), jnp.float32)
    lengths = jnp.asarray([degree * share, min(2, degree * share)])
    mesh = make_mesh(context=degree)
    spec, wide = P("data", "context"), jnp.pad(x, ((0, 0), (count, 0), (0, 0)))
    halo = jax.shard_map(lambda x: tokens_before(x, count), mesh=mesh, in_specs=spec, out_specs=spec)(x)
    want = [wide[:, i * share : i * share + count] for i in range(degree)]
    np.testing.assert_array_equal(halo, jnp.concatenate(want, axis=1))
    ends = jax.shard_map(
        lambda x, n: last_tokens(x, n, count), mesh=mesh, in_specs=(spec, P("data")), out_specs=P("data")
    )(x, lengths)
    np.testing.assert_array_equal(ends, jnp.stack([w[n : n + count] for w, n in zip(wide, lengths, strict=True)]))


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(config, degrees, **options):
    """How often each collective over more than one device stands in the compiled forward pass."""
    declared, mesh = qwen3_5.declare(config), make_mesh(**degrees)
    f = jax.jit(qwen3_5.forward(declared, mesh, **options))
    tokens = jax.ShapeDtypeStruct((4, 24), jnp.int32)  # divides by every mesh below
    text = f.lower(layout.abstract(declared, mesh), tokens).compile().as_text()
    found = dict.fromkeys(KINDS, 0)
    for kind, groups in re.findall(
        rf"= [^=]*? ({'|'.join(KINDS)})(?:-start)?\(.*?(?:replica_groups|source_target_pairs)=(\S+)", text
    ):
        lone = kind != "collective-permute" and (re.match(r"\{\{\d+\}", groups) or re.match(r"\[\d+,1\]", groups))
        found[kind] += not lone
    return {k: n for k, n in found.items() if n}


DELTA = {"collective-permute": 1, "all-gather": 1}  # over context, of one DeltaNet layer
SUMS = {"all-reduce": 2}  # over the tensor axes, of any layer


@pytest.mark.parametrize(
    "degrees, options, delta, attn, ends",
    [
        pytest.param(dict(tensor=2), {}, SUMS, SUMS, {"all-reduce": 1}, marks=pytest.mark.slow),
        (
            dict(tensor=2),
            dict(residual="seq"),
            {"all-gather": 2, "reduce-scatter": 2},
            {"all-gather": 2, "reduce-scatter": 2},
            {"all-gather": 1, "reduce-scatter": 1},
        ),
        pytest.param(dict(context=4), {}, DELTA, {"all-to-all": 3}, {}, marks=pytest.mark.slow),
        (dict(context=2, tensor=2), {}, DELTA | SUMS, {"all-to-all": 3} | SUMS, {"all-reduce": 1}),
        pytest.param(dict(data=4), {}, {}, {}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_collectives(degrees, options, delta, attn, ends):
    """What the docstrings of `Block`, `DeltaNet` and `attention` say: once for each kind of layer, and the two ends."""
    want = {k: sum(d.get(k, 0) for d in (delta, attn, ends)) for k in {*delta, *attn, *ends}}
    assert collectives(CONFIG, degrees, **options) == want


def test_pairs_take_turns_with_the_axes():
    axes = pair_axes(dataclasses.replace(CONFIG, head_dim=256, rotary_dim=64, sections=(11, 11, 10)))
    assert axes.tolist() == [*[0, 1, 2] * 10, 0, 1] and (axes == 1).sum() == 11
    axes = pair_axes(dataclasses.replace(CONFIG, head_dim=16, rotary_dim=16, sections=(6, 1, 1)))
    assert axes.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_positions_with_three_axes():
    """Equal on all axes they are ordinary positions; and they matter, over a mesh as well."""
    declared = qwen3_5.declare(CONFIG)
    plain = np.broadcast_to(np.arange(S) * 2, (B, S))
    axes = np.stack([plain, plain[:, ::-1], plain // 3], axis=-1)

    def logits(positions, **degrees):
        mesh = make_mesh(**degrees)
        f = jax.jit(qwen3_5.forward(declared, mesh))
        return np.asarray(f(layout.place(declared, mesh, weights(declared)), TOKENS, positions=positions))

    one = logits(plain)
    np.testing.assert_allclose(logits(np.repeat(plain[..., None], 3, -1)), one, atol=1e-5 * np.abs(one).max())
    assert_close(logits(axes, context=2), logits(axes))
    assert np.abs(logits(axes) - one).max() > 1e-3 * np.abs(one).max()


def test_refusals():
    declared = qwen3_5.declare(find_preset("qwen3-5/qwen3.5-27b")[1])
    for tensor in (1, 2, 4, 8):
        layout.audit(declared, Degrees(tensor=tensor, context=2))
    with pytest.raises(InputError, match=r"heads=24 does not divide by 16(.|\n)*tensor degrees that fit: 1, 2, 4, 8\b"):
        layout.audit(declared, Degrees(tensor=16))
    declared, mesh = qwen3_5.declare(CONFIG), make_mesh()
    f, model = qwen3_5.forward(declared, mesh), layout.place(declared, mesh, harsh(declared))
    with pytest.raises(InputError, match="lengths and mask"):
        f(model, TOKENS, lengths=LENGTHS, mask=TOKENS > 3)
    with pytest.raises(InputError, match=r"positions: axes \(2,\)"):
        f(model, TOKENS, positions=np.zeros((B, S, 2), int))
    with pytest.raises(InputError, match="features and places go together"):
        f(model, TOKENS, places=TOKENS)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kv_heads=3), "heads=8 does not divide by kv_heads=3"),
        (dict(key_heads=3), "value_heads=16 does not divide by key_heads=3"),
        (dict(layers=7), "layers=7 does not divide by interval=3"),
        (dict(interval=1), "interval=1 leaves no DeltaNet layer"),
        (dict(rotary_dim=5), "rotary_dim=5 is odd"),
        (dict(rotary_dim=12), "above head_dim=10"),
        (dict(sections=(1, 2)), "sections="),
        (dict(taps=0), "taps=0"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_presets_have_their_published_sizes():
    family, config = find_preset("qwen3-5/qwen3.5-27b")
    declared = layout.named(family.declare(config))
    assert sum(math.prod(p.shape) for p in declared.values()) == 26_895_998_464
    assert config_from_json(Config, config_to_json(config)) == config
