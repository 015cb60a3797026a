"""Random shapes, masks and splits of the keys: nothing about a call may depend on how it is cut."""

from functools import partial
from itertools import pairwise

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardzoo.kernels.flash_attention import flash_attention, merge

TOLERANCE = 1e-5
STATIC = ("causal", "window", "soft_cap")


@st.composite
def calls(draw) -> tuple[dict, dict]:
    """Arrays q, k, v, d_out, d_lse and options. Lengths on both sides of the size of a tile; any mix of masks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = st.sampled_from([1, 2, 31, 64, 511, 513, 700, 1025])
    batch, q_len, kv_len = draw(st.integers(1, 2)), draw(length), draw(length)
    kv_heads, group, head_dim = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 8, 40]))
    query, key = (batch, q_len, kv_heads * group, head_dim), (batch, kv_len, kv_heads, head_dim)
    shapes = {"q": query, "k": key, "v": key, "d_out": query, "d_lse": query[:3]}
    arrays = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    options = {"causal": draw(st.booleans()), "soft_cap": draw(st.sampled_from([None, 1.5]))}
    options["window"] = draw(st.none() | st.integers(1, 2 * kv_len))
    options["q_offset"] = draw(st.none() | st.integers(-q_len - 5, kv_len + 5))
    for name, most in (("q_lengths", q_len), ("kv_lengths", kv_len)):
        if draw(st.booleans()):
            options[name] = jnp.asarray(rng.integers(0, most + 1, batch), jnp.int32)
    if draw(st.booleans()):
        kinds = draw(st.integers(1, 4))
        for name, n in (("q_segment_ids", q_len), ("kv_segment_ids", kv_len)):
            options[name] = jnp.asarray(rng.integers(0, kinds, (batch, n)), jnp.int32)
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, query[2]])), q_len, kv_len)
        bias = np.where(rng.random(shape) < draw(st.sampled_from([0, 0.5, 1])), -np.inf, rng.normal(size=shape))
        options["bias"] = jnp.asarray(bias, jnp.float32)
    return arrays, options


def agree(got, want) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want)
    assert np.array_equal(np.isneginf(got), np.isneginf(want))
    got, want = np.where(np.isneginf(want), 0, got), np.where(np.isneginf(want), 0, want)
    assert np.abs(got - want).max() <= TOLERANCE * max(1.0, np.abs(want).max())


@settings(max_examples=20, deadline=None)
@given(calls())
def test_blockwise_is_the_definition(call: tuple[dict, dict]):
    arrays, options = call
    bias = options.pop("bias", None)

    def attend(q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, return_lse=True, implementation="blockwise", **options)

    @jax.jit
    def everything(q, k, v, d_out, d_lse, bias):
        results, pull = jax.vjp(attend, q, k, v, bias)
        return *results, *pull((d_out, d_lse))

    truth = oracle.attention(*arrays.values(), bias=bias, **options)
    for got, name in zip(everything(**arrays, bias=bias), vars(truth), strict=False):
        if got is not None:
            agree(got, getattr(truth, name))


@settings(max_examples=6, deadline=None)
@given(calls(), st.lists(st.integers(0, 1025), max_size=3))
def test_any_split_of_the_keys_merges_to_the_whole(call: tuple[dict, dict], cuts: list[int]):
    arrays, options = call
    q, k, v = (arrays[n] for n in "qkv")
    kv_len = k.shape[1]
    offset = options.pop("q_offset")
    offset = kv_len - q.shape[1] if offset is None else offset
    attend = jax.jit(partial(flash_attention, implementation="blockwise", return_lse=True), static_argnames=STATIC)
    whole = attend(q, k, v, q_offset=offset, **options)
    edges = [0, *sorted({c for c in cuts if 0 < c < kv_len}), kv_len]
    parts = []
    for first, last in pairwise(edges):
        part = {n: x for n, x in options.items() if n not in ("kv_lengths", "kv_segment_ids", "bias")}
        if "kv_lengths" in options:
            part["kv_lengths"] = options["kv_lengths"] - first
        if "kv_segment_ids" in options:
            part["kv_segment_ids"] = options["kv_segment_ids"][:, first:last]
        if "bias" in options:
            part["bias"] = options["bias"][..., first:last]
        keys, values = k[:, first:last], v[:, first:last]
        parts.append(attend(q, keys, values, q_offset=offset - first, **part))
    out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    agree(out, whole[0])
    agree(lse, whole[1])


@settings(max_examples=6, deadline=None)
@given(calls(), st.integers(0, 2**16))
def test_hidden_keys_do_not_matter(call: tuple[dict, dict], seed: int):
    """Whatever finite numbers stand beyond a row's length, outputs and gradients are the same bits."""
    arrays, options = call
    q, k, v, d_out, _ = arrays.values()
    rng = np.random.default_rng(seed)
    lengths = jnp.asarray(rng.integers(0, k.shape[1] + 1, k.shape[0]), jnp.int32)
    options["kv_lengths"] = lengths
    hidden = (jnp.arange(k.shape[1]) >= lengths[:, None])[:, :, None, None]

    @jax.jit
    def gradients(k, v):
        out, pull = jax.vjp(lambda q, k, v: flash_attention(q, k, v, implementation="blockwise", **options), q, k, v)
        return out, *pull(d_out)

    plain = gradients(k, v)
    noise = gradients(jnp.where(hidden, 1e4, k), jnp.where(hidden, -1e4, v))
    assert all(jnp.array_equal(a, b) for a, b in zip(plain, noise, strict=True))
    assert not jnp.where(hidden, plain[2], 0).any() and not jnp.where(hidden, plain[3], 0).any()
