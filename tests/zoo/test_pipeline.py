"""Pipeline parallelism: schedules, the numbers of one device for both families, collectives, memory, refusals."""

import dataclasses
import functools
import itertools
import re

import equinox as eqx
import hlo
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh
from tiny_qwen3_5 import CONFIG as TINY
from tiny_qwen3_5 import weights

from shardzoo import checkpoints
from shardzoo.errors import InputError
from shardzoo.zoo import (
    adapters,
    decoder,
    generate,
    layout,
    losses,
    pipeline,
    quantize,
    qwen3_5,
    qwen3_5_generate,
    training,
)
from shardzoo.zoo.families import config_to_json, find_preset
from shardzoo.zoo.linears import linear_layers
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.rope import Rope
from shardzoo.zoo.schedule import IDLE, bubble, schedule

B, S = 3, 13
DENSE = decoder.Config(
    vocab=48, embed=16, layers=4, heads=8, kv_heads=4, head_dim=6, mlp=16, qkv_bias=True, qk_norm=True,
    sliding_window=5, sliding_layers=(True, False, False, True), tied=True, max_positions=64,
)  # fmt: skip
HYBRID = dataclasses.replace(TINY, layers=4, interval=2)
MODELS = {
    "dense": (decoder, DENSE, harsh),
    "deep": (decoder, dataclasses.replace(DENSE, layers=8, sliding_layers=None, tied=False), harsh),
    "hybrid": (qwen3_5, HYBRID, weights),
    "deep hybrid": (qwen3_5, dataclasses.replace(HYBRID, layers=16, tied=True), weights),
}
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 48, (B, S))
LENGTHS = np.array([13, 5, 8])
LEFT = np.arange(S) >= np.array([0, 9, 4])[:, None]
COTANGENT = rng.normal(size=(B, S, 48)).astype(np.float32)


def live(name, degrees, rounds=1, at_rest=None):
    """The declaration on a mesh, in rounds, and its values."""
    family, config, values = MODELS[name]
    declared = family.declare(config)
    degrees = layout.with_kv(declared, Degrees(**degrees))
    mesh = make_mesh(**{f.name: getattr(degrees, f.name) for f in dataclasses.fields(degrees)})
    host = values(declared)
    if name != "dense":  # each layer adds less, or last bits grow from layer to layer
        small = {
            k: v * np.float32(0.2 if re.search(r"(out|down)\.weight", k) else 1) for k, v in layout.named(host).items()
        }
        host = layout.fill(declared, small)
    plain = layout.split_at_rest(declared, at_rest, degrees, smallest=64) if at_rest else declared
    model, form = layout.place(plain, mesh, host), plain
    if rounds > 1:
        form = pipeline.interleaved(plain, rounds)
        model = pipeline.as_declared(model, form, mesh)
    return family, form, mesh, model, functools.partial(pipeline.as_declared, declared=plain, mesh=mesh)


def run(name, degrees, rounds=1, at_rest=None, mask=None, **options):
    """Logits where they mean something, and the gradient of a weighted sum of them."""
    family, declared, mesh, model, plain = live(name, degrees, rounds, at_rest)
    f = family.forward(declared, mesh, **options)
    seen = np.arange(S) < LENGTHS[:, None] if mask is None else mask
    how = {"lengths": LENGTHS} if mask is None else {"mask": mask}

    def total(model):
        logits = f(model, TOKENS, **how)
        assert logits.shape == (B, S, 48)
        logits = logits * seen[..., None]
        return jnp.sum(logits * COTANGENT), logits

    (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model)
    return jax.tree.map(np.asarray, (out, layout.named(plain(grads))))


@functools.cache
def one_device(name, masked=False):
    return run(name, {}, mask=LEFT if masked else None)


QUICK = [
    ("dense", dict(pipe=2, tensor=2, context=2), dict(microbatches=2)),
    ("hybrid", dict(pipe=2, tensor=2, context=2), dict()),
]
SLOW = [
    ("dense", dict(data=2, pipe=2, tensor=2), dict(residual="seq", at_rest="data")),
    ("dense", dict(pipe=4, context=2), dict(remat=True, microbatches=3)),
    ("dense", dict(pipe=2, context=3), dict(rounds=2, microbatches=3, at_rest="context")),
    ("dense", dict(pipe=2), dict(rounds=2, microbatches=2)),
    ("dense", dict(), dict(microbatches=2)),
    ("dense", dict(), dict(rounds=2)),
    ("deep", dict(pipe=8), dict(microbatches=5)),
    ("deep", dict(pipe=4, tensor=2), dict(rounds=2, residual="seq")),
    ("deep", dict(data=2, pipe=4), dict(remat="dots")),
    ("hybrid", dict(data=2, pipe=2, tensor=2), dict(residual="seq", at_rest="data", microbatches=2)),
    ("hybrid", dict(pipe=2, context=3), dict(remat=True, microbatches=3)),
    ("deep hybrid", dict(pipe=4, context=2), dict(rounds=2)),
    ("deep hybrid", dict(pipe=8), dict()),
    ("deep hybrid", dict(data=2, pipe=4), dict(microbatches=2)),
]


