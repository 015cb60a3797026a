"""Pipeline parallelism: schedules, the numbers of one device for both families, collectives, memory, refusals."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh
from tiny_qwen3_5 import CONFIG as TINY
from tiny_qwen3_5 import weights

from shardzoo.errors import InputError
from shardzoo.zoo import decoder, generate, layout, losses, pipeline, qwen3_5, qwen3_5_generate
from shardzoo.zoo.families import find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.schedule import IDLE, bubble, schedule

B, S = 3, 13
DENSE = decoder.Config(
    vocab=48, embed=16, layers=4, heads=8, kv_heads=4, head_dim=6, mlp=16, qkv_bias=True, qk_norm=True,
    sliding_window=5, sliding_layers=(True, False, False, True), tied=True, max_positions=64,
)  # fmt: skip
HYBRID = dataclasses.replace(
    TINY, layers=4, interval=2, embed=16, mlp=16, heads=4, kv_heads=2, key_heads=4, value_heads=4, key_dim=6
)
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
            k: v * np.float32(0.4 if re.search(r"(out|down)\.weight", k) else 1) for k, v in layout.named(host).items()
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
                ("deep hybrid", dict(pipe=4, context=2), dict(rounds=2, microbatches=5)),
            ]
        ),
    ],
    ids=str,
)
def test_one_forward_one_backward(name, degrees, options):
    """The schedule's loss and gradient are those of the differentiated forward pass on one device."""
    assert_close(trained(name, degrees, **options), differentiated(name))


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


def products(jaxpr, times=1):
    """How often matrix products are run by a jaxpr, those of its loops counted as often as they run."""
    count = 0
    for eqn in jaxpr.eqns:
        count += times * (eqn.primitive.name == "dot_general")
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        count += sum(products(sub, inner) for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return count


def run_by(name, degrees, rounds=1, microbatches=None, train=False):
    family, declared, mesh, *_ = live(name, degrees, rounds)
    model = layout.abstract(declared, mesh)
    tokens = jax.ShapeDtypeStruct((8, S), jnp.int32)
    if train:
        step = family.loss_and_grad(declared, mesh, microbatches=microbatches)
        return products(jax.make_jaxpr(step)(model, tokens, tokens).jaxpr)
    return products(jax.make_jaxpr(family.forward(declared, mesh, microbatches=microbatches))(model, tokens).jaxpr)


@pytest.mark.parametrize("stages, microbatches, rounds", [(2, 2, 1), (4, 3, 1), (2, 4, 2), (4, 8, 1), (4, 8, 2)])
def test_the_program_has_the_places_of_its_schedule(stages, microbatches, rounds):
    """A stage's program runs so many chunks: the formula's share of them is idle."""
    ends = 1  # the head, run once on all rows
    layers = 8 // (stages * rounds)
    a_layer = (run_by("deep", {}) - ends) // 8
    ran = run_by("deep", dict(pipe=stages), rounds, microbatches) - ends
    busy = rounds * microbatches * layers * a_layer
    assert 1 - busy / ran == pytest.approx(bubble(stages, microbatches, rounds), abs=1e-12)


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
    with pytest.raises(InputError, match="layer=4 does not divide by rounds=3"):
        pipeline.interleaved(declared, 3)
    with pytest.raises(InputError, match="in rounds already"):
        pipeline.interleaved(pipeline.interleaved(declared, 2), 2)
    with pytest.raises(InputError, match="stages=0"):
        bubble(0, 1)
    with pytest.raises(InputError, match="kind='zb'"):
        schedule(1, 1, 1, "zb")
