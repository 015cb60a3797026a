"""The function under shard_map, vmap, remat, scan and jit: the same numbers as on one device, outputs and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_runners import RUNNERS, Runner
from jax.sharding import PartitionSpec as P

from shardzoo.kernels.flash_attention import flash_attention, merge

RNG = np.random.default_rng(7)
Q, K, V, D_OUT = (
    jnp.asarray(RNG.normal(size=(2, n, h, 16)), jnp.float32) for n, h in ((64, 4), (48, 2), (48, 2), (64, 4))
)
BIAS = jnp.asarray(RNG.normal(size=(1, 4, 64, 48)), jnp.float32)
LENGTHS = jnp.asarray([48, 31], jnp.int32)
OPERANDS = (0, 1, 2, 3)


def parametrized(chosen: list[Runner]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("runner", [pytest.param(r, id=r.implementation) for r in chosen])


runners = parametrized(RUNNERS)
runners_in_shard_map = parametrized([r for r in RUNNERS if r.shard_map])


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), ("data", "context", "kv"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def loss(attend, q, k, v, bias):
    """A number whose gradient depends on outputs and lse alike."""
    out, lse = attend(q, k, v, bias)
    return (out * D_OUT).sum() + jnp.sin(jnp.where(jnp.isneginf(lse), 0, lse)).sum()


def result(attend):
    """The loss and its gradients, compiled."""
    return jax.jit(jax.value_and_grad(partial(loss, attend), OPERANDS))(Q, K, V, BIAS)


def direct(implementation: str | None, **options):
    """The call as it stands."""

    def attend(q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, return_lse=True, implementation=implementation, **options)

    return attend


def close(got, want) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-6 * max(1.0, float(jnp.abs(w).max())))


def over_mesh(mesh, implementation: str | None, q_spec: P, kv_spec: P, bias_spec: P):
    """Causal attention with one stretch of the queries per index of "context", if q_spec says so."""

    def attend(q, k, v, bias, lengths):
        split = "context" in q_spec
        offset = 32 * jax.lax.axis_index("context") - 16 if split else -16
        return direct(implementation, causal=True, q_offset=offset, kv_lengths=lengths)(q, k, v, bias)

    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(q_spec, kv_spec, kv_spec, bias_spec, P("data")),
        out_specs=(q_spec, P(*q_spec[:3])),
        check_vma=True,
    )
    return lambda q, k, v, bias: mapped(q, k, v, bias, LENGTHS)


LAYOUTS = {
    # Keys and values whole along "context": their gradients are summed over it.
    "queries-split": (P("data", "context", "kv"), P("data", None, "kv"), P(None, "kv", "context")),
    # The bias is whole on every device along "data": its gradient is summed over it.
    "heads-split": (P("data", None, "kv"), P("data", None, "kv"), P(None, "kv")),
}


@runners_in_shard_map
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_shard_map(runner: Runner, mesh, layout: str):
    want = result(direct("reference", causal=True, q_offset=-16, kv_lengths=LENGTHS))
    with runner.context():
        close(result(over_mesh(mesh, runner.implementation, *LAYOUTS[layout])), want)


def test_shard_map_chosen(mesh):
    want = result(direct("reference", causal=True, q_offset=-16, kv_lengths=LENGTHS))
    close(result(over_mesh(mesh, None, *LAYOUTS["queries-split"])), want)


@runners_in_shard_map
def test_operands_vary_over_different_axes(runner: Runner, mesh):
    """q over "context", k and v over "data" (rows that every q sees half of), the bias over "kv"."""

    def attend(q, k, v, bias):
        out, lse = direct(runner.implementation)(q, k, v, bias)
        # Each device holds its own combination: the sum over all is one number, whole on every device.
        total = (out * out).sum() + jnp.sin(lse).sum()
        return jax.lax.psum(total, ("data", "context", "kv"))

    specs = (P(None, "context"), P(None, "data"), P(None, "data"), P("kv"))
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    bias = jnp.concatenate([BIAS[:, :, :32, :24], BIAS[:, :, 32:, 24:]])

    def by_hand(q, k, v, bias):
        total = 0.0
        for i in range(8):
            part, rows, b = i // 4, i // 2 % 2, i % 2
            out, lse = direct("reference")(
                q[:, 32 * part : 32 * part + 32],
                k[:, 24 * rows : 24 * rows + 24],
                v[:, 24 * rows : 24 * rows + 24],
                bias[b : b + 1],
            )
            total += (out * out).sum() + jnp.sin(lse).sum()
        return total

    want = jax.jit(jax.value_and_grad(by_hand, OPERANDS))(Q, K, V, bias)
    with runner.context():
        close(jax.jit(jax.value_and_grad(mapped, OPERANDS))(Q, K, V, bias), want)


@runners
def test_vmap(runner: Runner):
    """Over q, the lengths and a bias, with k and v shared, and over a traced offset."""
    offsets = jnp.asarray([-20, 0, 16], jnp.int32)
    queries = jnp.stack([Q, Q[::-1], 2 * Q])

    def one(implementation, q, offset, k):
        out, lse = direct(implementation, causal=True, q_offset=offset, kv_lengths=LENGTHS)(q, k, V, BIAS)
        return (out * D_OUT).sum() + jnp.sin(jnp.where(jnp.isneginf(lse), 0, lse)).sum()

    def total(k, implementation):
        return jax.vmap(partial(one, implementation), in_axes=(0, 0, None))(queries, offsets, k)

    def by_hand(k):
        return jnp.stack([one("reference", q, int(o), k) for q, o in zip(queries, offsets, strict=True)])

    with runner.context():
        got = jax.jit(lambda k: jax.vjp(partial(total, implementation=runner.implementation), k)[0])(K)
        close(got, by_hand(K))
        gradient = jax.jit(jax.grad(lambda k: total(k, runner.implementation).sum()))(K)
        close(gradient, jax.grad(lambda k: by_hand(k).sum())(K))


@parametrized([r for r in RUNNERS if r.remat])
def test_remat_and_scan(runner: Runner):
    """As in a stack of layers: each layer is recomputed in the backward pass."""

    def layers(implementation, q):
        def layer(x, _):
            return x + flash_attention(x, K, V, causal=True, implementation=implementation), None

        return (jax.lax.scan(jax.checkpoint(layer), q, None, length=3)[0] * D_OUT).sum()

    with runner.context():
        got = jax.jit(jax.value_and_grad(partial(layers, runner.implementation)))(Q)
    close(got, jax.value_and_grad(partial(layers, "reference"))(Q))


def test_saved_names_spare_the_second_forward_pass():
    """A policy of jax.checkpoint that keeps output and lse spares the product of weights and values.

    The backward pass computes the product of queries and keys in any case, and XLA shares it.
    """

    def flops(*names: str) -> float:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(lambda q: flash_attention(q, K, V, implementation="blockwise").sum(), policy=policy)
        return jax.jit(jax.value_and_grad(layer)).lower(Q).compile().cost_analysis()["flops"]

    product = 2 * Q.size * K.shape[1]
    assert flops() - flops("attention_out", "attention_lse") >= product


@runners
def test_deterministic(runner: Runner):
    with runner.context():
        step = jax.jit(jax.value_and_grad(partial(loss, direct(runner.implementation, causal=True)), OPERANDS))
        first, second = step(Q, K, V, BIAS), step(Q, K, V, BIAS)
    assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


@runners
def test_merged_shards_are_the_whole(runner: Runner):
    """Keys in three shards, the last without any valid key, and one row of the batch without any at all."""
    cuts = ((0, 20), (20, 33), (33, 48))
    lengths = jnp.asarray([33, 0], jnp.int32)

    def merged(q, k, v, bias):
        parts = [
            flash_attention(
                q,
                k[:, a:b],
                v[:, a:b],
                bias=bias[..., a:b],
                kv_lengths=lengths - a,
                causal=True,
                q_offset=-16 - a,
                return_lse=True,
                implementation=runner.implementation,
            )
            for a, b in cuts
        ]
        return merge([out for out, _ in parts], [lse for _, lse in parts])

    want = result(direct("reference", causal=True, kv_lengths=lengths))
    with runner.context():
        close(result(merged), want)
        out, lse = merged(Q, K, V, BIAS)
    assert not out[1].any() and jnp.isneginf(lse[1]).all()


def test_reference_is_differentiable_forwards_and_twice():
    def f(q):
        return (flash_attention(q, K, V, implementation="reference") ** 2).sum()

    _, tangent = jax.jvp(f, (Q,), (D_OUT,))
    np.testing.assert_allclose(tangent, (jax.grad(f)(Q) * D_OUT).sum(), rtol=1e-5)
    assert jnp.isfinite(jax.grad(lambda q: (jax.grad(f)(q) ** 2).sum())(Q)).all()


def test_gradient_beside_a_frozen_bias_with_the_implementation_left_open():
    """The platform decides at lowering, so every implementation gives the same gradients for what is asked."""
    q, bias = jnp.ones((1, 8, 2, 8)), jnp.linspace(0, 1, 128).reshape(1, 2, 8, 8)

    def loss(q, implementation=None):
        return jnp.sum(flash_attention(q, q, q, bias=bias, implementation=implementation) ** 2)

    got, want = jax.jit(jax.grad(loss))(q), jax.grad(loss)(q, "reference")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