@pytest.mark.parametrize(
    "name, degrees, options", [*QUICK, *(pytest.param(*m, marks=pytest.mark.slow) for m in SLOW)], ids=str
)
def test_mesh_parity(name, degrees, options):
    """Forward and gradient through stages, at 1e-5 of one device's."""
    assert_close(run(name, degrees, **options), one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_masks_through_stages(name):
    got = run(name, dict(pipe=2, tensor=2, context=2), mask=LEFT, microbatches=3)
    assert_close(got, one_device(name, masked=True))


MORE = rng.integers(0, 48, (5, S))
MORE_LENGTHS = np.array([13, 5, 8, 2, 11])


def trained(name, degrees, rounds=1, at_rest=None, **options):
    """Loss and gradient by 1f1b; by differentiating the forward pass if there are no options."""
    family, declared, mesh, model, plain = live(name, degrees, rounds, at_rest)
    labels, counts = losses.next_tokens(MORE, MORE_LENGTHS)
    if options:
        step = jax.jit(family.loss_and_grad(declared, mesh, **options))
        loss, grads = step(model, MORE, labels, counts, lengths=MORE_LENGTHS)
        for gradient, weight in zip(jax.tree.leaves(grads), jax.tree.leaves(model), strict=True):
            assert gradient.sharding.is_equivalent_to(weight.sharding, weight.ndim)
    else:
        f = family.forward(declared, mesh)
        total = jax.value_and_grad(lambda m: losses.cross_entropy(f(m, MORE, lengths=MORE_LENGTHS), labels, counts))
        loss, grads = jax.jit(total)(model)
    return jax.tree.map(np.asarray, (loss, layout.named(plain(grads))))


@functools.cache
def differentiated(name):
    return trained(name, {})


@pytest.mark.parametrize(
    "name, degrees, options",
    [
        ("dense", dict(pipe=2, tensor=2), dict(rounds=2, microbatches=4)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("dense", dict(), dict(microbatches=3)),
                ("dense", dict(pipe=2, tensor=2, context=2), dict(microbatches=5)),
                ("dense", dict(data=2, pipe=4), dict(microbatches=2, remat=True)),
                ("dense", dict(data=2, pipe=2, tensor=2), dict(microbatches=3, residual="seq", at_rest="data")),
                ("deep", dict(pipe=8), dict(microbatches=5)),
                ("deep", dict(pipe=2, context=2), dict(rounds=4, microbatches=3, at_rest="context")),
                ("hybrid", dict(pipe=2, tensor=2, context=2), dict(microbatches=3)),
            ]
        ),
    ],
    ids=str,
)
def test_one_forward_one_backward(name, degrees, options):
    """The schedule's loss and gradient are those of the differentiated forward pass on one device."""
    assert_close(trained(name, degrees, **options), differentiated(name))


