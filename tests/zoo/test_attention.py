"""Attention over a mesh against a float64 definition: every exchange of heads and sequence, forward and gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from mesh_parity import assert_close, check

from shardzoo.zoo import attention as module
from shardzoo.zoo.attention import Exchange, attention, cached_attention, cross_attention, exchange
from shardzoo.zoo.mesh import CONTEXT, KV, TP, make_mesh

B, S, D = 4, 24, 6
Q_SPEC, KV_SPEC = P("data", CONTEXT, TP), P("data", CONTEXT, None, KV)
LENGTHS = np.array([24, 13, 1, 0], np.int32)
rng = np.random.default_rng(7)
SEGMENTS = np.sort(rng.integers(0, 4, (B, S)), axis=1).astype(np.int32)


def softmax_attention(
    q, kv, *, causal=False, window=None, scale=None, soft_cap=None, lengths=None, segment_ids=None, bias=None
):
    """The definition, with an S x S matrix; rows with nothing to see are zero."""
    group = q.shape[2] // kv.shape[3]
    k, v = (jnp.repeat(kv[:, :, i], group, axis=2) for i in (0, 1))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (D**-0.5 if scale is None else scale)
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    logits = logits if bias is None else logits + bias
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(kv.shape[1])[None]
    see = jnp.ones((q.shape[0], 1, q.shape[1], kv.shape[1]), bool)
    see &= (j <= i) if causal else True
    see &= (j > i - window) & (j < i + window) if window else True
    if lengths is not None:
        see &= (jnp.maximum(i, j) < lengths[:, None, None])[:, None]
    if segment_ids is not None:
        see &= (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
    top = jnp.max(jnp.where(see, logits, -1e30), -1, keepdims=True)
    weights = jnp.where(see, jnp.exp(jnp.where(see, logits - top, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", weights / jnp.where(total == 0, 1, total), v)


def inputs(heads, kv_heads):
    q = rng.normal(size=(B, S, heads, D)).astype(np.float32)
    return q, rng.normal(size=(B, S, 2, kv_heads, D)).astype(np.float32)


MESHES = {
    (8, 2): [
        dict(),
        dict(context=2),  # both divide
        dict(context=4),  # query heads divide, each KV head is sent twice
        dict(context=8),
        dict(context=3),  # nothing divides: gathered
        dict(tensor=2),
        dict(tensor=4, kv_heads=2),  # KV heads repeat over rep
        dict(tensor=8, kv_heads=2),
        dict(context=2, tensor=2),
        dict(context=2, tensor=4, kv_heads=2),
        dict(context=4, tensor=2),
        dict(data=2, context=2, tensor=2),
    ],
    (9, 3): [dict(context=3), dict(context=2, tensor=3), dict(tensor=3), dict(data=2, context=3)],
    (12, 4): [dict(context=6), dict(context=3), dict(tensor=2, context=3)],  # pairs that straddle a device
    (12, 12): [dict(context=8), dict(context=4, tensor=2)],  # heads 4 x rows 2; 2 x 2
    (6, 2): [dict(context=4), dict(context=8), dict(context=2, tensor=2), dict(context=4, tensor=2)],
    (6, 6): [dict(context=2, tensor=3), dict(context=4), dict(tensor=2, context=3)],
}
OPTIONS = [
    dict(),
    dict(causal=True),
    dict(lengths=LENGTHS),
    dict(causal=True, lengths=LENGTHS, window=5),
    dict(segment_ids=SEGMENTS, soft_cap=2.0, scale=0.7),
    dict(causal=True, segment_ids=SEGMENTS, lengths=LENGTHS),
]


def call_with(options):
    """The call inside shard_map, its mask arrays split as they must be."""

    def call(_, q, kv, lengths, segment_ids):
        given = dict(lengths=lengths, segment_ids=segment_ids)
        return attention(q, kv, **{k: given.get(k, v) for k, v in options.items()})

    return call


def check_attention(heads, degrees, options):
    q, kv = inputs(*heads)
    check(
        (),
        [make_mesh(**d) for d in degrees],
        call_with(options),
        lambda _, q, kv, lengths, ids: softmax_attention(
            q, kv, **{k: dict(lengths=lengths, segment_ids=ids).get(k, v) for k, v in options.items()}
        ),
        [q, kv, LENGTHS, SEGMENTS],
        [Q_SPEC, KV_SPEC, P("data"), P("data", CONTEXT)],
        Q_SPEC,
    )


@pytest.mark.parametrize("heads", MESHES, ids=str)
def test_every_exchange(heads):
    check_attention(heads, MESHES[heads], OPTIONS[3])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_every_mask(options):
    """On one mesh with all-to-all, repeated KV heads and rep, one that gathers, one that does both."""
    check_attention((8, 2), [dict(context=2, tensor=4, kv_heads=2), dict(context=3), dict(context=6)], options)


def test_bias():
    """An additive bias per head, split over the tensor axes, whole over the sequence."""
    q, kv = inputs(8, 8)
    bias = rng.normal(size=(1, 8, S, S)).astype(np.float32)
    bias[0, :, 3, :5] = -np.inf

    def call(_, q, kv, bias):
        return attention(q, kv, bias=bias)

    meshes = [make_mesh(**d) for d in (dict(), dict(tensor=2, context=2), dict(context=3), dict(context=6))]
    reference = lambda _, q, kv, bias: softmax_attention(q, kv, bias=bias)  # noqa: E731
    check((), meshes, call, reference, [q, kv, bias], [Q_SPEC, P("data", CONTEXT, None, TP), P(None, TP)], Q_SPEC)


def test_distance_bias():
    """A bias by distance is the same as that bias written out, for all exchanges, with the same gradient."""
    q, kv = inputs(8, 8)
    values = rng.normal(size=(8, 2 * S - 1)).astype(np.float32)
    distances = np.arange(S) - np.arange(S)[:, None]

    def call(_, q, kv, values):
        return attention(q, kv, distance_bias=values)

    def reference(_, q, kv, values):
        return softmax_attention(q, kv, bias=values[None, :, distances + S - 1])

    meshes = [make_mesh(**d) for d in (dict(), dict(tensor=2, context=2), dict(context=3), dict(context=6))]
    check((), meshes, call, reference, [q, kv, values], [Q_SPEC, P("data", CONTEXT, None, TP), P(TP)], Q_SPEC)


def test_cross_attention():
    q, _ = inputs(8, 2)
    kv = rng.normal(size=(B, 7, 2, 2, D)).astype(np.float32)
    lengths = np.array([7, 3, 0, 1], np.int32)

    def reference(_, q, kv, lengths):
        mask = jnp.where(jnp.arange(7)[None] < lengths[:, None], 0.0, -jnp.inf)[:, None, None]
        seen = softmax_attention(q, kv, bias=jnp.maximum(mask, -1e9))
        return jnp.where((lengths > 0)[:, None, None, None], seen, 0)

    meshes = [make_mesh(**d) for d in (dict(), dict(context=4, tensor=2), dict(tensor=4, kv_heads=2))]
    check(
        (),
        meshes,
        lambda _, q, kv, n: cross_attention(q, kv, kv_lengths=n),
        reference,
        [q, kv, lengths],
        [Q_SPEC, P("data", None, None, KV), P("data")],
        Q_SPEC,
    )


@pytest.mark.parametrize(
    "degrees", [dict(), dict(context=4), dict(context=2, tensor=4, kv_heads=2), dict(context=8)], ids=str
)
def test_cached_attention(degrees):
    """One query per row against slots split over context; one row sees nothing."""
    mesh = make_mesh(**degrees)
    q = rng.normal(size=(B, 1, 8, D)).astype(np.float32)
    k, v = rng.normal(size=(2, B, S, 2, D)).astype(np.float32)
    visible = np.where(rng.random((B, S)) < 0.5, 0, -1).astype(np.int32)
    visible[1], visible[2, : S // 2] = -1, -1
    f = jax.jit(
        jax.shard_map(
            lambda *a: cached_attention(*a, soft_cap=3.0),
            mesh=mesh,
            in_specs=(P("data", None, TP), P("data", CONTEXT, KV), P("data", CONTEXT, KV), P("data", CONTEXT)),
            out_specs=P("data", None, TP),
        )
    )
    with jax.enable_x64(True):
        mask = jnp.where(visible == 0, 0.0, -1e9)[:, None, None]
        wide = [jnp.asarray(x, jnp.float64) for x in (q, np.stack([k, v], axis=2))]
        want = np.array(softmax_attention(*wide, soft_cap=3.0, bias=mask))
    want[1] = 0
    assert_close(np.asarray(f(q, k, v, visible)), want)


def test_exchange_sends_each_kv_head_where_it_is_read():
    """For every head count and degree: the KV heads a device receives are those its query heads read."""
    for kv_heads in range(1, 7):
        for group in range(1, 7):
            heads = kv_heads * group
            for degree in range(2, 13):
                plan = exchange(heads, kv_heads, degree)
                assert plan.heads * plan.rows == degree and heads % plan.heads == 0
                assert all(heads % ways for ways in range(plan.heads + 1, degree + 1) if degree % ways == 0)
                index = np.arange(kv_heads) if plan.kv_index is None else np.array(plan.kv_index)
                sent = index.reshape(plan.heads, -1)
                per_device = heads // plan.heads
                received = np.repeat(sent, per_device // sent.shape[1], axis=1)
                assert np.array_equal(received.reshape(-1), np.arange(heads) // group), (heads, kv_heads, degree)


def test_collectives_are_those_of_the_docstring():
    counts = {}
    meshes = {"heads": 2, "repeated": 8, "rows": 3, "both": 6}
    for name, degrees in {name: dict(context=degree) for name, degree in meshes.items()}.items():
        f = jax.shard_map(
            lambda q, kv: attention(q, kv, causal=True),
            mesh=make_mesh(**degrees),
            in_specs=(Q_SPEC, KV_SPEC),
            out_specs=Q_SPEC,
        )
        text = jax.jit(f).lower(*inputs(8, 2)).compile().as_text()
        counts[name] = tuple(text.count(f" {op}(") for op in ("all-to-all", "all-gather", "all-reduce"))
    assert counts == {"heads": (3, 0, 0), "repeated": (3, 0, 0), "rows": (0, 1, 0), "both": (3, 1, 0)}


def test_what_is_exchanged_is_sent_as_it_lies():
    """Each neighbour's part is an entry of one dim before and after: else a TPU lays all of it out anew, slowly."""
    f = jax.shard_map(attention, mesh=make_mesh(context=4), in_specs=(Q_SPEC, KV_SPEC), out_specs=Q_SPEC)
    text = jax.jit(f).lower(*inputs(8, 8)).as_text()
    found = re.findall(r"all_to_all.*concat_dimension = (\d+).*split_dimension = (\d+)", text)
    assert found == [("1", "1")] * 3


# The faults that these checks are there for, made on purpose.


def test_a_wrong_pairing_is_caught(monkeypatch):
    monkeypatch.setattr(module, "exchange", lambda h, k, n: Exchange(n, 1, exchange(h, k, n).kv_index[::-1]))
    with pytest.raises(AssertionError, match="of the reference's maximum"):
        check_attention((8, 2), [dict(context=4)], dict())


def test_kv_heads_split_over_the_wrong_axis_are_caught(monkeypatch):
    monkeypatch.setitem(globals(), "KV_SPEC", P("data", CONTEXT, None, "rep"))
    with pytest.raises(AssertionError, match="of the reference's maximum"):
        check_attention((8, 2), [dict(tensor=4, kv_heads=2)], dict())


def test_a_wrong_position_is_caught(monkeypatch):
    monkeypatch.setattr(module.lax, "axis_index", lambda axis: jnp.int32(0))
    with pytest.raises((AssertionError, ValueError), match=r"maximum|varying"):
        check_attention((8, 2), [dict(context=3)], dict(causal=True))
