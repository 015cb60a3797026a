"""The gated delta rule: the definition against a loop in numpy, the chunked version against the definition."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_cases import agree, everything, exact, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P

from shardzoo.errors import InputError
from shardzoo.kernels.gated_delta import gated_delta, gated_delta_parts, which_implementation
from shardzoo.kernels.gated_delta.inverse import unit_lower_inverse
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 1e-5  # in float32, of the largest element


def by_hand(q, k, v, log_decay, beta, state, mask=None):
    """Outputs and final state, one number after another."""
    state, out, group = state.copy(), np.zeros(v.shape), v.shape[2] // q.shape[2]
    for b, t, h in np.ndindex(v.shape[:3]):
        if mask is not None and not mask[b, t]:
            continue
        s, key = state[b, h], k[b, t, h // group]
        s *= np.exp(log_decay[b, t, h])
        s += np.outer(key, beta[b, t, h] * (v[b, t, h] - key @ s))
        out[b, t, h] = q[b, t, h // group] @ s / np.sqrt(q.shape[-1])
    return out, state


@pytest.mark.parametrize("decay", [0.3, np.inf])
def test_the_definition_is_the_recurrence(decay):
    x = inputs(9, decay=decay)
    mask = np.random.default_rng(2).random((2, 9)) < 0.7
    for some in (None, mask):
        out, state = by_hand(**x, mask=some)
        got = exact(x, None if some is None else jnp.asarray(some))
        assert np.abs(got["out"] - out).max() <= 1e-12 and np.abs(got["last"] - state).max() <= 1e-12


@pytest.mark.parametrize("decay", [0.3, np.inf])
def test_one_token_on_a_cpu_makes_the_state_once(decay):
    """One product, of the state as it lies: XLA lays a state out anew for each product with a vector."""
    x = inputs(1, decay=decay)
    names, mesh = tuple(x), make_mesh()

    def one(*arrays):
        return gated_delta(**dict(zip(names, arrays, strict=True)))

    run = jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P())
    compiled = jax.jit(run).lower(*(jnp.asarray(a, jnp.float32) for a in x.values())).compile()
    assert len(re.findall(r" dot\(", compiled.as_text())) <= 1
    got = compiled(*(jnp.asarray(a, jnp.float32) for a in x.values()))
    for found, expected in zip(got, by_hand(**x), strict=True):
        assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


CASES = {
    "one token": dict(seq=1),
    "less than a chunk": dict(seq=37),
    "a chunk": dict(seq=64),
    "a token more": dict(seq=65, batch=1),
    "many chunks": dict(seq=200, batch=1, decay=0.02),
    "no decay": dict(seq=150, batch=1, decay=0.0),
    "extreme decays": dict(seq=150, decay=np.inf),
    "one group": dict(seq=70, key_heads=3, group=1, key_dim=5, value_dim=9),
    "no tokens": dict(seq=0),
}


QUICK = ("less than a chunk", "many chunks", "extreme decays", "no tokens")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CASES])
def test_chunked_is_the_definition(name):
    """Outputs, final state and all gradients: in float64 to its own precision, so no term is missing; in float32."""
    x = inputs(**CASES[name])
    want = exact(x)
    with jax.enable_x64(True):
        agree(everything(x, "chunked", np.float64), want, 1e-11)
    agree(everything(x, "chunked", np.float32), want, TOLERANCE)


@pytest.mark.parametrize("name", ["less than a chunk", "extreme decays"])
def test_chunked_where_a_mesh_is_of_cpus(name):
    """Decays are summed up in another way there."""
    x, mesh = inputs(**CASES[name]), make_mesh()
    want = exact(x)
    with jax.enable_x64(True):
        agree(everything(x, "chunked", np.float64, mesh=mesh), want, 1e-11)
    agree(everything(x, "chunked", np.float32, mesh=mesh), want, TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_masks(side):
    x = inputs(100)
    place, lengths = np.arange(100), np.array([[71], [0]])
    mask = {
        "left": place >= lengths,
        "right": place < lengths,
        "holes": np.random.default_rng(0).random((2, 100)) < 0.5,
    }
    mask = jnp.asarray(mask[side])
    agree(everything(x, "chunked", np.float32, mask), exact(x, mask), TOLERANCE)


def test_bfloat16_values_are_rounded_once():
    x = inputs(100)
    low = {n: jnp.asarray(a, jnp.bfloat16 if n == "v" else jnp.float32) for n, a in x.items()}
    wide = {n: jnp.asarray(a, jnp.float32) for n, a in low.items()}
    out, state = gated_delta(**low)
    want, last = gated_delta(**wide)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(want.astype(jnp.bfloat16), np.float32))
    np.testing.assert_array_equal(state, last)


@st.composite
def calls(draw):
    seq = draw(st.sampled_from([2, 17, 64, 66, 129]))
    sizes = dict(
        batch=draw(st.integers(1, 2)),
        key_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from([1, 4, 7])),
        value_dim=draw(st.sampled_from([1, 5])),
        decay=draw(st.sampled_from([0.0, 0.1, 5.0, np.inf])),
        seed=draw(st.integers(0, 2**32)),
    )
    return {n: jnp.asarray(a, jnp.float32) for n, a in inputs(seq, **sizes).items()}, draw(st.integers(0, seq))


def near(a, b):
    assert a.shape == b.shape
    if a.size:
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= TOLERANCE * max(1.0, np.abs(np.asarray(b)).max())


@settings(max_examples=6, deadline=None)
@given(calls())
def test_a_sequence_may_be_cut_anywhere(call):
    """The state handed on after any token continues the sequence; so do the parts, which know no state before."""
    x, cut = call
    run, parts = jax.jit(lambda x: gated_delta(**x)), jax.jit(lambda x: gated_delta_parts(**x))
    out, state = run(x)
    first = {n: a if n == "state" else a[:, :cut] for n, a in x.items()}
    second = {n: a[:, cut:] for n, a in x.items() if n != "state"}
    before, between = run(first)
    after, last = run({**second, "state": between})
    near(jnp.concatenate([before, after], axis=1), out)
    near(last, state)
    free, moved, reach, transition = parts(second)
    near(free + jnp.einsum("bshk,bhkv->bshv", reach, between), after)
    near(moved + transition @ between, last)


@settings(max_examples=4, deadline=None)
@given(calls(), st.integers(0, 2**16))
def test_masked_tokens_do_not_matter(call, seed):
    """Whatever finite numbers stand there: outputs elsewhere, the state and the gradients are the same bits."""
    x, _ = call
    rng = np.random.default_rng(seed)
    mask = jnp.asarray(rng.random(x["beta"].shape[:2]) < 0.6)

    @jax.jit
    def f(x):
        def total(x):
            out, state = gated_delta(**x, mask=mask)
            out = jnp.where(mask[..., None, None], out, 0)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state)), (out, state)

        return jax.value_and_grad(total, has_aux=True)(x)

    def noisy(a):
        return jnp.where(mask.reshape(*mask.shape, *[1] * (a.ndim - 2)), a, -3.0)

    plain, noise = f(x), f({n: a if n == "state" else noisy(a) for n, a in x.items()})
    assert all(jnp.array_equal(a, b) for a, b in zip(plain[0][1], noise[0][1], strict=True))
    for name, grad in plain[1].items():
        near(grad, noise[1][name])
        if name != "state":
            assert not jnp.where(mask.reshape(*mask.shape, *[1] * (grad.ndim - 2)), 0, grad).any()


def test_parts_of_the_definition():
    with jax.enable_x64(True):
        x = {n: jnp.asarray(a) for n, a in inputs(70).items() if n != "state"}
        for got, want in zip(
            *(gated_delta_parts(**x, implementation=n) for n in ("chunked", "reference")), strict=True
        ):
            assert np.abs(got - want).max() <= 1e-12


@pytest.mark.parametrize("size", [1, 2, 8, 16, 64, 128])
def test_triangular_inverse(size):
    """Also where the powers of L reach 1e18 and float32 would have nothing left: all ones, whose inverse is small."""
    lower = np.tril(np.random.default_rng(0).normal(size=(3, size, size)) * 0.3, -1)
    lower[0] = np.tril(np.ones((size, size)), -1)
    want = np.linalg.inv(np.eye(size) + lower)
    got = np.asarray(unit_lower_inverse(jnp.asarray(lower, jnp.float32)))
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= TOLERANCE * np.abs(b).max()
    assert not np.triu(got, 1).any()


def test_memory_of_the_backward_pass():
    """It grows by a state a chunk and a few copies of the arrays, not by products of tokens with tokens or states."""

    def temporaries(seq):
        x = {n: jnp.asarray(a, jnp.float32) for n, a in inputs(seq, batch=1, key_dim=32, value_dim=32).items()}
        loss = jax.grad(lambda x: jnp.sum(gated_delta(**x)[0] ** 2))
        return jax.jit(loss).lower(x).compile().memory_analysis().temp_size_in_bytes

    heads, key_dim, value_dim, more = 6, 32, 32, 4096 - 1024
    per_token = 4 * heads * (2 * key_dim + value_dim + 2)
    states = more // 64 * heads * key_dim * value_dim * 4
    assert temporaries(4096) - temporaries(1024) <= 2 * states + 4 * more * per_token


def test_inside_a_checked_shard_map():
    """Arrays that vary over different axes: q and k whole, the rest split by batch; gradients are summed where due."""
    x = {n: jnp.asarray(a, jnp.float32) for n, a in inputs(70).items()}
    specs = {n: P() if n in ("q", "k") else P("data") for n in x}
    same = {n: jnp.broadcast_to(a[:1], a.shape) if n in ("q", "k") else a for n, a in x.items()}

    def loss(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))

    shard = jax.shard_map(
        lambda x: gated_delta(**x)[0],
        mesh=make_mesh(data=2), in_specs=(specs,), out_specs=P("data"), check_vma=True,
    )  # fmt: skip
    one = {n: a[:1] if n in ("q", "k") else a for n, a in x.items()}
    want = loss(lambda x: gated_delta(**x)[0])(same)
    for name, grad in loss(shard)(one).items():
        near(grad, want[name].sum(0, keepdims=True) if name in ("q", "k") else want[name])


def test_refusals():
    x = {n: jnp.asarray(a, jnp.float32) for n, a in inputs(5).items()}
    with pytest.raises(InputError, match="heads=5 does not divide by the key_heads=2"):
        bad = {n: x[n][:, :, :5] for n in ("v", "log_decay", "beta")}
        gated_delta(**{**x, **bad, "state": x["state"][:, :5]})
    with pytest.raises(InputError, match="'triton' is unknown: use one of 'reference', 'chunked'"):
        gated_delta(**x, implementation="triton")
    assert which_implementation(1) == "reference" and which_implementation(2) == "chunked"