@pytest.mark.parametrize(
    "name, degrees, options",
    [
        ("dense", dict(data=2, pipe=2, tensor=2), dict(microbatches=3, residual="seq")),
        pytest.param("hybrid", dict(pipe=2, context=2, tensor=2), dict(microbatches=2), marks=pytest.mark.slow),
        pytest.param("deep", dict(pipe=4, tensor=2), dict(rounds=2, microbatches=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_devices_start_loops_and_collectives_in_one_order(name, degrees, options):
    """Else devices wait for each other for ever on CPUs, in one of some hundred steps."""
    at_rest = "data" if "data" in degrees else None
    options = dict(options)
    family, declared, mesh, model, _ = live(name, degrees, options.pop("rounds", 1), at_rest)
    labels, counts = losses.next_tokens(MORE, MORE_LENGTHS)
    step = jax.jit(family.loss_and_grad(declared, mesh, **options))
    assert not hlo.unordered(step.lower(model, MORE, labels, counts, lengths=MORE_LENGTHS).compile())


ADAPTERS = "*.lora.*.[ab]"


@pytest.mark.parametrize(
    "name, degrees, rounds",
    [("dense", dict(pipe=2), 2), pytest.param("hybrid", dict(pipe=2, tensor=2), 1, marks=pytest.mark.slow)],
)
def test_adapters_beside_quantized_weights_are_trained(name, degrees, rounds):
    """Their gradients, and no others, are those of the differentiated forward pass on one device."""
    family, config, values = MODELS[name]
    declared, host, style = quantized_with_adapters(family, config, values, np.random.default_rng(3))
    labels, counts = losses.next_tokens(MORE, MORE_LENGTHS)
    one = make_mesh()
    whole, model = adapters.attach(declared, layout.place(declared, one, host), one, [style])
    forward, (chosen, fixed) = family.forward(whole, one), training.split_trainable(model, ADAPTERS)

    def loss(chosen):
        return losses.cross_entropy(forward(eqx.combine(chosen, fixed), MORE, lengths=MORE_LENGTHS), labels, counts)

    want = jax.jit(jax.value_and_grad(loss))(chosen)
    mesh = make_mesh(**degrees)
    plain, model = adapters.attach(declared, layout.place(declared, mesh, host), mesh, [style])
    form = pipeline.interleaved(plain, rounds)
    step = jax.jit(family.loss_and_grad(form, mesh, trainable=ADAPTERS, microbatches=3))
    value, got = step(pipeline.as_declared(model, form, mesh), MORE, labels, counts, lengths=MORE_LENGTHS)
    assert jax.tree.structure(got) == jax.tree.structure(training.split_trainable(model, ADAPTERS)[0])
    found, whole = jax.tree.map(np.asarray, ((value, got), want))
    assert_close(jax.tree.map(lambda g, w: g.reshape(w.shape), found, whole), whole)


SIZES = [(p, m, v) for p in (1, 2, 3, 4, 8, 16) for m in (1, 2, 3, 4, 5, 8, 16) for v in (1, 2, 3)]


def test_idle_places_are_those_of_the_formula():
    for stages, microbatches, rounds in SIZES:
        if rounds == 1 or microbatches % stages == 0:
            formula = (stages - 1) / (rounds * microbatches + stages - 1)
            assert bubble(stages, microbatches, rounds) == pytest.approx(formula, abs=1e-12)
        for kind in ("gpipe", "1f1b"):
            assert schedule(stages, microbatches, rounds, kind).idle == pytest.approx(
                bubble(stages, microbatches, rounds), abs=1e-12
            )


def when_done(work, stages):
    """(chunk, microbatch) -> tick, and slot."""
    return {
        (work.round[t, s] * stages + s, m): (t, work.slot[t, s])
        for (t, s), m in np.ndenumerate(work.microbatch)
        if m != IDLE
    }


def test_schedules_do_everything_once_in_time_and_keep_inputs_apart():
    for stages, microbatches, rounds in SIZES:
        plan, last = schedule(stages, microbatches, rounds), stages * rounds - 1
        ahead, back = when_done(plan.forward, stages), when_done(plan.backward, stages)
        everything = {(c, m) for c in range(last + 1) for m in range(microbatches)}
        assert set(ahead) == set(back) == everything
        for c, m in everything:  # what is sent is used in the next tick, and the last stage turns at once
            assert c == 0 or ahead[c, m][0] == ahead[c - 1, m][0] + 1
            assert back[c, m][0] == (ahead[c, m][0] if c == last else back[c + 1, m][0] + 1)
            assert ahead[c, m][1] == back[c, m][1] < plan.slots <= stages * rounds + stages - 1
        for stage in range(stages):
            held = {}
            for c, m in everything:
                if c % stages == stage:
                    held.setdefault(ahead[c, m][1], []).append((ahead[c, m][0], back[c, m][0]))
            for spans in held.values():
                spans = sorted(spans)
                assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


def often(jaxpr, what, times=1):
    """How often an operation is run by a jaxpr, that of its loops counted as often as they run."""
    count = 0
    for eqn in jaxpr.eqns:
        count += times * (eqn.primitive.name == what)
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        count += sum(often(sub, what, inner) for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return count


def program(name, degrees, rounds=1, train=False, **options):
    family, declared, mesh, *_ = live(name, degrees, rounds)
    tokens = jax.ShapeDtypeStruct((8, S), jnp.int32)
    f = (family.loss_and_grad if train else family.forward)(declared, mesh, **options)
    return jax.make_jaxpr(f)(layout.abstract(declared, mesh), tokens, *[tokens] * train).jaxpr


@pytest.mark.parametrize("stages, microbatches, rounds", [(2, 2, 1), (4, 3, 1), (2, 4, 2), (4, 8, 1), (4, 8, 2)])
def test_the_program_has_the_places_of_its_schedule(stages, microbatches, rounds):
    """A stage's program runs so many chunks, forward and backward: the formula's share of them is idle."""
    idle, busy = bubble(stages, microbatches, rounds), rounds * microbatches
    options = dict(rounds=rounds, microbatches=microbatches)
    forward = program("deep", dict(pipe=stages), **options)
    a_layer = (often(program("deep", {}), "dot_general") - 1) // 8  # all but the head, which is run once on all rows
    chunks = (often(forward, "dot_general") - 1) / (a_layer * 8 // (stages * rounds))
    assert 1 - busy / chunks == pytest.approx(idle, abs=1e-12)
    assert often(forward, "ppermute") == chunks  # what each place sends on
    train = program("deep", dict(pipe=stages), train=True, **options)
    assert 1 - 2 * busy / often(train, "ppermute") == pytest.approx(idle, abs=1e-12)


def compiled(name, degrees, train=False, **options):
    family, declared, mesh, *_ = live(name, degrees)
    tokens = jax.ShapeDtypeStruct((4, 12), jnp.int32)
    f = (family.loss_and_grad if train else family.forward)(declared, mesh, **options)
    return jax.jit(f).lower(layout.abstract(declared, mesh), tokens, *[tokens] * train).compile()


def collectives(text):
    found = {}
    for kind, rest in re.findall(r"= [^=\n]*? (all-reduce|all-gather|collective-permute)(?:-start)?\((.*)", text):
        groups = re.search(r"replica_groups=(\S+)|source_target_pairs=(\S+)", rest)[0]
        if not re.search(r"=\{\{\d+\}|=\[\d+,1\]", groups):
            found[kind] = found.get(kind, 0) + 1
    return found


def test_collectives_and_memory():
    """One permute a tick, one all-reduce for the embedding and one for the last stage's stream; weights by stages."""
    one, two = compiled("dense", {}), compiled("dense", dict(pipe=2))
    assert collectives(one.as_text()) == {}
    assert collectives(two.as_text()) == {"collective-permute": 1, "all-reduce": 2}
    weights_of = [c.memory_analysis().argument_size_in_bytes - 4 * 12 * 4 for c in (one, two)]
    assert weights_of[1] == weights_of[0] / 2 + DENSE.embed * 4 / 2  # all but the last norm


@pytest.mark.parametrize(
    "name, module",
    [("dense", generate), pytest.param("hybrid", qwen3_5_generate, marks=pytest.mark.slow)],
)
def test_generation_through_stages(name, module):
    got = []
    for degrees in ({}, dict(pipe=2, context=2, tensor=2)):
        _, declared, mesh, model, _ = live(name, degrees)
        got.append(module.generate(declared, mesh)(model, TOKENS, LENGTHS, max_new_tokens=4))
    for one, two in zip(*got, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def quantized_with_adapters(family, config, values, draw):
    """The declaration in int8, values for it on the host, and an adapter of every linear layer."""
    declared = quantize.declare(family.declare(config), "int8")
    host = {
        k: draw.integers(-99, 99, p.shape).astype(np.int8) if p.fixed else 0.02 * v if k.endswith("scale") else v
        for (k, p), v in zip(layout.named(declared).items(), layout.named(values(declared)).values(), strict=True)
    }
    factors = {}
    for path, layer in linear_layers(declared).items():
        lora = adapters.declare_lora(layer, 3)
        a, b = (np.asarray(0.2 * draw.normal(size=s), np.float32) for s in (lora.a.shape, lora.b.shape))
        factors[path] = adapters.Factors(a=a, b=b, ratio=np.ones(lora.ratio.shape, np.float32))
    return declared, layout.fill(declared, host), adapters.Adapter(name="style", strength=0.5, factors=factors)


@pytest.mark.slow
def test_hidden_states_features_and_quantized_weights_with_adapters_through_stages():
    """What `encode` and image-reading models ask for, of weights in other forms, is the same through two stages."""
    config, draw = dataclasses.replace(DENSE, rope=Rope(sections=(1, 1, 1))), np.random.default_rng(2)
    declared, host, style = quantized_with_adapters(decoder, config, harsh, draw)
    given = dict(
        features=draw.normal(size=(7, 16)).astype(np.float32),
        places=np.where(draw.random((B, S)) < 0.4, draw.integers(0, 7, (B, S)), -1),
        positions=draw.integers(0, 9, (B, S, 3)),
        mask=LEFT,
    )
    got = []
    for degrees, options in (({}, {}), (dict(pipe=2, tensor=2, context=2), dict(in_place=True)), (dict(pipe=4), {})):
        mesh = make_mesh(**degrees)
        both = adapters.attach(declared, layout.place(declared, mesh, host), mesh, [style])
        f = decoder.forward(both[0], mesh, hidden_states=(0, 1, 3, 4), **options)
        got.append(jax.tree.map(np.asarray, jax.jit(f)(both[1], TOKENS, **given)))
    assert_close(got[1], got[0])
    assert_close(got[2], got[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_sixteen_bits_through_stages(name):
    family, config, values = MODELS[name]
    declared = family.declare(config, jnp.bfloat16)
    host = jax.tree.map(lambda v: v.astype(jnp.bfloat16), values(family.declare(config)))
    got = []
    for degrees in ({}, dict(pipe=2, context=2)):
        mesh = make_mesh(**degrees)
        f = jax.jit(family.forward(declared, mesh))
        out = f(layout.place(declared, mesh, host), TOKENS, lengths=LENGTHS)
        got.append(np.asarray(out, np.float32) * (np.arange(S) < LENGTHS[:, None])[..., None])
    assert np.abs(got[0] - got[1]).max() <= 3e-2 * np.abs(got[0]).max()


def test_checkpoints_from_before_the_split_restore_onto_stages(tmp_path):
    """The split that a manifest names is that of the day; what is read is what the mesh's devices hold."""

    def without(p):
        split = {d: tuple(a for a in p.axes(d) if a != "pipe") for d in p.names}
        return dataclasses.replace(p, split={d: a for d, a in split.items() if a})

    declared = decoder.declare(DENSE)
    old, values = jax.tree.map(without, declared), harsh(declared)
    header = checkpoints.ManifestHeader(family="decoder", config=config_to_json(DENSE))
    checkpoints.save(tmp_path / "c", layout.place(old, make_mesh(tensor=2), values), old, header=header)
    model = checkpoints.restore(tmp_path / "c", make_mesh(pipe=2, tensor=2), verify=True)
    for got, want in zip(jax.tree.leaves(model), jax.tree.leaves(values), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


def test_refusals():
    declared = qwen3_5.declare(find_preset("qwen3-5/qwen3.5-27b")[1])
    for pipe in (1, 2, 4, 8, 16):
        layout.audit(declared, Degrees(pipe=pipe, tensor=4))
    message = r"layer=16 does not divide by 3 \(pipe=3\): use pipe=1, 2, 4, 8, 16\n"
    with pytest.raises(InputError, match=message):
        layout.audit(declared, Degrees(pipe=3))
    small = decoder.declare(dataclasses.replace(DENSE, vocab=50))
    with pytest.raises(InputError, match=r"vocab=50 does not divide by 4 \(pipe=4 x kv=1 x rep=1\)"):
        layout.audit(small, Degrees(pipe=4))
    declared = decoder.declare(DENSE)
    for make in (decoder.forward, decoder.loss_and_grad):
        with pytest.raises(InputError, match="microbatches=0 is not at least 1"):
            make(declared, make_mesh(), microbatches=0)
    for wrong in (2.5, 2.0, True, "2"):
        with pytest.raises(InputError, match=f"f: microbatches={wrong!r} is not a whole number"):
            pipeline.check_microbatches("f", wrong)
    pipeline.check_microbatches("f", np.int64(2))
    quantized = quantize.declare(declared, "int8")
    with pytest.raises(InputError, match=r"\.values: have no gradient \(quantized.*pass trainable="):
        decoder.loss_and_grad(quantized, make_mesh())
    with pytest.raises(InputError, match=r"trainable='\*\.lora\.\*\.\[ab\]' matches no leaf"):
        decoder.loss_and_grad(quantized, make_mesh(), trainable=ADAPTERS)
    with pytest.raises(InputError, match="layer=4 does not divide by rounds=3"):
        pipeline.interleaved(declared, 3)
    with pytest.raises(InputError, match="in rounds already"):
        pipeline.interleaved(pipeline.interleaved(declared, 2), 2)
    with pytest.raises(InputError, match="stages=0"):
        bubble(0, 1)
    with pytest.raises(InputError, match="kind='zb'"):
        schedule(1, 1, 1, "zb")
